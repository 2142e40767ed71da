"""The timeline: where the device's time went. Every nanosecond is busy, or idle with a cause.

The idle time in front of a step lies between the end of the step before it and its own start on the device. It is cut,
in this order, into at most four parts; a part may be empty:

1. `no_work`: until the loop was given work again, when it had none. Idle with nothing to do is not a bubble.
2. `copy_wait`: until the tokens of the step that the depth limit made this one wait for were home. The device had
   ended that step, and only the copy of its tokens kept the host from going on.
3. `depth`, `graph_miss` or `host_late`: until the host had enqueued the step. `depth` when there was work, and the
   limit made the step wait for the very step whose end began the gap: one more in flight would have filled it.
   `graph_miss` when the step was enqueued kernel by kernel because its shape was not captured. `host_late` in all
   other cases: the host could have come in time and did not; the pause of a capture counts there too.
4. `launch`: the step was enqueued and the device had not begun it; a stream's own time between two steps.

`grammar` is the name of a part that does not exist yet: nothing counts there.

A step counts as busy from its first to its last event. Where the host enqueues a step kernel by kernel while it runs,
the device may have waited inside of it, and no event can tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from gapless.loop.records import StepRecord

CAUSES = ("host_late", "no_work", "grammar", "copy_wait", "graph_miss", "depth", "launch")
TOKEN_BUCKETS = 33


class Gap(NamedTuple):
    """The device was idle from `start` to `end`, before `step`."""

    start: int
    end: int
    cause: str
    step: int


def borders(record: StepRecord, idle_from: int) -> tuple[int, int, int]:
    """Where the four parts of the idle time before a step meet, between `idle_from` and its start on the device."""
    end = record.device_start
    work = min(max(idle_from, record.work_at), end)
    copied = min(max(work, record.held_until), end)
    return work, copied, min(max(copied, record.launched_at), end)


def held_for_depth(record: StepRecord) -> bool:
    """Whether the depth limit, with work there, let the device run dry before this step."""
    return 0 < record.held_by == record.step - 1 and record.held_until >= record.work_at


def gaps(record: StepRecord, idle_from: int) -> list[Gap]:
    """The idle time from `idle_from`, the end of the step before, to this step's start, by cause."""
    work, copied, launched = borders(record, idle_from)
    late = "depth" if held_for_depth(record) else "graph_miss" if record.missed else "host_late"
    edges = (idle_from, work, copied, launched, record.device_start)
    parts = zip(edges, edges[1:], ("no_work", "copy_wait", late, "launch"), strict=False)
    return [Gap(start, end, cause, record.step) for start, end, cause in parts if end > start]


def all_gaps(records: Sequence[StepRecord]) -> list[Gap]:
    """Every gap between the records of consecutive steps."""
    found = []
    for before, record in pairwise(records):
        if record.step == before.step + 1:
            found += gaps(record, before.device_end)
    return found


class Timeline:
    """Totals since `start`, in ns of the device's clock: `busy` and the idle times add up to `covered - start`."""

    def __init__(self) -> None:
        self.start = 0
        self.covered = 0
        """Every moment before this one is accounted for."""
        self.busy = 0
        self.host_late = self.no_work = self.copy_wait = self.graph_miss = self.depth = self.launch = 0
        self.plan = self.prepare = self.enqueue = self.wait = self.post = self.copy = 0
        self.decode_steps = self.prefill_steps = self.mixed_steps = 0
        self.step_tokens = [0] * TOKEN_BUCKETS
        """Steps by their tokens: entry b counts those of more than 2**(b - 1) and at most 2**b."""
        self.tokens = 0

    def begin(self, now: int) -> None:
        """Time counts from now on, unless it does already."""
        if not self.start:
            self.start = self.covered = now

    def add(self, records: Iterable[tuple[Any, ...]]) -> None:
        """Account for observed steps, StepRecords or tuples like them, in their order."""
        # The rule of `gaps`, written out over plain names: every step passes here.
        at, busy, plan, prepare, enqueue, wait, post, copy = self.covered, 0, 0, 0, 0, 0, 0, 0
        for (
            step, rows, chunk, _, work_at, held_by, held_until, planning_at, planned_at, packed_at, launched_at,
            start, end, home_at, observing_at, observed_at, committed_at, _, missed, _, _,
        ) in records:  # fmt: skip
            if start > at:
                if work_at > at:
                    self.no_work += min(work_at, start) - at
                    at = min(work_at, start)
                if held_until > at:
                    self.copy_wait += min(held_until, start) - at
                    at = min(held_until, start)
                if launched_at > at:
                    late = min(launched_at, start) - at
                    if held_by and held_by == step - 1 and held_until >= work_at:
                        self.depth += late
                    elif missed:
                        self.graph_miss += late
                    else:
                        self.host_late += late
                    at += late
                self.launch += start - at
                at = start
            if end > at:
                busy += end - at
                at = end
            plan += planned_at - planning_at
            prepare += packed_at - planned_at
            enqueue += launched_at - packed_at
            wait += observed_at - observing_at
            post += committed_at - observed_at
            copy += home_at - end
            self._count(rows, chunk)
        self.covered = at
        self.busy += busy
        self.plan += plan
        self.prepare += prepare
        self.enqueue += enqueue
        self.wait += wait
        self.post += post
        self.copy += copy

    def _count(self, rows: int, chunk: int) -> None:
        if not chunk:
            self.decode_steps += 1
        elif rows:
            self.mixed_steps += 1
        else:
            self.prefill_steps += 1
        self.step_tokens[(rows + chunk - 1).bit_length()] += 1
        self.tokens += rows + chunk

    def rest(self, now: int) -> None:
        """Nothing is in flight and there is nothing to run: all until `now` was idle without work."""
        self.begin(now)
        if now > self.covered:
            self.no_work += now - self.covered
            self.covered = now

    def totals(self) -> dict[str, int]:
        """The same numbers by the names of engine.seam.Stats."""
        return {
            "wall_ns": self.covered - self.start,
            "busy_ns": self.busy,
            "idle_host_late_ns": self.host_late,
            "idle_no_work_ns": self.no_work,
            "idle_copy_wait_ns": self.copy_wait,
            "idle_graph_miss_ns": self.graph_miss,
            "idle_depth_ns": self.depth,
            "idle_launch_ns": self.launch,
            "plan_ns": self.plan,
            "prepare_ns": self.prepare,
            "launch_ns": self.enqueue,
            "wait_ns": self.wait,
            "post_ns": self.post,
            "copy_ns": self.copy,
            "steps_decode": self.decode_steps,
            "steps_prefill": self.prefill_steps,
            "steps_mixed": self.mixed_steps,
            "step_tokens_sum": self.tokens,
        }
