"""How pytest hands tests to its workers."""

from __future__ import annotations

import pytest


def test_a_file_stays_on_one_worker_so_that_its_servers_start_once(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("loadgroup", False):  # which xdist sets in its workers
        pytest.skip("not run with --dist loadgroup")
    assert request.node.nodeid.endswith(f"@{request.path.name}"), "xdist did not see the mark of the file"
