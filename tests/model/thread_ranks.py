"""Ranks as threads of one process: a group whose operations are sums of plain tensors, and a way to run all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier, BrokenBarrierError
from typing import Any

import torch
from torch import Tensor

from gapless.base.share import Share

PATIENCE = 120.0
"""Seconds that a rank waits for the others"""


class ThreadGroup:
    """Implements `Group`. An operation is checked to be the same on all ranks."""

    def __init__(self, share: Share, barrier: Barrier, given: list[Any]) -> None:
        self.share, self.barrier, self.given = share, barrier, given
        self.operations: list[str] = []

    def _all(self, what: str, part: Tensor) -> list[Tensor]:
        """Return every rank's part."""
        self.operations.append(what)
        assert part.is_contiguous()
        self.given[self.share.rank] = (what, part.clone())
        self.barrier.wait(PATIENCE)
        found = list(self.given)
        self.barrier.wait(PATIENCE)
        assert len({what for what, _ in found}) == 1, [what for what, _ in found]
        return [part for _, part in found]

    def add(self, y: Tensor) -> Tensor:
        parts = self._all(f"add {tuple(y.shape)} {y.dtype}", y)
        total = parts[0] if y.dtype == torch.int64 else parts[0].float()
        for part in parts[1:]:
            total = total + part
        return y.copy_(total)

    def add_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.add_(self.add(y)).float()
        return (wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + eps) * weight).to(x.dtype)

    def gather(self, part: Tensor, out: Tensor) -> Tensor:
        parts = self._all(f"gather {len(part)} {part.dtype}", part)
        if self.share.leads:
            return out.copy_(torch.cat(parts, 1))
        assert out.shape == (len(part), 0)
        return out

    def tell(self, x: Tensor) -> Tensor:
        return x.copy_(self._all(f"tell {tuple(x.shape)}", x)[0])

    @contextmanager
    def muted(self) -> Iterator[None]:
        raise NotImplementedError
        yield

    def stop(self) -> None:
        self.barrier.abort()


def on_ranks(world: int, run: Callable[[ThreadGroup], Any]) -> list[Any]:
    """Run `run` once for each rank, and return the results in their order."""
    barrier, given = Barrier(world), [None] * world
    groups = [ThreadGroup(Share(rank, world), barrier, given) for rank in range(world)]

    def one(group: ThreadGroup) -> Any:
        try:
            return run(group)
        except BaseException:
            group.stop()
            raise

    with ThreadPoolExecutor(world) as threads:
        futures = [threads.submit(one, group) for group in groups]
        errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
        raise error
    assert len({tuple(group.operations) for group in groups}) == 1
    return [future.result() for future in futures]
