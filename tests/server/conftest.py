"""One server for all tests that leave it as they found it."""

import pytest
from server_harness import serving


@pytest.fixture(scope="session")
def server():
    with serving() as running:
        yield running


@pytest.fixture(scope="session")
def client(server):
    with server.client() as client:
        yield client
