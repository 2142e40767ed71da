"""The half of no_sync for functions: waits that the dispatcher does not see, and tensors of an emulated device.

Some waits have no operation of their own: on the CPU `t.tolist()` reads memory directly and `t.to("cpu")` does nothing.
Here they are seen as the user wrote them. Where there is no accelerator, tensors asked for on one are made on the CPU
and marked.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils.dlpack import DLDeviceType

from . import marks
from .backends import KINDS_OF_DEVICES
from .callbacks import branching, has_own, moved, of_classes, takes_apart, watched_function
from .emulated_streams import ExternalStream, current_stream, default_stream
from .operators import NONE_GIVEN, OPERATORS, composite
from .patches import holding, leave_uncompiled
from .pinned_allocs import allocated
from .present import accelerator
from .refusals import refusal_of
from .short_calls import GETTERS, LONG_WAY, SHORT_CALLS, Unseen, is_open
from .sites import caller
from .sync_lengths import argument, ctc_lengths, packed, split_at
from .sync_ops import SyncOps, copy_rule, read_rule
from .watch import ThreadState, TorchCall, function_name
from .watched import TALLY

CallHandler = Callable[[ThreadState, TorchCall], Any]
"""Checks one call and makes it; returns its result."""

CPU = torch.device("cpu")

_GROUPED = re.compile(r"/torch/(optim|amp|nn/utils)/")
"""Parts of torch that ask C++ code for the device of tensors; for emulated ones the answer must be the CPU."""


_TO_COPY = torch.ops.aten._to_copy.default
_LOADERS = "/torch/utils/data/_utils/pin_memory.py"


def _run(call: TorchCall) -> Any:
    return call.func(*call.args, **call.kwargs)


def _reader(rule: str) -> CallHandler:
    """Return the handler of a read of the first argument's values on the host."""

    def read(watch: ThreadState, call: TorchCall) -> Any:
        if watch.is_device(call.args[0]) and call.args[0].numel():
            watch.flag(rule or read_rule(watch, call.args[0]))
        with watch.silence(to_host=True):
            return _run(call)

    return read


# Copies and placements.


def _to(watch: ThreadState, call: TorchCall) -> Any:
    source, device = call.args[0], _target(watch, call)
    if device is None:
        return _run(call)
    if marks.is_meta(device):
        with Unseen():  # it copies nothing
            return _run(call)
    non_blocking = _wants_non_blocking(call)
    if marks.names_device(device):
        return _upload(watch, call, device, non_blocking)
    if _GROUPED.search(caller()) and not marks.on_accelerator(source):
        return _run(call)
    if non_blocking and watch.is_device(source) and source.numel():
        return allocated(watch, lambda: _download(watch, call, ""))
    return _download(watch, call, "copy-to-host")


def _to_copied(watch: ThreadState, call: TorchCall) -> Any:
    """Check the operator of Tensor.to, which a class of the user's calls with the device that it was given itself."""
    passed_on = watch.within is not None and watch.within.func is call.func
    return _to(watch, call) if passed_on else _run(call)


def _target(watch: ThreadState, call: TorchCall) -> Any:
    """Return the device that Tensor.to copies to, or None when it only converts."""
    if call.kwargs.get("device") is not None:
        return call.kwargs["device"]
    other = call.kwargs.get("other", call.args[1] if len(call.args) > 1 else None)
    if isinstance(other, Tensor):
        return _device_of(watch, other)
    return other if isinstance(other, (str, int, torch.device)) else None


def _device_of(watch: ThreadState, tensor: Tensor) -> torch.device:
    return marks.emulated if tensor.device == CPU and watch.is_device(tensor) else tensor.device


def _wants_non_blocking(call: TorchCall) -> bool:
    """Return whether Tensor.to is non-blocking, by name or by the first flag after device and dtype."""
    flags = [value for value in call.args[1:] if isinstance(value, bool)]
    return bool(call.kwargs.get("non_blocking", flags[0] if flags else False))


def _upload(watch: ThreadState, call: TorchCall, device: Any, non_blocking: bool) -> Any:
    source = call.args[0]
    on_host = not watch.is_device(source)
    if on_host:
        TALLY.add("copies")
    rule = copy_rule(source, non_blocking, up=True) if on_host and source.numel() else None
    if rule:
        watch.flag(rule)
    with watch.silence():
        if not marks.must_emulate(device):
            return _run(call)
        dtype, form = _dtype(call), call.kwargs.get("memory_format")
        if takes_apart((type(source),)):
            # It copies the tensors inside; Tensor.to would ask for the driver.
            return _TO_COPY(source, dtype=dtype, device=marks.emulated, non_blocking=non_blocking)
        if on_host and source.layout is torch.strided:
            # A host tensor and its copy on the device are two tensors. The copy is an operation for the race checker
            # too, and converts as well: the stream reads the host tensor, not a host tensor made of it.
            return moved(source, lambda host: _device_copy(watch, host, non_blocking, dtype, form), CPU)
        result = _run(_with_device(call, CPU))
        return marks.device_tensor(result.clone() if on_host else result)


def _dtype(call: TorchCall) -> torch.dtype | None:
    """Return the type that Tensor.to converts to, or None."""
    values = (*call.args[1:], *call.kwargs.values())
    named = (value.dtype if isinstance(value, Tensor) else value for value in values)
    return next((value for value in named if isinstance(value, torch.dtype)), None)


def _device_copy(
    watch: ThreadState, source: Tensor, non_blocking: bool, dtype: torch.dtype | None = None,
    form: torch.memory_format | None = None,
) -> Tensor:  # fmt: skip
    if source.layout is not torch.strided:
        return marks.device_tensor(source.clone())
    like = torch.empty_like(source, device="meta", dtype=dtype, memory_format=form or torch.preserve_format)
    with watch.placing():
        copy = torch.empty_strided(source.shape, like.stride(), dtype=like.dtype)
    return marks.device_tensor(copy).copy_(source, non_blocking)


def _download(watch: ThreadState, call: TorchCall, rule: str) -> Any:
    source = call.args[0]
    if not watch.is_device(source):
        return _run(call)
    TALLY.add("copies")
    if rule and source.numel():
        watch.flag(rule)
    if marks.on_accelerator(source):
        with watch.silence(to_host=True):
            result = _run(call)
        marks.HOST_COPIES.add(result)
        return result
    with watch.silence():
        # It may have another type now, and is still on the emulated device.
        return moved(_run(call), lambda source: _host_copy(watch, source, not rule), marks.emulated)


def _host_copy(watch: ThreadState, source: Tensor, non_blocking: bool) -> Tensor:
    with watch.silence(to_host=True):
        copy = torch.empty_like(source, requires_grad=False) if source.layout is torch.strided else source.clone()
    marks.HOST_COPIES.add(copy)
    if non_blocking:
        marks.PINNED.add(copy)  # torch makes a pinned destination for a non-blocking copy
    return copy.copy_(source, non_blocking)


def _with_device(call: TorchCall, device: torch.device) -> TorchCall:
    """Return the call with another device in its arguments."""
    kwargs = {**call.kwargs, "device": device} if call.kwargs.get("device") is not None else call.kwargs
    args = [device if _names_place(value) else value for value in call.args[1:]]
    return TorchCall(call.func, (*call.args[:1], *args), kwargs)


def _names_place(value: Any) -> bool:
    return isinstance(value, (str, torch.device)) or (isinstance(value, int) and not isinstance(value, bool))


def _moving(kind: str) -> CallHandler:
    """Return the handler of the method that copies to a kind of device, such as Tensor.cuda."""

    def move(watch: ThreadState, call: TorchCall) -> Any:
        non_blocking = bool(argument(call, 2, "non_blocking", False))
        plain = call
        if not marks.has_accelerator():
            if kind != "cuda":
                return _run(call)  # which fails: only CUDA is emulated
            plain = TorchCall(Tensor.to, (call.args[0], kind), {"non_blocking": non_blocking})
        return _upload(watch, plain, kind, non_blocking)

    return move


@functools.cache
def know_methods(here: str) -> None:
    """Take in the methods of tensors that copy to a device: a backend adds its own when it is registered."""
    for kind in {*KINDS_OF_DEVICES, here or "cuda"}:
        method = getattr(Tensor, kind, None)
        if method is not None and method not in _HANDLERS:
            _HANDLERS[method] = _moving(kind)


def _type(watch: ThreadState, call: TorchCall) -> Any:
    kind, source = argument(call, 1, "dtype"), call.args[0]
    if kind is None and not marks.on_accelerator(source) and watch.is_device(source):
        return _run(call).replace("torch.", "torch.cuda.")
    if kind is None or isinstance(kind, torch.dtype):
        return _run(call)
    name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__name__}"
    place = name.split(".")[1]  # as in torch.cuda.FloatTensor
    if place in ("cuda", accelerator()):
        plain = TorchCall(Tensor.to, (source, "cuda", getattr(torch, name.rpartition(".")[2]).dtype), {})
        return _upload(watch, call if marks.has_accelerator() else plain, place, False)
    return _download(watch, call, "type-hop")


# Host data that becomes a device tensor.


def _from_data(watch: ThreadState, call: TorchCall) -> Any:
    """Check torch.tensor, as_tensor and asarray."""
    device, data = call.kwargs.get("device"), argument(call, 0, "data")
    goes_up, on_device = marks.names_device(device), isinstance(data, Tensor) and watch.is_device(data)
    _check_data(watch, data, goes_up and not on_device)
    if not goes_up:
        return _placed(watch, call)
    with watch.silence():
        if on_device or call.func is torch.tensor or not marks.must_emulate(device):
            return _placed(watch, call)
        # as_tensor and asarray share the memory of host data, which a device cannot.
        return _device_copy(watch, _run(_with_device(call, CPU)), False)


def _check_data(watch: ThreadState, data: Any, is_copied: bool) -> None:
    """Check what a tensor is made of; `is_copied` from the host to a device."""
    reads = _holds_device(watch, data)
    if reads:
        watch.flag("host-read")
    if is_copied and not _is_empty(data):
        TALLY.add("copies")
        if not reads:
            watch.flag("list-to-device")


def _holds_device(watch: ThreadState, data: Any) -> bool:
    """Return whether lists hold a device tensor: each is read on the host, one after the other."""
    if not isinstance(data, (list, tuple)):
        return False
    return any(
        watch.is_device(item) if isinstance(item, Tensor) else _holds_device(watch, item)
        for item in data if isinstance(item, (Tensor, list, tuple))
    )  # fmt: skip


def _is_empty(data: Any) -> bool:
    """Return whether data has no elements, so that nothing is copied."""
    if isinstance(data, (list, tuple)):
        return all(_is_empty(item) for item in data)
    return 0 in getattr(data, "shape", ())


def _new_tensor(watch: ThreadState, call: TorchCall) -> Any:
    device = call.kwargs.get("device")
    goes_up = marks.names_device(device) if device is not None else watch.is_device(call.args[0])
    _check_data(watch, argument(call, 1, "data"), goes_up)
    if not goes_up:
        return _run(call)
    with watch.silence():
        result = _placed(watch, call)
        marks.DEVICE_TENSORS.add(result)
        return result


def _placed(watch: ThreadState, call: TorchCall) -> Any:
    """Run a call with `device=` or `pin_memory=`; without an accelerator it is emulated on the CPU."""
    kwargs, device = dict(call.kwargs), call.kwargs.get("device")
    if isinstance(call.func, torch._ops.OpOverload) and not kwargs.get("pin_memory"):
        return _run(call)  # the dispatch half places it
    # `empty_like(x, device="cpu")` of a device tensor is on the host.
    with holding(watch, to_host=watch.to_host or (device is not None and not marks.names_device(device))):
        if kwargs.get("pin_memory"):
            if marks.has_accelerator():
                return allocated(watch, lambda: _run(call))
            del kwargs["pin_memory"]
            return allocated(watch, lambda: marks.pinned_tensor(call.func(*call.args, **kwargs)))
        if not (marks.names_device(device) and marks.must_emulate(device)):
            return _run(call)
    kwargs["device"] = CPU
    with watch.placing():
        result = call.func(*call.args, **kwargs)
    return marks.device_tensor(result) if isinstance(result, (Tensor, tuple, list)) else result


def _deep_copy(watch: ThreadState, call: TorchCall) -> Any:
    with watch.silence():
        result = _run(call)
    if watch.is_device(call.args[0]):
        marks.DEVICE_TENSORS.add(result)
    return result


def _pin_memory(watch: ThreadState, call: TorchCall) -> Any:
    def pinned() -> Tensor:
        with watch.silence(to_host=True):
            made: Tensor = _run(call) if marks.has_accelerator() else marks.pinned_tensor(call.args[0].clone())
            return made

    # A DataLoader's batches are freed as fast as they are made, so the allocator has a block for each.
    return pinned() if caller().endswith(_LOADERS) else allocated(watch, pinned)


def _record_stream(watch: ThreadState, call: TorchCall) -> Any:
    return _run(call) if marks.has_accelerator() else None


def _dlpack(watch: ThreadState, call: TorchCall) -> Any:
    """Export a device tensor's memory, or a copy of it: the consumer's stream comes after the current one."""
    tensor, kwargs = call.args[0], call.kwargs
    if not watch.is_device(tensor) or marks.has_accelerator():
        return _run(call)
    stream, device = kwargs.get("stream", -1), kwargs.get("dl_device")
    if stream != -1:
        other = default_stream() if stream in (None, 1) else ExternalStream(stream)
        other.wait_stream(current_stream())
    if device is not None and device[0] == DLDeviceType.kDLCPU:
        tensor = _download(watch, TorchCall(Tensor.cpu, (tensor,), {}), "copy-to-host")
    elif kwargs.get("copy"):
        tensor = marks.device_tensor(tensor.clone())
    return tensor.__dlpack__(max_version=kwargs.get("max_version"))


def _dlpack_device(watch: ThreadState, call: TorchCall) -> Any:
    on_device = watch.is_device(call.args[0]) and not marks.has_accelerator()
    return (DLDeviceType.kDLCUDA, 0) if on_device else _run(call)


# Other calls.


def _calling(watch: ThreadState, call: TorchCall) -> Any:
    """Run a function of torch that is given functions of the user's to call."""
    kwargs = {name: watched_function(value) for name, value in call.kwargs.items()}
    return call.func(*map(watched_function, call.args), **kwargs)


def _sparse(watch: ThreadState, call: TorchCall) -> Any:
    """Check sparse_coo_tensor, which without a size takes that of the largest indices."""
    indices = argument(call, 0, "indices")
    if argument(call, 2, "size") is None and isinstance(indices, Tensor) and watch.is_device(indices):
        watch.flag("host-size")
    return _placed(watch, call)


def _composite(watch: ThreadState, call: TorchCall) -> Any:
    """Run an operator that is made of others, whose body is the user's code."""
    body = composite(*call)
    assert body is not None
    with watch.called_back():
        return body(*call.args, **call.kwargs)


def _asked(answer: Callable[[torch.device], Any]) -> CallHandler:
    """Return the handler of a question about the place of a tensor."""
    return lambda watch, call: answer(_device_of(watch, call.args[0]))


def _is_accelerators_number(call: TorchCall) -> bool:
    return marks.emulated.type == "cuda" and [*map(type, call.args)] == [int]


def _index_of(device: torch.device) -> int:
    return -1 if device.type == "cpu" or device.index is None else device.index


_READERS = {
    # These may be meant for a size.
    "": (Tensor.item, Tensor.tolist, Tensor.__int__),
    "host-read": (
        Tensor.__bool__, Tensor.__float__, Tensor.__complex__, Tensor.__repr__, Tensor.__format__, Tensor.__contains__,
        torch.is_nonzero, torch.equal, Tensor.equal, torch.allclose, Tensor.allclose,
    ),
    "host-index": (Tensor.__index__,),
    "copy-to-host": (Tensor.numpy, Tensor.__array__, Tensor.__reduce_ex__),
}  # fmt: skip

_HANDLERS: dict[Any, CallHandler] = {
    **{func: _reader(rule) for rule, funcs in _READERS.items() for func in funcs},
    Tensor.to: _to,
    _TO_COPY: _to_copied,
    Tensor.cpu: lambda watch, call: _download(watch, call, "copy-to-host"),
    Tensor.type: _type,
    Tensor.pin_memory: _pin_memory,
    Tensor.is_pinned: lambda watch, call: marks.is_pinned(call.args[0]),
    Tensor.record_stream: _record_stream,
    Tensor.new_tensor: _new_tensor,
    Tensor.__deepcopy__: _deep_copy,
    Tensor.__dlpack__: _dlpack,
    Tensor.__dlpack_device__: _dlpack_device,
    torch.tensor: _from_data,
    torch.as_tensor: _from_data,
    torch.asarray: _from_data,
    torch.nn.functional.ctc_loss: ctc_lengths,
    torch.sparse_coo_tensor: _sparse,
    torch.nn.functional.triplet_margin_with_distance_loss: _calling,
    torch.lobpcg: _calling,
    torch.ops.higher_order.cond: branching,
    torch.ops.higher_order.while_loop: branching,
    torch.tensor_split: split_at,
    torch._VF._pack_padded_sequence: packed,
    torch._VF._pad_packed_sequence: packed,
    torch.device: lambda watch, call: torch.device("cuda", *call.args) if _is_accelerators_number(call) else _run(call),
    Tensor.tensor_split: split_at,
    Tensor.device.__get__: _asked(lambda device: device),
    Tensor.is_cuda.__get__: _asked(lambda device: device.type == "cuda"),  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: _asked(lambda device: device == CPU),  # type: ignore[attr-defined]
    Tensor.get_device: _asked(_index_of),
    torch.get_device: _asked(_index_of),
}


_new_call = tuple.__new__
"""Makes a TorchCall in half the time that its own constructor takes."""


class SyncCalls(TorchFunctionMode):
    """Sees every torch function that the user's code of one thread calls."""

    def __init__(self, watch: ThreadState, ops: SyncOps) -> None:
        super().__init__()
        self._watch = watch
        self._ops = ops

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        watch = self._watch
        # Python's getters give the class of a plain tensor, too.
        if types and types[0] is not Tensor and types[0] is not Parameter and has_own(types):
            return of_classes(watch, func, types, args, kwargs)
        outer = watch.call
        if outer is None and watch.by_marks and not watch.quiet:
            short = SHORT_CALLS.get(func)
            if short is not None and is_open():
                out = short.run(short, self._ops, func, args, kwargs)
                if out is not LONG_WAY:
                    return out
            elif not kwargs and func in GETTERS:
                return func(*args)
        handler = _HANDLERS.get(func)
        if kwargs and handler is None and ("device" in kwargs or "pin_memory" in kwargs):
            handler = _placed
        default = marks.default.device
        if default is not None and func in _device_constructors() and not (kwargs and kwargs.get("device")):
            handler, kwargs = handler or _placed, {**(kwargs or {}), "device": default}
        if type(func) in OPERATORS and composite(func, args, kwargs or NONE_GIVEN):
            handler = _composite
        # A call made inside another one belongs to the outer one, which is what the user wrote.
        call = outer
        if outer is None or handler is not None:
            call = _new_call(TorchCall, (func, args, kwargs or {}))
        if outer is None:
            watch.call, watch.reported = call, False
        slow = watch.slow_ns
        start = time.perf_counter_ns() if slow else 0
        try:
            if handler is not None and call is not None:
                result = handler(watch, call)
            else:
                result = func(*args, **kwargs) if kwargs else func(*args)
            if slow and (took := time.perf_counter_ns() - start) > slow and not watch.reported:
                watch.flag("slow-call", detail=f"{took / 1e6:.2f} ms")
            return result
        except (RuntimeError, AssertionError, TypeError) as error:
            refusal = None if watch.real else refusal_of(error, function_name(func))
            if refusal is None:
                raise
            raise refusal from error
        finally:
            watch.call = outer


leave_uncompiled(SyncCalls.__torch_function__)
