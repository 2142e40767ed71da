"""One server for all tests that leave it as they found it. Tests use the tiny tokenizers of the text tests."""

import sys
from pathlib import Path

import pytest
from server_harness import serving

sys.path.insert(0, str(Path(__file__).parents[1] / "text"))


@pytest.fixture(scope="session")
def server():
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client
