"""CUDA graphs of an emulated device: what is captured runs at once, and a replay runs the same operators again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .watch import current


class _Capturing(threading.local):
    graph: EmulatedGraph | None = None


_capturing = _Capturing()
_pools = count(1)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators that a graph captures, except those that only compute an address."""

    def __init__(self, replays: list[Callable[[], Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._replays = replays

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        results = func._schema.returns
        if any(result.alias_info is None or result.alias_info.is_write for result in results) or not results:
            made = _made(out, args, kwargs)
            self._replays.append(lambda: _again(func, args, kwargs, made))
        return out


class EmulatedGraph:
    """Stands for `torch.cuda.CUDAGraph`: results of a replay are where those of the capture were."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._replays: list[Callable[[], Any]] = []
        self._recorder = _Recorder(self._replays)
        self._pool = (0, next(_pools))

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **kwargs: Any) -> None:
        self._pool = pool or self._pool
        _capturing.graph = self
        self._recorder.__enter__()  # type: ignore[no-untyped-call]

    def capture_end(self) -> None:
        _capturing.graph = None
        self._recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def replay(self) -> None:
        watch = current()
        quiet: AbstractContextManager[None] = nullcontext() if watch is None else watch.silence()
        with quiet, torch.no_grad():
            for replay in self._replays:
                replay()

    def reset(self) -> None:
        self._replays.clear()

    def instantiate(self) -> None:
        """Do nothing: a replay needs no preparation."""

    def pool(self) -> tuple[int, int]:
        return self._pool


def is_capturing() -> bool:
    """Return whether the calling thread captures a graph."""
    return _capturing.graph is not None


def pool_handle() -> tuple[int, int]:
    return (0, next(_pools))


def _again(func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> None:
    for before, now in zip(made, _made(func(*args, **kwargs), args, kwargs), strict=True):
        before.copy_(now)


def _made(out: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors of a result that are not among the arguments."""
    given = [id(one) for one in tree_leaves((args, kwargs))]
    return [one for one in tree_leaves(out) if isinstance(one, Tensor) and id(one) not in given]
