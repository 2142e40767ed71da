"""Kernels share their work: with helpers that come late or not at all, and with several callers at once."""

from __future__ import annotations

import threading

import pytest
import torch
from kernels.native_kernels import load_native

ROWS, SIZE = 200, 1024


@pytest.fixture
def three_threads():
    load_native()
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_every_piece_is_done_once(three_threads):
    """In place, so that a piece that is done twice, or not at all, is seen. More threads than cores: some come late."""
    kernels = load_native()
    weight, one = torch.ones(SIZE), torch.ones(ROWS, SIZE)
    x = torch.zeros(ROWS, SIZE)
    for turn in range(1, 301):
        kernels.add_rms_norm(x, one, weight, 1e-6)
        assert bool((x == turn).all())


def test_callers_at_once(three_threads):
    """One has the helpers, the others work alone; none disturbs another."""
    kernels, wrong = load_native(), []

    def call(number: int) -> None:
        torch.set_num_threads(3)
        x, step = torch.zeros(ROWS, SIZE), torch.full((ROWS, SIZE), float(number))
        for turn in range(1, 101):
            kernels.add_rms_norm(x, step, torch.ones(SIZE), 1e-6)
            if not bool((x == turn * number).all()):
                wrong.append((number, turn))

    callers = [threading.Thread(target=call, args=(number,)) for number in (1, 2, 3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert not wrong
