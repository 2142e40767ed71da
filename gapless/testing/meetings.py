"""The operations of simulated ranks: a program that comes to one stops until the other ranks' programs come too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from gapless.base import observe
from gapless.base.share import Share
from gapless.device.facts import HOST_KEY
from gapless.kernels.plain import add_rms_norm


class Given:
    """A rank's part in an operation, as it was when its program came there."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.clone()


class Meeting:
    """One operation that all ranks do together, the same by its number on every rank."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.given: dict[int, Given] = {}
        self.left = 0
        """Ranks that have their result"""


class Meets(Protocol):
    """The place where the ranks of a world meet, seen by one of them."""

    def come(self, number: int, what: str, given: Given) -> Meeting:
        """Bring this rank's part to its operation of this number. AssertionError: another rank does something else."""
        ...

    def waits_in(self, meeting: Meeting, needed: Sequence[int]) -> None:
        """Stop the running program until the needed ranks came. Raises if the ranks were stopped."""
        ...

    def leave(self, number: int) -> None:
        """Note that this rank has its result."""
        ...

    def stop(self, why: str) -> None:
        """End all ranks."""
        ...


class RankGroup:
    """Implements `Group` for a rank of a world."""

    # Without a dictionary: who looks for a program's tensors does not find all ranks' through it.
    __slots__ = ("__weakref__", "_calls", "_muted", "_place", "number", "share")

    def __init__(self, share: Share, place: Meets) -> None:
        self.share = share
        self._place = place
        self._muted = False
        self._calls = 0
        self.number = id(self)
        _GROUPS[self.number] = self

    def add(self, y: Tensor) -> Tensor:
        torch.ops.gapless_world.meet(self.number, "add", y, y)
        return y

    def add_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float) -> Tensor:
        return add_rms_norm(x, self.add(y), weight, eps)

    def gather(self, part: Tensor, out: Tensor) -> Tensor:
        torch.ops.gapless_world.meet(self.number, "gather", part, out)
        return out

    def tell(self, x: Tensor) -> Tensor:
        torch.ops.gapless_world.meet(self.number, "tell", x, x)
        return x

    @contextmanager
    def muted(self) -> Iterator[None]:
        self._muted = True
        try:
            yield
        finally:
            self._muted = False

    def stop(self) -> None:
        self._place.stop("the group was stopped")

    def close(self) -> None:
        pass

    def meet(self, kind: str, part: Tensor, out: Tensor) -> None:
        """Do an operation with the other ranks; only here, since a replay calls the operator alone."""
        if self._muted:
            return
        number, self._calls = self._calls, self._calls + 1
        given = Given(part)
        meeting = self._place.come(number, f"{self._facts(kind, part)} (call {number})", given)
        if observe.watcher is not None:
            observe.watcher.gives(given)
        self._place.waits_in(meeting, self._needed(kind))
        parts = [meeting.given[rank] for rank in self._needed(kind)]
        if observe.watcher is not None:
            for one in parts:
                observe.watcher.takes(one, one.tensor)
        self._finish(kind, [one.tensor for one in parts], out)
        self._place.leave(number)

    def _needed(self, kind: str) -> Sequence[int]:
        """Return the ranks whose parts this rank waits for: the fewest that an implementation can do with."""
        if kind == "add":
            return range(self.share.world)
        return range(self.share.world if kind == "gather" else 0) if self.share.leads else range(kind == "tell")

    @staticmethod
    def _facts(kind: str, part: Tensor) -> str:
        """Return the traits that all ranks' calls of an operation have in common."""
        shape = part.shape[:1] if kind == "gather" else part.shape
        return f"{kind} {list(shape)} {part.dtype}"

    def _finish(self, kind: str, parts: list[Tensor], out: Tensor) -> None:
        if kind == "add":
            out.copy_(added(parts))
        elif kind == "gather" and parts:
            out.copy_(torch.cat(parts, dim=1))
        elif kind == "tell" and parts:
            out.copy_(parts[0])


def added(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum in the order of ranks; floats are summed in float32."""
    total = parts[0].clone() if parts[0].dtype == torch.int64 else parts[0].float()
    for one in parts[1:]:
        total = total + one
    return total


_GROUPS: WeakValueDictionary[int, RankGroup] = WeakValueDictionary()
_OPERATORS: Any = torch.library.Library("gapless_world", "DEF")  # type: ignore[no-untyped-call]
_OPERATORS.define("meet(int group, str kind, Tensor part, Tensor(a!) out) -> ()")
_OPERATORS.impl("meet", lambda group, *given: _GROUPS[group].meet(*given), HOST_KEY)
