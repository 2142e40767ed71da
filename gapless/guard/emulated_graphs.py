"""Graphs of an emulated CUDA: captured operators run at once too, and a replay runs the same operators again.

A graph uses memory by its address: it does not keep tensors alive that are older than its capture. Here it holds views
of their storages, so that a replay runs, and counts who else holds them.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only

from . import marks
from .emulated_streams import capturing
from .watch import current

_Pool = tuple[int, int]
_VIEWS, _POOL = "_gapless_graph_views", "_gapless_graph_pool"
"""Attributes of a storage: the views of it that graphs hold, by number; the pool that a capture took it from."""

_pool_numbers = itertools.count(1)
_view_numbers = itertools.count(1)
_graphs: dict[_Pool, WeakSet[Any]] = {}
"""The graphs of each pool that hold its memory."""
_holders: Callable[[int], int] = torch._C._storage_Use_Count


class _Replaying(threading.local):
    depth = 0


_replaying = _Replaying()


def is_replaying() -> bool:
    """Return whether the calling thread replays a graph, which allocates nothing on a GPU."""
    return _replaying.depth > 0


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators that a graph captures, except views, which only compute an address."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.replays: list[Callable[[], Any]] = []
        self.own: dict[int, Any] = {}
        """The storages that were made in the capture, by id."""
        self.given: dict[int, Any] = {}
        """The older storages that it uses of a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        results = func._schema.returns
        if any(result.alias_info is None or result.alias_info.is_write for result in results) or not results:
            made = _made(out, args, kwargs)
            args, kwargs = tree_map_only(Tensor, self._by_address, (args, kwargs))
            for storage in map(_storage, made):
                if storage is not None and id(storage) not in self.given:
                    self.own[id(storage)] = storage
            self.replays.append(lambda: _again(func, args, kwargs, made))
        return out

    def _by_address(self, tensor: Tensor) -> Tensor:
        """Return a view of the tensor's memory that does not count as the program's."""
        storage = _storage(tensor)
        if storage is None or id(storage) in self.own or tensor not in marks.DEVICE_TENSORS:
            return tensor
        self.given[id(storage)] = storage
        with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
            view = torch.empty(0, dtype=tensor.dtype)
            view.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        if not hasattr(storage, _VIEWS):
            setattr(storage, _VIEWS, WeakValueDictionary())
        getattr(storage, _VIEWS)[next(_view_numbers)] = view
        return view


def _storage(tensor: Tensor) -> Any:
    is_plain = type(tensor) in (Tensor, Parameter) and tensor.layout is torch.strided
    return tensor.untyped_storage() if is_plain and not (tensor.is_conj() or tensor.is_neg()) else None


class EmulatedGraph:
    """Stands for `torch.cuda.CUDAGraph`: a replay's results are in the capture's memory."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._recorder = _Recorder()
        self._pool = pool_handle()

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **kwargs: Any) -> None:
        self._pool = pool or self._pool
        _graphs.setdefault(self._pool, WeakSet()).add(self)
        capturing(True)
        self._recorder.__enter__()  # type: ignore[no-untyped-call]

    def capture_end(self) -> None:
        capturing(False)
        self._recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for storage in self._recorder.own.values():
            setattr(storage, _POOL, self._pool)

    def replay(self) -> None:
        watch = current()
        quiet: AbstractContextManager[None] = nullcontext() if watch is None else watch.silence()
        with quiet, torch.no_grad(), _replay():
            for replay in self._recorder.replays:
                replay()

    def reset(self) -> None:
        self._recorder = _Recorder()
        _graphs.get(self._pool, WeakSet()).discard(self)

    def instantiate(self) -> None:
        """Do nothing: a replay needs no preparation."""

    def pool(self) -> _Pool:
        return self._pool

    def lost(self) -> list[Tensor]:
        """Return tensors over the memory that a replay uses and that was freed after the capture."""
        return [marks.whole(storage) for storage in self._recorder.given.values() if _is_freed(storage)]


@contextmanager
def _replay() -> Iterator[None]:
    _replaying.depth += 1
    try:
        yield
    finally:
        _replaying.depth -= 1


def _is_freed(storage: Any) -> bool:
    """Return whether graphs alone hold a storage, beside its object in Python, and no pool of theirs is its owner."""
    if _holders(storage._cdata) > len(getattr(storage, _VIEWS)) + 1:
        return False
    return not _graphs.get(getattr(storage, _POOL, None) or (0, 0))


def pool_handle() -> _Pool:
    return (0, next(_pool_numbers))


def replay_too(again: Callable[[], Any]) -> None:
    """Have the graph that the calling thread captures, if it captures one, do this at each replay."""
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, _Recorder):
            mode.replays.append(again)


def _again(func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> None:
    for before, now in zip(made, _made(func(*args, **kwargs), args, kwargs), strict=True):
        before.copy_(now)


def _made(out: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors of a result that are not among the arguments."""
    given = [id(one) for one in tree_leaves((args, kwargs))]
    return [one for one in tree_leaves(out) if isinstance(one, Tensor) and id(one) not in given]
