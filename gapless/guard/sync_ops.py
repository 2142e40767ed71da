"""The dispatch half of no_sync: finds the operations on device tensors that make the host wait, from any caller."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _len_torch_function_stack as _functions_watched
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _pop_mode_temporarily,
    is_traceable_wrapper_subclass_type,
)

from . import marks
from .backends import backend
from .callbacks import of_dispatch_classes, takes_apart
from .operators import TORCHS, bodies, composite
from .patches import leave_uncompiled
from .present import accelerator
from .refusals import refusal_of
from .watch import ThreadState, TorchCall
from .watched import TALLY
from .wider import lacking

Args = Sequence[Any]
RunOp = Callable[[Any, Args, dict[str, Any]], Any]
"""Runs an operator on its arguments."""
OpCheck = Callable[[ThreadState, Args, dict[str, Any]], str | None]
"""Sees the arguments of an operation with a device tensor among them; returns the rule that it breaks."""

_INDEXING = (Tensor.__getitem__, Tensor.__setitem__)
_MASKS = (torch.bool, torch.uint8)

# On the CPU these check their input by reading it; on a device they do not.
_CPU_CHECKS_ITSELF = (torch.quantile, torch.nanquantile, Tensor.quantile, Tensor.nanquantile)


def _read(watch: ThreadState, args: Args, kwargs: dict[str, Any]) -> str | None:
    call = watch.call
    if call is not None and call.func in _INDEXING:
        return "host-index"
    if call is not None and not watch.real and _only_a_cpu_check(call.func, call.args, call.kwargs):
        return None
    return read_rule(watch, args[0])


def read_rule(watch: ThreadState, tensor: Tensor) -> str:
    """Return host-read, or host-size when the tensor is the result of the last reduction."""
    reduced = watch.reduced()
    return "host-size" if reduced is not None and reduced is marks.owner_of(tensor) else "host-read"


def _only_a_cpu_check(func: Any, args: Args, kwargs: dict[str, Any]) -> bool:
    if func is torch.nn.functional.one_hot:
        return bool((args[1] if len(args) > 1 else kwargs.get("num_classes", -1)) != -1)
    return func in _CPU_CHECKS_ITSELF


def _always(rule: str) -> OpCheck:
    return lambda watch, args, kwargs: rule


def _if_checked(watch: ThreadState, args: Args, kwargs: dict[str, Any]) -> str | None:
    return "host-read" if kwargs.get("check_errors") else None


def _repeat(watch: ThreadState, args: Args, kwargs: dict[str, Any]) -> str | None:
    return None if kwargs.get("output_size") is not None else "repeat-interleave"


def _histc(watch: ThreadState, args: Args, kwargs: dict[str, Any]) -> str | None:
    low, high = (*args[2:4], 0, 0)[:2] if len(args) > 2 else (kwargs.get("min", 0), kwargs.get("max", 0))
    return "counted-size" if low == high else None


def _tensor_value(at: int) -> OpCheck:
    """Return a check of fills, whose value, the argument `at`, is read on the host when it is a device tensor."""
    return lambda watch, args, kwargs: "host-read" if watch.is_device(args[at]) else None


def _index(watch: ThreadState, args: Args, kwargs: dict[str, Any]) -> str | None:
    if not watch.is_device(args[0]):
        return "host-operand"
    for index in args[1]:
        if index is None:
            continue
        if index.dtype in _MASKS:
            # A mask on the host is turned into an index there, which is uploaded without a wait.
            if watch.is_device(index):
                return "mask-index"
        elif index.dim() and index.numel() and not watch.is_device(index):
            return "index-by-host"
    return "index-by-host" if watch.real and not watch.reported and indexes_by_list(watch.call) else None


def indexes_by_list(call: TorchCall | None) -> bool:
    """Return whether the user indexes by host data, which torch uploads past all modes
    (torch/csrc/utils/tensor_new.cpp, indexing_tensor_from_data). A kind that warns of waits does so there."""
    if call is None or call.func not in _INDEXING:
        return False
    index = call.args[1]
    parts = index if isinstance(index, tuple) else (index,)
    return any([hasattr(one, "__len__") and not isinstance(one, Tensor) and len(one) > 0 for one in parts])


def _index_put(watch: ThreadState, args: Args, kwargs: dict[str, Any]) -> str | None:
    indices, value = [index for index in args[1] if index is not None], args[2]
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    on_host = not watch.is_device(value)
    if len(indices) == 1 and indices[0].dtype in _MASKS and on_host and value.numel() == 1 and not accumulate:
        return None  # torch makes it a masked_fill_
    rule = _index(watch, args, kwargs)
    if rule is None and on_host:
        rule = "index-put-scalar" if value.numel() == 1 else "upload"
    return rule


def _copy(watch: ThreadState, args: Args, kwargs: dict[str, Any]) -> str | None:
    target, source = args[0], args[1]
    non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    if not target.numel() or _deep_copies(watch):
        return None
    if not watch.is_device(target):
        return None if target.is_meta else copy_rule(target, non_blocking, up=False)
    if watch.is_device(source):
        return None
    if source.dim() == 0 and watch.call is not None and watch.call.func is Tensor.__setitem__:
        return "scalar-assign"
    return copy_rule(source, non_blocking, up=True)


def _counted_copy(watch: ThreadState, args: Args, kwargs: dict[str, Any]) -> str | None:
    if args[0].numel() and not ((watch.is_device(args[0]) and watch.is_device(args[1])) or args[0].is_meta):
        TALLY.add("copies")
    return _copy(watch, args, kwargs)


def _pairwise(check: OpCheck) -> OpCheck:
    """Return the check of an operator that copies each tensor of a list to the one at its place in another."""

    def checked(watch: ThreadState, args: Args, kwargs: dict[str, Any]) -> str | None:
        pairs = [pair for pair in zip(args[0], args[1], strict=False) if any(map(watch.is_device, pair))]
        return next(filter(None, [check(watch, (*pair, *args[2:]), kwargs) for pair in pairs]), None)

    return checked


def _deep_copies(watch: ThreadState) -> bool:
    """Return whether the call copies an emulated device tensor by its storage, which is on the device on a GPU too."""
    call = watch.call
    return call is not None and call.func is Tensor.__deepcopy__ and not watch.real and watch.is_device(call.args[0])


def copy_rule(host: Tensor, non_blocking: bool, *, up: bool) -> str | None:
    """Return the rule that a copy between this host tensor and a device breaks; `up` is to the device."""
    if not non_blocking:
        return "upload" if up else "copy-to-host"
    pageable = "shared" if marks.is_pinned(host) else backend(accelerator()).pageable
    if pageable == "driver" or (pageable == "staged" and not up):
        return "pageable-async" if up else "unpinned-download"
    # A staged upload packs into pinned memory itself (intel/torch-xpu-ops, Copy.cpp, _copy_xpu).
    packs = up and backend(accelerator()).pageable == "staged"
    return None if packs or marks.is_dense(host) else "gapped-async"


def _lift(watch: ThreadState, args: Args, kwargs: dict[str, Any]) -> str | None:
    """A tensor made of Python numbers is on the host, even against a predicate."""
    marks.HOST_COPIES.add(args[0])
    return None


def _to_copy(watch: ThreadState, args: Args, kwargs: dict[str, Any]) -> str | None:
    """Check conversions inside other calls. An emulated device tensor really is on the CPU, and stays there."""
    target, source, non_blocking = kwargs.get("device"), args[0], bool(kwargs.get("non_blocking"))
    if target is None or marks.is_meta(target) or not source.numel():
        return None
    if marks.names_device(target):
        return None if watch.is_device(source) else copy_rule(source, non_blocking, up=True)
    return "copy-to-host" if marks.on_accelerator(source) and not non_blocking else None


CHECKS: dict[str, OpCheck] = {f"aten::{name}": check for check, names in (
    (_always("host-read"), "equal is_nonzero allclose _linalg_check_errors"),
    # These check their results inside of one operator.
    (_always("host-read"), "_linalg_eigh _linalg_svd linalg_eig _linalg_eigvals linalg_lstsq linalg_pinv"),
    (_always("host-read"), "linalg_matrix_exp cholesky cholesky_inverse"),
    # Ends that are tensors are read; ends that are numbers never come here with a device tensor.
    (_always("host-read"), "linspace logspace"),
    (_always("data-size"), "_to_sparse nonzero nonzero_numpy argwhere masked_select"),
    (_always("counted-size"), "_unique _unique2 unique_dim unique_consecutive unique_dim_consecutive bincount"),
    (_read, "_local_scalar_dense item"),
    (_if_checked, "linalg_inv_ex linalg_cholesky_ex linalg_lu_factor_ex _linalg_solve_ex linalg_ldl_factor_ex"),
    (_histc, "histc"),
    (_repeat, "repeat_interleave.Tensor"),
    (_index, "index.Tensor"),
    (_index_put, "index_put index_put_ _index_put_impl_ _unsafe_index_put"),
    (_tensor_value(2), "masked_fill.Tensor masked_fill_.Tensor"),
    (_tensor_value(3), "index_fill.int_Tensor index_fill_.int_Tensor"),
    (_copy, "copy_"),
    (_pairwise(_copy), "_foreach_copy_"),
    (_to_copy, "_to_copy"),
) for name in names.split()}  # fmt: skip
"""The checks of operators that may wait, for the checker of races too. They change nothing."""

_OTHER_CHECKS: dict[str, OpCheck] = {
    "aten::copy_": _counted_copy,
    "aten::_foreach_copy_": _pairwise(_counted_copy),
    "aten::lift_fresh": _lift,
    # These take host tensors on purpose.
    **dict.fromkeys(("aten::set_.source_Storage", "aten::set_.source_Tensor", "aten::is_pinned"), _always("")),
    **dict.fromkeys(("aten::_pack_padded_sequence", "aten::_pack_padded_sequence_backward"), _always("")),
}

_REDUCTIONS = ("aten::max", "aten::min", "aten::amax", "aten::amin", "aten::sum", "aten::count_nonzero")

_PLAIN = """
    aten::to.dtype aten::where.ScalarSelf aten::where.ScalarOther aten::where.Scalar aten::reshape aten::flatten
    aten::flatten.using_ints aten::contiguous aten::linear aten::matmul aten::chunk aten::split.Tensor
    aten::split.sizes aten::expand_as aten::view_as aten::type_as aten::isfinite aten::square
    aten::scaled_dot_product_attention aten::rms_norm aten::layer_norm aten::softmax.int aten::log_softmax.int
    aten::dropout aten::conv1d aten::conv2d aten::einsum aten::outer
""".split()  # noqa: SIM905
"""Composites that are known not to wait: taking them apart would only cost time."""


class Op(NamedTuple):
    """Facts about one operation."""

    check: OpCheck | None
    """The check of its arguments; with None, only a host operand beside a device operand is wrong."""
    fresh: bool
    """Whether the results are new tensors, neither views nor arguments."""
    reduces: bool
    view: bool
    """Whether it is a view of one tensor, which is never wrong: the result is a device tensor if the argument is."""
    opens: bool
    """Whether it may be made of other operators, which are what counts then."""
    foreign: bool
    """Whether it is not torch's own."""
    func: Any
    """Held, so that its id stays its own."""


_BRANCHING = ("cond", "while_loop")
"""Higher-order operators whose branches are watched where they are called."""


def _higher(watch: ThreadState, args: Args, kwargs: dict[str, Any]) -> str | None:
    """Check a higher-order operator: what counts is what its functions do."""
    return None


def _foreign(watch: ThreadState, args: Args, kwargs: dict[str, Any]) -> str | None:
    """Check an operator that is not torch's own: it may take pinned memory, which a GPU's kernels reach."""
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    hosts = [tensor for tensor in given if tensor.dim() and not watch.is_device(tensor)]
    return None if all(marks.is_pinned(tensor) for tensor in hosts) else "host-operand"


def check_of(schema: Any, checks: dict[str, OpCheck] = CHECKS) -> OpCheck | None:
    """Return the check of one overload of an operator, or of all of them."""
    return checks.get(f"{schema.name}.{schema.overload_name}") or checks.get(schema.name)


def describe(func: Any) -> Op:
    """The table's entry for an operator overload."""
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher-order operator, whose arguments are functions and their arguments
        return Op(_higher, True, False, False, func.name() not in _BRANCHING, True, func)
    full = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    check = check_of(schema, _OTHER_CHECKS) or check_of(schema)
    plain, foreign = full in _PLAIN, not schema.name.startswith(TORCHS)
    if check is None and foreign and not func._can_decompose():
        check = _foreign
    fresh = plain or any(value.alias_info is None for value in schema.returns)
    # Inference mode alone shows torch's own composites whole.
    opens = not plain and (check is None or foreign) and (foreign or bool(func._can_decompose()))
    tensors = sum("Tensor" in str(argument.type) for argument in schema.arguments)
    view = not fresh and not opens and check is None and tensors == 1
    return Op(check, fresh, schema.name in _REDUCTIONS, view, opens, foreign, func)


_OPS: dict[int, Op] = {}
"""The known operators by id: an operator's own hash costs as much as the rest of a lookup."""


class SyncOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Checks every operation of one thread, and passes the device mark on to results."""

    supports_higher_order_operators = True

    def __init__(self, watch: ThreadState) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch
        self.around: Callable[[RunOp, Any, Args, dict[str, Any]], Any] | None = None
        """A function around each operation, in place of a mode, which would cost more than its work."""
        self.checker: Any = None
        """The checker of races that `around` reports to."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch wraps the mode against its compiler: every operation goes through that, the first imports it.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if types:
            if takes_apart(types):
                return of_dispatch_classes(self, self._watch, TorchCall(func, args, kwargs or {}), types)
            if any(map(is_traceable_wrapper_subclass_type, types)):
                return NotImplemented  # DTensor takes its tensors out and calls operators on them, which come here
            if any(map(marks.is_fake_type, types)):
                return func(*args, **kwargs or {})
        return self._alone(func, args, kwargs or {}) if _functions_watched() else self._seen(func, args, kwargs or {})

    def _alone(self, func: Any, args: Args, kwargs: dict[str, Any]) -> Any:
        """Run an operator that no function of torch has called, as the backward's: function modes are on."""
        try:
            # Asking a tensor for its storage must not pass through one.
            with marks.FunctionsOff():
                return self._seen(func, args, kwargs)
        except RuntimeError as error:
            refusal = None if self._watch.real else refusal_of(error, str(func))
            if refusal is None:
                raise
            raise refusal from error

    def _seen(self, func: Any, args: Args, kwargs: dict[str, Any]) -> Any:
        if self.around is None:
            return self._checked(func, args, kwargs)
        return self.around(self._checked, func, args, kwargs)

    def _checked(self, func: Any, args: Args, kwargs: dict[str, Any]) -> Any:
        watch = self._watch
        op = _OPS.get(id(func))
        if op is None:
            op = _OPS[id(func)] = describe(func)
        if op.view:
            return func(*args, **kwargs) if kwargs else func(*args)
        if op.opens and (inside := self._inside(op, args, kwargs)):
            with self, watch.called_back() if op.foreign else nullcontext():
                return inside(*args, **kwargs)
        to_host, placed = watch.to_host, False
        if kwargs and (place := kwargs.get("device")) is not None:
            placed = marks.names_device(place)
            if placed and not watch.real:
                return self._placed(func, args, kwargs)
            if marks.is_meta(place):
                return func(*args, **kwargs)
            if placed and not watch.quiet:
                self._check_upload(func, args, kwargs)
            to_host = to_host or (watch.real and not placed)
        device, host, tensors = _sides(watch, args, kwargs)
        if device and not watch.quiet:
            rule = op.check(watch, args, kwargs) if op.check else ("host-operand" if host else None)
            if rule:
                watch.flag(rule, "" if watch.call else str(func))
        try:
            out = func(*args, **kwargs) if kwargs else func(*args)
        except RuntimeError as error:
            if not device or watch.real:
                raise
            out = lacking(func, args, kwargs, error)
        if op.fresh and not to_host and (device or placed or (not tensors and _makes_on_device(watch))):
            mark(out)
            if op.reduces and isinstance(out, Tensor):
                watch.reduced = weakref.ref(out.untyped_storage())
        return out

    def opens(self, func: Any, args: Args, kwargs: dict[str, Any]) -> bool:
        """Return whether all accesses of this operator are seen inside of it, so that its schema is not needed.

        On a GPU it may launch kernels of its own, which are not seen.
        """
        op = _OPS.get(id(func)) or describe(func)
        return op.opens and not self._watch.real and self._inside(op, args, kwargs) is not None

    def _inside(self, op: Op, args: Args, kwargs: dict[str, Any]) -> Any:
        """Return what the operator runs, if that is made of operators or is a function of Python; else None."""
        func = op.func
        if op.check is _higher:
            return partial(self._with_functions, func)
        if op.check is None:
            return composite(func) or func.decompose
        on_device = _sides(self._watch, args, kwargs)[0] or any(map(_is_place, (*args, *kwargs.values())))
        return bodies(func).choose(func.name(), on_device)

    def _with_functions(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a higher-order operator, which calls its functions past all modes."""

        device, host, _ = _sides(self._watch, args, kwargs)

        def called(function: Callable[..., Any], *given: Any) -> Any:
            if device and not host:
                mark(given)  # the operator may have made them, as the indices of scores
            with self, self._watch.called_back():
                return function(*given)

        def watched(value: Any) -> Any:
            return partial(called, value) if callable(value) else value

        with _pop_mode_temporarily():
            out = func(*map(watched, args), **{name: watched(value) for name, value in kwargs.items()})
        if device:
            mark(out)
        return out

    def _placed(self, func: Any, args: Args, kwargs: dict[str, Any]) -> Any:
        """Make a tensor on an emulated device, for a call that no function mode saw: one inside another."""
        self._check_upload(func, args, kwargs)
        out = func(*args, **{**kwargs, "device": torch.device("cpu")})
        mark(out)
        return out

    def _check_upload(self, func: Any, args: Args, kwargs: dict[str, Any]) -> None:
        """Check a call that names a device, which no function mode saw: one inside another."""
        watch = self._watch
        if func is not torch.ops.aten._to_copy.default or watch.is_device(args[0]) or not args[0].numel():
            return
        TALLY.add("copies")
        rule = copy_rule(args[0], bool(kwargs.get("non_blocking")), up=True)
        if rule:  # torch uploads an index of numpy's by a copy that modes see
            watch.flag("index-by-host" if indexes_by_list(watch.call) else rule)


leave_uncompiled(SyncOps.__torch_dispatch__)


def _is_place(value: Any) -> bool:
    return isinstance(value, torch.device) and marks.names_device(value)


def _sides(watch: ThreadState, args: Args, kwargs: dict[str, Any]) -> tuple[bool, bool, bool]:
    """Return whether the arguments hold a device tensor, a host tensor with dimensions, any tensor at all."""
    device = host = tensors = False
    is_device = watch.is_device
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            tensors = True
            if value in marks.DEVICE_TENSORS or is_device(value):
                device = True
            elif value.dim():
                host = True
        elif isinstance(value, (list, tuple)) and value and not isinstance(value[0], (int, float)):
            for item in value:
                if isinstance(item, Tensor):
                    tensors = True
                    if is_device(item):
                        device = True
                    elif item.dim():
                        host = True
    return device, host, tensors


def _makes_on_device(watch: ThreadState) -> bool:
    """Return whether the user's call names a device or has a device tensor, so that its result is on the device."""
    call = watch.call
    if call is None or isinstance(call.func, torch._ops.OpOverload):
        call = watch.within or call  # made by torch, and perhaps passed on by a class or mode of the user's
    return watch.to_device or (call is not None and _sides(watch, call.args, call.kwargs)[0])


def mark(out: Any) -> None:
    if isinstance(out, Tensor):
        marks.DEVICE_TENSORS.add(out)
    elif isinstance(out, (list, tuple)):
        for item in out:
            mark(item)
