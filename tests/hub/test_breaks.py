"""Connections that break, hubs that lie or dawdle, disks that fill: what has arrived is kept, what is wrong is not."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from hub.conftest import WEIGHTS, point_to
from hub.loopback import Hub
from huggingface_hub import constants
from sharpest import sharpest
from waiting import until

from gapless.base.config import EngineConfig
from gapless.base.errors import CheckpointError, ConfigError, GaplessError, ServerError
from gapless.engine.frontdoor import locate
from gapless.hub import progress, pull, repo

NAME = "org/tiny"
CONFIG = EngineConfig(model=NAME)
THIRD = len(WEIGHTS) // 3


@pytest.fixture
def small(hub, tiny):
    """All of the model but the weights is here."""
    hub.add(NAME, tiny)
    locate(EngineConfig(model=NAME, load_format="dummy"))
    hub.asked.clear()
    return hub


@pytest.fixture
def nowhere(monkeypatch):
    """The address of a hub that does not answer: the port is taken, and no process listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def weights() -> bytes:
    return (Path(locate(CONFIG).config.model) / "model.safetensors").read_bytes()


def begins(hub: Hub) -> list[int]:
    """Where each GET of the weights began."""
    gets = [a for a in hub.asked if a.method == "GET" and a.path.endswith("model.safetensors")]
    return [int(a.range.removeprefix("bytes=").rstrip("-")) for a in gets]


def partial(cache: Path) -> Path:
    (found,) = cache.rglob("*.incomplete")
    return found


@pytest.mark.parametrize("kind", ["cut", "reset", "short", pytest.param("stall", marks=pytest.mark.seeds)])
def test_a_broken_connection_is_taken_up_again(small, kind, caplog, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 2 if kind == "stall" else 60)
    monkeypatch.setattr(pull, "WAITS", (0.0,) * 5)  # on a busy machine an abort may leave nothing to read
    small.trouble = [f"{kind}:{THIRD}", "503", f"{kind}:{THIRD}"]
    assert weights() == WEIGHTS
    first, *more = begins(small)
    assert first == 0 and len(more) == 3
    # What had not been read when an abort came is lost; the rest is not asked for twice.
    assert more == sorted(more) and (kind == "reset" or more == [THIRD, THIRD, 2 * THIRD])
    assert [r.levelname for r in caplog.records if "broken off at" in r.message] == ["WARNING"] * 3


def test_the_next_start_goes_on_where_one_gave_up(small, cache):
    small.trouble = [f"cut:{THIRD}", "503", "503", "503"]
    with pytest.raises(ServerError, match=rf"model: .* does not give {NAME} now \(status 503\): try again later"):
        weights()
    assert partial(cache).read_bytes() == WEIGHTS[:THIRD]
    assert weights() == WEIGHTS
    assert begins(small) == [0, THIRD, THIRD, THIRD, THIRD]
    assert not list(cache.rglob("*.incomplete"))


def test_a_hub_that_never_gets_beyond_a_point_is_given_up(small):
    """It ignores the range, so each connection brings the same third: that is no progress."""
    small.trouble = ["cut:1000", *["whole:1000"] * 20]
    with pytest.raises(ServerError, match="could not be fetched"):
        weights()
    assert len(begins(small)) == 3


@pytest.mark.seeds
def test_a_hub_that_ignores_the_range_gives_the_file_all_the_same(small):
    small.trouble = [f"cut:{THIRD}", "whole"]
    assert weights() == WEIGHTS
    assert begins(small) == [0, THIRD]


@pytest.mark.parametrize("trouble", [["other"], [f"cut:{THIRD}", "other"], ["endless"]])
def test_content_of_another_hash_is_deleted_and_refused(small, cache, trouble):
    small.trouble = trouble
    with pytest.raises(CheckpointError, match=f"{NAME}: model.safetensors arrived with other content .* was deleted"):
        weights()
    assert not list(cache.rglob("*.incomplete")) and not list(cache.rglob("model.safetensors"))
    assert weights() == WEIGHTS
    assert small.sent < 32 * len(WEIGHTS)  # of 64: it is not read to its end


def test_a_beginning_of_another_file_is_deleted_and_refused(small, cache):
    small.trouble = [f"cut:{THIRD}", "503", "503", "503"]
    with pytest.raises(ServerError):
        weights()
    partial(cache).write_bytes(bytes(THIRD))
    with pytest.raises(CheckpointError, match="other content"):
        weights()
    assert weights() == WEIGHTS


def test_two_starts_at_once_fetch_each_file_once(hub, tiny):
    hub.add(NAME, tiny)
    hub.delay = 0.02  # so that all of them are at the same file
    found: list[bytes] = []
    starts = [threading.Thread(target=lambda: found.append(weights())) for _ in range(3)]
    for start in starts:
        start.start()
    for start in starts:
        start.join()
    assert found == [WEIGHTS] * 3
    large = Counter(name for name in hub.fetched() if name in ("model.safetensors", "tokenizer.json"))
    assert set(large.values()) == {1}


def test_a_disk_that_is_too_small_is_refused_before_the_fetch(small, monkeypatch, cache):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=len(WEIGHTS) - 1))
    with pytest.raises(
        ConfigError, match=rf"no room for {NAME}: 1 MB are needed and \S+ has 1 MB free.*--download-dir"
    ):
        weights()
    assert not begins(small)
    small.trouble = ["cut:1000", "503", "503", "503"]  # what has arrived counts
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**9))
    with pytest.raises(ServerError):
        weights()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=len(WEIGHTS) - 1000))
    assert weights() == WEIGHTS


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_fills_up_is_named(small, cache):
    blob = cache / "models--org--tiny" / "blobs" / hashlib.sha256(WEIGHTS).hexdigest()
    blob.with_name(blob.name + ".incomplete").symlink_to("/dev/full")
    with pytest.raises(ConfigError, match=rf"no room for {NAME}: \S+ is full\. Free some, .*HF_HOME"):
        weights()


@pytest.mark.seeds
def test_a_hub_that_is_too_slow_is_a_server_error(small, monkeypatch, caplog):
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.1)
    small.delay = 0.3
    with pytest.raises(ServerError, match=r"model: HF_HUB|model: org/tiny could not be fetched from \S+ \(ReadTimeout"):
        locate(EngineConfig(model=NAME, download_dir="/nowhere"))
    assert locate(EngineConfig(model=NAME, load_format="dummy")).commit in caplog.text  # from the cache
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 10)
    small.delay = 0.02
    assert weights() == WEIGHTS


OFFLINE = "model: HF_HUB_OFFLINE is set, so the hub is not asked for org/tiny: unset it"


@pytest.mark.parametrize("how", sharpest(["down", "private", "offline", "busy", "closed"], keep=2))
def test_a_start_without_the_hub_uses_the_cache_and_says_why(hub, tiny, nowhere, monkeypatch, how, caplog):
    commit = hub.add(NAME, tiny)
    config = EngineConfig(model=NAME, load_format="dummy")
    before = locate(config)

    words: dict[str, tuple[type[GaplessError], str]] = {
        "down": (ServerError, f"model: {NAME} could not be fetched from {nowhere} (ConnectError: "),
        "offline": (ConfigError, OFFLINE),
        "busy": (ServerError, f"model: {hub.url} does not give {NAME} now (status 503): try again later"),
        "closed": (ServerError, f"model: {NAME} could not be fetched from {hub.url} (JSONDecodeError: "),
        "private": (ConfigError, f"model: '{NAME}' is no directory here, and {hub.url} shows no model of that name"),
    }
    if how == "down":
        point_to(nowhere, monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", how == "offline")
    hub.status = 503 if how == "busy" else None
    hub.page = b"<html>pay first</html>" if how == "closed" else b""
    hub.models[NAME].hidden = how == "private"

    caplog.clear()
    assert locate(config) == before
    (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and r.name == "gapless.hub"]
    kind, text = words[how]
    assert line.startswith(text) and line.endswith(f"Using commit {commit}, which is in the cache")

    with pytest.raises(kind) as incomplete:  # the weights are not there
        locate(CONFIG)
    assert str(incomplete.value).startswith(text)
    assert str(incomplete.value).endswith(f"the cached snapshot of commit {commit} lacks model.safetensors")
    with pytest.raises(kind) as unknown:
        locate(EngineConfig(model="org/other"))
    assert str(unknown.value).startswith(text.replace(NAME, "org/other"))


def test_a_revision_that_is_gone_is_not_taken_from_the_cache(hub, tiny):
    hub.add(NAME, tiny, revision="tag")
    locate(EngineConfig(model=NAME, revision="tag"))
    del hub.models[NAME].refs["tag"]
    with pytest.raises(ConfigError, match="org/tiny has no revision 'tag': give another branch, tag or commit"):
        locate(EngineConfig(model=NAME, revision="tag"))


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        ((403, "GatedRepo", ""), r"org/tiny is gated: accept its terms at http://\S+/org/tiny, then set HF_TOKEN"),
        ((401, "GatedRepo", ""), r"org/tiny is gated: accept its terms"),
        (
            (401, "", "Invalid credentials in Authorization header"),
            r"refuses org/tiny \(Invalid credentials .*HF_TOKEN",
        ),
        ((403, "", ""), r"refuses org/tiny \(status 403\): check the spelling, and set HF_TOKEN"),
        ((404, "RepoNotFound", ""), r"'org/tiny' is no directory here, and http://\S+ shows no model of that name"),
    ],
)
def test_files_that_are_refused_say_why(hub, tiny, refusal, words):
    hub.add(NAME, tiny)
    hub.models[NAME].refusal = refusal
    with pytest.raises(ConfigError, match=f"^model: .*{words}"):
        locate(CONFIG)


def test_a_token_that_no_header_can_carry_is_refused(hub, tiny, monkeypatch):
    hub.add(NAME, tiny)
    monkeypatch.setenv("HF_TOKEN", "hf_tökën")
    with pytest.raises(ConfigError, match=r"^model: the token for org/tiny holds .* set HF_TOKEN"):
        locate(CONFIG)


def test_a_model_that_is_not_there_is_refused(hub):
    with pytest.raises(ConfigError, match=r"'org/none' is no directory here, and http.* check the spelling"):
        locate(EngineConfig(model="org/none"))
    with pytest.raises(ConfigError, match=r"^tokenizer: 'org/none' is no directory here"):
        locate(EngineConfig(tokenizer="org/none"))


@pytest.mark.parametrize("name", sharpest(["model.safetensors", "tokenizer.json", "config.json"]))
def test_a_cached_file_that_was_cut_off_is_fetched_again(hub, tiny, name):
    hub.add(NAME, tiny)
    file = Path(locate(CONFIG).config.model) / name
    file.write_bytes(tiny[name][:100])
    hub.asked.clear()
    locate(CONFIG)
    assert hub.fetched() == [name] and file.read_bytes() == tiny[name]


@pytest.mark.seeds
def test_a_start_that_waits_for_the_fetch_of_another_says_so(small, monkeypatch, caplog):
    caplog.set_level("INFO", "gapless.hub")
    monkeypatch.setattr(repo, "UNLOGGED_SECONDS", 0.05)
    text = "org/tiny: model.safetensors: another start fetches it; waiting for that"
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 60)
    small.trouble = [f"stall:{THIRD}"]
    with ThreadPoolExecutor(2) as starts:
        first = starts.submit(weights)
        until(lambda: begins(small))
        second = starts.submit(weights)
        until(lambda: text in caplog.messages)
        small.closing.set()  # the connection that has stalled is closed
        assert [start.result(60) for start in (first, second)] == [WEIGHTS] * 2
    assert caplog.messages.count(text) == 1 and begins(small) == [0, THIRD]


def test_a_cache_that_is_a_file_is_refused(hub, tiny, tmp_path):
    hub.add(NAME, tiny)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"org/tiny cannot be written to .*/file \(.*\): name another folder with"):
        locate(EngineConfig(model=NAME, download_dir=str(tmp_path / "file")))


SETTINGS = ["HF_ENDPOINT=http://localhost:99999", "HF_HUB_ETAG_TIMEOUT=3s", "HF_HUB_DOWNLOAD_TIMEOUT=x"]


@pytest.mark.process
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_that_huggingface_hub_cannot_read_is_an_error_that_names_it(setting):
    name, _, value = setting.partition("=")
    command = [sys.executable, "-m", "gapless", "run", "--model", NAME, "hi"]
    done = subprocess.run(command, env={**os.environ, name: value}, capture_output=True, text=True, timeout=60)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and last.startswith("gapless: error: huggingface_hub cannot be loaded") and name in last


def test_a_model_without_safetensors_is_refused(hub, tiny):
    weights = tiny.pop("model.safetensors")
    for other, beside in (("pytorch_model.bin", tiny), ("consolidated.safetensors", tiny), ("model-Q4.gguf", {})):
        hub.add(NAME, {**beside, other: weights})
        with pytest.raises(CheckpointError, match=f"org/tiny has neither .* it holds {other}, which are not read"):
            locate(CONFIG)
    hub.add(NAME, tiny)
    with pytest.raises(CheckpointError, match=r"no weights at all. Pickles are never fetched, .*--revision"):
        locate(CONFIG)
    assert set(hub.fetched()) <= set(tiny)


@pytest.mark.parametrize("name", sharpest(["config.json", "tokenizer.json"]))
def test_a_model_without_a_file_that_is_needed_is_refused(hub, tiny, name):
    del tiny[name]
    commit = hub.add(NAME, tiny)
    with pytest.raises(CheckpointError, match=f"model: org/tiny has no {name} at commit {commit}: choose"):
        locate(CONFIG)
    assert "model.safetensors" not in hub.fetched()


def test_a_hub_that_names_no_commit_is_refused(hub, tiny):
    hub.add(NAME, tiny)
    hub.models[NAME].refs["main"] = "../../elsewhere"
    hub.models[NAME].commits["../../elsewhere"] = tiny
    with pytest.raises(ServerError, match=r"it names no commit but '../../elsewhere'"):
        locate(CONFIG)


def test_a_hub_whose_hash_is_a_path_is_refused(hub, tiny, monkeypatch):
    hub.add(NAME, tiny)
    monkeypatch.setattr("hub.loopback.digest_of", lambda data: "../../elsewhere")
    with pytest.raises(ServerError, match=r"the hub gives org/tiny no SHA-256 but '../../elsewhere'"):
        locate(CONFIG)
    assert not {"tokenizer.json", "model.safetensors"} & set(hub.fetched())


def test_a_fetch_without_a_log_prints_lines_now_and_then(hub, tiny, monkeypatch, capsys):
    monkeypatch.setattr(progress.log, "hasHandlers", lambda: False)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    commit = hub.add(NAME, {**tiny, "model.safetensors": WEIGHTS * 3})
    locate(CONFIG)
    first, second, *bits, last = capsys.readouterr().err.splitlines()
    assert first == f"gapless: org/tiny is commit {commit} of {hub.url}"
    assert second == f"gapless: org/tiny: fetching 3 MB to {constants.HF_HUB_CACHE}"
    assert bits[-1] == "gapless: org/tiny: 3 MB of 3 MB" and len(bits) > 2
    assert last.startswith("gapless: org/tiny: fetched in 0 s (")
