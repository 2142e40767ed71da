"""What is a name on the hub, and what a path."""

from __future__ import annotations

import pytest

from gapless.base.config import EngineConfig
from gapless.base.errors import ConfigError
from gapless.engine.frontdoor import locate, open_assets
from gapless.hub.names import is_hub_name


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "org/name", "a/b.c_d-e", "_x/1"])
def test_a_name_of_the_hub_is_recognised(name):
    assert is_hub_name(name)


@pytest.mark.parametrize(
    "path",
    [
        *("demo", "name", "./x", "/x", "../x", "~/x", "org/", "/org/name", "a/b/c", "a//b", "org/na--me", "org/.."),
        *("a\\b", "", "org/näme", "org/na me", "org/name\n", "-org/name", "https://host/x", "org/name@main"),
    ],
)
def test_a_path_is_no_name_of_the_hub(path):
    assert not is_hub_name(path)


def test_a_path_that_exists_is_no_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("models/mine")
    (tmp_path / "models" / "mine").mkdir(parents=True)
    assert not is_hub_name("models/mine")
    (tmp_path / "models" / "file").write_text("")
    assert not is_hub_name("models/file")


@pytest.mark.parametrize("path", ["./x", "/x", "x"])
def test_a_path_that_is_not_there_is_refused(path):
    with pytest.raises(ConfigError, match=f"no directory '{path}'; give that of a checkpoint, a GGUF file, a name on"):
        open_assets(*locate(EngineConfig(model=path)))


def test_a_directory_has_no_revisions(tmp_path):
    with pytest.raises(ConfigError, match=r"revision: .* leave out --revision"):
        locate(EngineConfig(model=str(tmp_path), revision="main"))
    with pytest.raises(ConfigError, match="revision: 'demo'"):
        locate(EngineConfig(revision="main"))
