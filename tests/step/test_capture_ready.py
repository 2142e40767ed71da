"""A step could be captured as one graph: fixed addresses, nothing read on the host, nothing left behind, and the
operations are a function of the host's key alone, whatever the rows hold."""

from __future__ import annotations

import gc
import re

import pytest
import torch
from step_harness import Bench, request
from torch.utils._python_dispatch import TorchDispatchMode

from gapless.kernels.layout import ACTIVE
from gapless.testing.checksum import ChecksumModel, continue_prompt

VOCAB = 97
HOST_READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero")
SETTINGS = {
    "greedy": {"temperature": 0.0},
    "random": {"temperature": 0.8},
    "candidates": {"temperature": 0.8, "top_k": 5, "top_p": 0.9},
    "sorted": {"temperature": 0.8, "min_p": 0.1},
    "minimum": {"temperature": 0.0, "min_tokens": 2},
}


class Recorder(TorchDispatchMode):
    """Every operation with the shapes it works on."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in HOST_READS, f"host read: {func}"
        shapes = [tuple(arg.shape) for arg in args if isinstance(arg, torch.Tensor)]
        # `a & b` shows as one or the other, depending on whether somebody else looks on too: they are one kernel.
        self.seen.append((re.sub(r"__(and|or|xor)__", r"bitwise_\1", str(func)), shapes))
        return func(*args, **(kwargs or {}))


def recorded(bench, rows):
    # The packet's own way to the device is a copy from host memory; what `run` reads after the step is the test's.
    with Recorder() as watch:
        bench.run(rows)
    return watch.seen


def two_rows(setting):
    """A bench with two rows in decode, the second of which stops at its third token."""
    bench = Bench(ChecksumModel(VOCAB, 32))
    stop = continue_prompt((5, 6), 3, VOCAB)[-1]
    rows = [
        bench.admit(request(key=key, tokens=(5, 6), max_len=30, stop_ids=stops, min_len=2, **SETTINGS[setting]))[0]
        for key, stops in enumerate(((), (stop,)))
    ]
    return bench, tuple(rows)


@pytest.mark.parametrize("setting", SETTINGS)
def test_operations_follow_from_the_key_alone(setting):
    bench, rows = two_rows(setting)
    first = recorded(bench, rows)
    for _ in range(4):
        assert recorded(bench, rows) == first
    if setting == "greedy":
        assert bench.tables.state[list(rows), ACTIVE].tolist() == [1, 0], "one of them was inert meanwhile"
    bench.tables.state[rows[0], ACTIVE] = 0
    assert recorded(bench, rows) == first


def test_addresses_are_fixed_and_nothing_is_left_behind():
    bench, rows = two_rows("candidates")
    bench.run(rows)
    owned = [*bench.tables, bench.program.cache.data]
    addresses = [tensor.data_ptr() for tensor in owned]
    alive = tensors()
    for _ in range(5):
        bench.run(rows)
    assert [tensor.data_ptr() for tensor in owned] == addresses
    assert tensors() == alive


def tensors():
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def test_the_recorder_sees_a_host_read():
    with pytest.raises(AssertionError, match="host read"), Recorder():
        torch.ones(3).sum().item()
