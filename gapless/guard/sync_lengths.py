"""Calls that take lengths or places of cuts, which torch wants on the host or copies there."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .short_calls import Unseen
from .watch import ThreadState, TorchCall


def argument(call: TorchCall, at: int, name: str, default: Any = None) -> Any:
    return call.args[at] if len(call.args) > at else call.kwargs.get(name, default)


def packed(watch: ThreadState, call: TorchCall) -> Any:
    """Run a packing of sequences or its reverse, whose second result, of lengths, is always on the host."""
    data, lengths = call.func(*call.args, **call.kwargs)
    with Unseen():
        return data, lengths.clone()


def split_at(watch: ThreadState, call: TorchCall) -> Any:
    """Check tensor_split, whose second argument may be a tensor."""
    at = argument(call, 1, "tensor_indices_or_sections")
    if not (isinstance(at, Tensor) and watch.is_device(at)):
        return call.func(*call.args, **call.kwargs)
    watch.flag("device-split")
    with watch.silence():
        return call.func(*call.args, **call.kwargs)


CTC_NAMES = ("log_probs", "targets", "input_lengths", "target_lengths")


def ctc_lengths(watch: ThreadState, call: TorchCall) -> Any:
    """Check ctc_loss, which takes lengths on the host and copies them to the device, wherever they were."""
    scores, *lengths = (argument(call, place, name) for place, name in enumerate(CTC_NAMES) if name != "targets")
    if any(isinstance(one, Tensor) and watch.is_device(one) for one in lengths):
        watch.flag("host-read")
    elif isinstance(scores, Tensor) and watch.is_device(scores):
        watch.flag("list-to-device")
    with watch.silence():
        return call.func(*call.args, **call.kwargs)
