"""The seam of groups: the operations that ranks do together, inside the programs of a step.

All ranks call the same operations in the same order with the same shapes, from programs of their compute streams. An
operation ends once it has every rank's part. Sums are in the order of ranks, so all ranks get equal bits.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from gapless.base.share import Share


class Group(Protocol):
    """The ranks of an engine, seen by one of them."""

    share: Share

    def add(self, y: Tensor) -> Tensor:
        """Replace y, contiguous, of any float dtype or int64, by the sum over ranks, and return it. Floats are summed
        in float32 and rounded once."""
        ...

    def add_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add the sum of y [T, H] over ranks to x [T, H] in place, as `Kernels.add_rms_norm` does after `add`; return
        the norm of x by `weight` float32 [H]."""
        ...

    def gather(self, part: Tensor, out: Tensor) -> Tensor:
        """Give the columns `part` [N, C] to the leader, whose `out` [N, V] they become side by side, in the order of
        ranks; return `out`. Other ranks' `out` is empty, [N, 0]; their parts may have other widths."""
        ...

    def tell(self, x: Tensor) -> Tensor:
        """Replace x, int32 and contiguous, by the leader's, and return it."""
        ...

    def muted(self) -> AbstractContextManager[None]:
        """Have operations do nothing inside: each rank captures and compiles by itself. Nothing is in flight."""
        ...

    def stop(self) -> None:
        """End every wait of every rank for good: programs that wait raise, or end with undefined results. From any
        thread; may be called twice."""
        ...

    def close(self) -> None:
        """Let the memory of this rank's device go, once no rank runs a program. May be called twice."""
        ...
