"""Fixtures of the examples' tests."""

import pytest
import torch


@pytest.fixture(scope="module")
def one_thread():
    """Small products gain nothing from threads, and lose much when the tests run side by side."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
