"""The numbers of an engine at one moment: a record of each part that counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, fields, is_dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from gapless.engine.series import gauges
from gapless.grammar.compiler import GrammarCounts
from gapless.loop.records import MaskCounts, RankCounts, StepCounts
from gapless.loop.timeline import DeviceTimes, HostTimes, StepSizes
from gapless.memory.pages import PageCounts
from gapless.offload.copies import HostCounts
from gapless.offload.lower import LowerCounts
from gapless.pace.draft_gate import DraftCounts
from gapless.plan.queue import QueueCounts

if TYPE_CHECKING:
    from gapless.loop.loop import Loop


@dataclass(frozen=True, slots=True)
class Stats:
    """The numbers of an engine at one moment. `engine.series` separates gauges from counters, which only grow."""

    queue: QueueCounts = field(default_factory=QueueCounts)
    pages: PageCounts = field(default_factory=PageCounts)
    """Summed over all page groups, so that they add up to the total and match the page map"""
    steps: StepCounts = field(default_factory=StepCounts)
    sizes: StepSizes = field(default_factory=StepSizes)
    device: DeviceTimes = field(default_factory=DeviceTimes)
    host_ns: HostTimes = field(default_factory=HostTimes)
    allocations: int = 0
    """Device allocations and frees in the driver since ready. Each makes host and device wait; there should be none."""
    ranks: RankCounts = field(default_factory=RankCounts)
    drafts: DraftCounts = field(default_factory=DraftCounts)
    masks: MaskCounts = field(default_factory=MaskCounts)
    grammars: GrammarCounts = field(default_factory=GrammarCounts)
    tier: HostCounts = field(default_factory=HostCounts)
    lower: tuple[LowerCounts, ...] = ()
    """Counts of each tier below the host tier, in order"""

    def plus(self, before: Stats) -> Stats:
        """Return these numbers, with the counters of an engine `before` this one added."""
        found: Stats = _plus(self, before, "", gauges())
        return found

    def beside(self, other: Stats) -> Stats:
        """Return the sums with the numbers of an engine beside this one, gauges included."""
        found: Stats = _plus(self, other, "", set())
        return found


def collect(loop: Loop, held: int, grammars: GrammarCounts, allocations: int) -> Stats:
    """Return the numbers of an engine, whose loop does not have the `held` ones of its waiting requests."""
    planner, gate, timeline = loop.planner, loop.launcher.gate, loop.account()
    ranks = loop.launcher.ranks
    masks, transfers, waiting = loop.parts.masks, loop.parts.transfers, len(planner.waiting) + held
    return Stats(
        queue=QueueCounts(planner.room.running, waiting, loop.in_flight, loop.depth, planner.preemptions),
        pages=PageCounts(*map(sum, zip(*[astuple(pool.counts()) for pool in loop.pools], strict=True))),
        steps=replace(loop.counters, generation_tokens=loop.rows.appended),
        sizes=timeline.sizes,
        device=timeline.device,
        host_ns=replace(timeline.host),
        allocations=allocations,
        ranks=RankCounts(tuple(ranks.lags()), tuple(ranks.waited())) if ranks else RankCounts(),
        drafts=gate.report() if gate else DraftCounts(),
        masks=masks.report() if masks else MaskCounts(),
        grammars=grammars,
        tier=transfers.report() if transfers else HostCounts(),
        lower=transfers.host.below.report() if transfers else (),
    )


def _plus(now: Any, before: Any, path: str, gauges: set[str]) -> Any:
    """Add two numbers of one path, or all in two records, mappings or tuples; None stands for a missing one."""
    if before is None or path in gauges:
        return now
    if now is None:
        now = type(before)()
    if isinstance(now, tuple):
        return tuple([_plus(*pair, path, gauges) for pair in zip_longest(now, before)])
    if isinstance(now, Mapping):
        return {key: number + before[key] for key, number in now.items()}
    if not is_dataclass(now):
        return now + before
    kind: Any = type(now)
    names = [one.name for one in fields(kind)]
    parts = [_plus(getattr(now, one), getattr(before, one), f"{path}.{one}".lstrip("."), gauges) for one in names]
    return kind(*parts)
