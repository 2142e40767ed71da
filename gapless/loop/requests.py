"""The requests of a loop, from their submission to their end."""

from __future__ import annotations

from gapless.base.errors import GaplessError, RequestError
from gapless.base.params import check_extra_args
from gapless.base.part import Hooks, Part
from gapless.base.records import Request, StepPlan
from gapless.loop.steplog import StepLog
from gapless.memory.rows import RowTable
from gapless.plan.planner import Planner
from gapless.plan.room import check_fits
from gapless.plan.row import RowSpec
from gapless.step import lanes
from gapless.step.wishes import wish_words


class Unserved(Part):
    """Refuses requests for features that a loop lacks."""

    def __init__(self, adapters: bool, masks: bool) -> None:
        """`adapters` and `masks`: whether another part serves them."""
        self._adapters, self._masks = adapters, masks

    def check(self, request: Request) -> Request:
        name = request.params.masked_by
        if name and not self._masks:
            raise RequestError(f"{name}: rows of this engine take several tokens in a step; leave it out", name)
        check_extra_args(request.params, [name for lane in lanes.LANES for name in lane.reads])
        if request.adapter and not self._adapters:
            raise RequestError(f"this engine has no adapter {request.adapter!r}", "model", "model_not_found")
        return request


class Requests(dict[int, Request]):
    """Requests that have not ended, by key."""

    def __init__(self, planner: Planner, rows: RowTable, hooks: Hooks, log: StepLog, speculates: bool) -> None:
        """`speculates`: whether rows may have drafts."""
        super().__init__()
        self._planner, self._rows, self._hooks, self._log, self._speculates = planner, rows, hooks, log, speculates
        self._arrivals = 0
        self.fresh: set[int] = set()
        """Keys of requests that no step has admitted yet."""

    def submit(self, request: Request) -> None:
        """Queue a request. Raises QueueFullError, or RequestError if it could never run."""
        check_fits(request, self._planner.pages.pools[0], self._rows)
        for part in self._hooks.check:
            request = part.check(request)
        asked = self._asked(request)
        idle = not self._planner.wanting
        self._planner.add(asked, request.known, again=request.output is not None)
        self._arrivals += 1
        self[request.key] = request
        if request.output is None or not len(request.output):  # others were counted by the engine that died
            self.fresh.add(request.key)
        try:
            for part in self._hooks.begin:
                part.begin(request)
        except BaseException:
            self.abort(request.key)
            raise
        if idle:
            self._log.work_came()

    def _asked(self, request: Request) -> RowSpec:
        params, leases = request.params, request.params.leases
        for name in leases:
            if not self._rows.slots[name].size:
                raise RequestError(f"this engine was built with no slots of {name!r}, which the request needs")
        return RowSpec(
            request.key, len(request.tokens), request.max_len, request.priority, self._arrivals, request.salt,
            request.adapter, (*leases, request.adapter) if request.adapter else leases,
            fill=wish_words(request),
            to_score=0 if params.prompt_logprobs is None else len(request.tokens) - 1,
            sends_past=bool(leases) or (self._speculates and request.most_drafts > 0),
            held=bool(params.masked_by),
            transfer=request.transfer,
        )  # fmt: skip

    def abort(self, key: int) -> None:
        """End a request without further tokens; steps in flight run on, their tokens are dropped. Unknown keys are
        ignored."""
        if key in self:
            self.fresh.discard(key)
            self._planner.abort(key)
            self._left(key)

    def end(self, number: int, failed: bool) -> None:
        """End the request of a row, which finished, or `failed` for its logits or KV."""
        row = self._planner.by_row[number]
        assert row is not None, f"row {number} ended twice"
        (self._planner.fail if failed else self._planner.finish)(row)
        self._left(row.key)

    def end_failed(self) -> list[tuple[int, GaplessError]]:
        """End the requests that parts have failed. Returns their keys and errors."""
        failed = list[tuple[int, GaplessError]]()
        for part in self._hooks.failed:
            for key, error in part.failed():
                if key in self:
                    self.abort(key)
                    failed.append((key, error))
        return failed

    def _left(self, key: int) -> None:
        request = self.pop(key)
        for part in self._hooks.end:
            part.end(request)

    def admitted(self, plan: StepPlan) -> list[tuple[int, int]]:
        """Count the requests that a launched plan admits. Returns their keys and first computed positions."""
        counters = self._log.counters
        for admission in plan.admissions:
            if admission.key in self.fresh:  # a preempted one was counted before
                self.fresh.remove(admission.key)
                counters.admitted_tokens += len(self[admission.key].tokens)
                counters.admitted_cached += admission.start
                counters.admitted_loaded += admission.loaded
            counters.prefix_queries += admission.length
            counters.prefix_hits += admission.start
        return [(admission.key, admission.start) for admission in plan.admissions]
