"""Recordings are played against the whole server on the demo model."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from server_harness import serving

from gapless.base.config import EngineConfig
from gapless.engine.frontdoor import open_assets
from gapless.engine.wiring import build_core

KEY = "test-key"


@pytest.fixture(scope="module")  # not longer: tests of devices count the threads there are
def demo():
    """An HTTP client of a server on the demo model; it sends no headers of its own but a key."""
    config = EngineConfig(model="demo", device="cpu", max_model_len=2048, max_num_seqs=8)
    options = {"core": lambda: build_core(config), "front": open_assets(config), "served_model_name": ("demo",)}
    with serving(**options, api_key=(KEY,)) as server, server.client() as client:
        client.headers["authorization"] = f"Bearer {KEY}"
        yield client
