"""The seam of the lanes: parts of a step that run only for the rows that ask for them.

A lane is programs over a list of the step's sampled rows. Its list has a fixed place before the packet and is padded to
one of few sizes with its last entry, which is recomputed with the same result. Other rows are in no lane.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from gapless.base.records import Int32s, Request
from gapless.kernels.layout import HEADER_WORDS
from gapless.kernels.seam import Kernels
from gapless.kernels.tables import Adjustments, Tables
from gapless.memory.rows import RowTable
from gapless.step.keys import LaneKey, SampleKey
from gapless.step.mail import Mail
from gapless.step.outbox import OutboxShape
from gapless.step.processors import Processor


class Buffers(NamedTuple):
    """Memory shared by the programs of a step besides the tables, for up to R rows."""

    sent: Tensor
    """int32, all words that the host sends: `loads`, `lists`, `words`"""
    words: Tensor
    """int32, the packet from its header on"""
    loads: Tensor
    """int32, the fill of new rows outside the packet, right-aligned"""
    lists: tuple[tuple[Tensor, ...], ...]
    """int32 [R * W] each, the lists of each lane, in the order of LANES"""
    logits: Tensor
    """[S, vocab] in the model's dtype, of the first rows of the batch, place after place"""
    tokens: Tensor
    """int32 [R, W], their tokens"""
    lines: Tensor
    """int32 [slots, M], the published outboxes"""
    scores: Tensor
    """int32 [slots, M], scores of prompt tokens: `lines`, or device memory if `lines` is the host's"""
    mail: Mail
    """The mail of each row of the tables"""

    def rows(self, batch: int = 0) -> Tensor:
        """Return the row numbers, int32 [batch]; without a size [R], undefined after the last row."""
        return self.words[HEADER_WORDS : HEADER_WORDS + (batch or self.logits.shape[0])]


class DeviceState(Protocol):
    """The device state of an engine, as its lanes use it."""

    tables: Tables
    adjustments: Adjustments
    kernels: Kernels
    processors: tuple[Processor, ...]
    outbox: OutboxShape


class Listed(NamedTuple):
    """The rows of one step in a lane."""

    lane: Lane
    samples: tuple[int, ...]
    """Their numbers among the sampled rows of the batch"""
    asked: Any = None
    """Their joint wish, of the lane's own type"""


class LaneSizes(NamedTuple):
    """Sizes of the lists and steps that an engine prepares for."""

    sizes: tuple[int, ...]
    """Lengths of lists"""
    places: tuple[int, ...]
    """Logits of a row in steps with drafts, ascending; none without drafts"""
    drafted: tuple[tuple[int, int, int], ...]
    """Length of a list, sampled rows, and logits of each, of steps with drafts"""
    processors: int = 0
    """Logits processors that rows may ask for"""


class Lane(ABC):
    """A lane. It has no state: a row's setting is kept for it, and its programs work on the engine's device state."""

    name: str
    """Lane of parameters in base/params, and pool of the slots that its rows lease, if any"""
    owns: tuple[type, ...]
    """Types of its keys; no two keys of different types are equal"""
    lists = 1
    each_place = False
    """Whether its list has each place of a row with drafts"""
    scores = False
    """Whether listed rows get scores in the outbox, each with the number of most likely tokens that they ask for"""
    replies = False
    """Whether the host waits for what the step sends about listed rows"""
    reads: tuple[str, ...] = ()
    """Names in SamplingParams.extra_args"""

    @abstractmethod
    def asks(self, request: Request) -> Any:
        """Return the setting of a request's row; None if the row is not in this lane."""

    def listed(self, samples: tuple[int, ...], rows: list[int], asking: Mapping[int, Any], table: RowTable) -> Listed:
        """Return the list of a step; `rows` have the settings `asking`."""
        return Listed(self, samples)

    def sent(self, listed: Listed, batch: int, places: int) -> tuple[tuple[int, ...], ...]:
        """Return the contents of each list, unpadded, for `places` logits of each of `batch` rows."""
        return (spread(listed.samples, batch, places) if self.each_place else listed.samples,)

    @abstractmethod
    def keys(self, listed: Listed, size: int, sample: SampleKey) -> tuple[LaneKey | None, LaneKey | None]:
        """Return the programs before and after that of `sample`, for lists padded to `size` rows."""

    def likely(self, steps: LaneSizes) -> Iterable[LaneKey]:
        """Return the programs to capture at start; others are captured when they are missed."""
        return ()

    def kinds(self, steps: LaneSizes) -> Iterable[LaneKey]:
        """Return programs that together launch every kernel, for compilation before the first step."""
        return self.likely(steps)

    def wishes(self, request: Request) -> Int32s:
        """Return the contents of the slot of a row that leases one."""
        raise NotImplementedError

    def fill(self, state: DeviceState, row: int, slot: int, words: Tensor) -> None:
        """Fill the slot that a new row leases with its wishes."""
        raise NotImplementedError


def spread(samples: tuple[int, ...], batch: int, places: int) -> tuple[int, ...]:
    """Return a list that has each place of these rows."""
    return samples if places == 1 else tuple([place * batch + one for one in samples for place in range(places)])
