"""A hub on loopback in the place of the real one, an empty cache, and no waiting."""

from __future__ import annotations

import huggingface_hub
import pytest
from hub.loopback import folder_files, serving
from huggingface_hub import constants
from server.server_harness import write_model

from gapless.hub import pull

WEIGHTS = bytes(range(256)) * 4096
"""1 MiB, which no test here loads."""


@pytest.fixture
def tiny(tmp_path):
    """The files of a model, with weights that are none."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    return {**folder_files(write_model(folder)), "generation_config.json": b"{}", "model.safetensors": WEIGHTS}


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "home" / "hub"


@pytest.fixture
def hub(cache, monkeypatch):
    """What the environment names, for this process and for those that a test starts."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    with serving() as hub:
        monkeypatch.setenv("HF_HOME", str(cache.parent))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
        # The library has read the environment already.
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache.parent / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")  # it asks the hub once a day, to learn who calls
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
        monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 5)
        monkeypatch.setattr(pull, "WAITS", (0.0, 0.0))
        point_to(hub.url, monkeypatch)
        yield hub
        huggingface_hub.close_session()
    assert hub.code == []


def point_to(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    huggingface_hub.close_session()
    monkeypatch.setenv("HF_ENDPOINT", url)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    huggingface_hub.get_session()  # made here, so that threads of a test do not make several
