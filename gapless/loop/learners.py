"""LoopParts that take measured steps to the controllers of `pace`."""

from __future__ import annotations

import logging

from gapless.base.part import Part
from gapless.base.records import StepTokens
from gapless.loop.settle import Lines, of_decode_rows
from gapless.loop.steplog import Measured, StepLog
from gapless.pace.chunk_limit import ChunkLimit
from gapless.pace.depth import Depth
from gapless.pace.draft_gate import DraftGate, Verify
from gapless.step.launcher import Flight

log = logging.getLogger("gapless.loop")


class DraftLearner(Part):
    """Takes tokens and times of steps to the gate of drafts."""

    def __init__(self, gate: DraftGate, depth: Depth) -> None:
        self._gate, self._depth = gate, depth

    def settled(self, flight: Flight, lines: Lines, tokens: StepTokens) -> None:
        plan = flight.plan
        rows, drafted = of_decode_rows(plan, lines.rows, lines.tokens) if plan.chunks else lines[:2]
        self._gate.observe(rows, drafted, Verify(flight.batch.places, flight.decision.key.sample.drafts))

    def retired(self, flight: Flight, measured: Measured) -> None:
        if not measured.scores:
            ns = max(measured.device, self._depth.host_ns(measured.host))
            self._gate.learn(flight.decision.kind, flight.batch.places, flight.batch.prompt, ns, measured.held)


class ChunkLearner(Part):
    """Takes times of steps to the limit of prompt tokens, and counts steps over a user's bound."""

    def __init__(self, limit: ChunkLimit, steps: StepLog) -> None:
        self._limit, self._log = limit, steps
        self._warned = False

    def retired(self, flight: Flight, measured: Measured) -> None:
        rows, chunk_tokens, ns = len(flight.plan.decode), flight.plan.chunk_tokens, measured.device
        cause = self._limit.over(rows, chunk_tokens, ns)
        if cause is not None:
            self._log.over_max_itl(cause)
            if not self._warned:
                self._warned = True
                log.warning(
                    "a step of %d decoding rows and %d prompt tokens took %.0f ms, and max_itl is %g (cause: %s); "
                    "further ones are only counted, by gapless:steps_over_max_itl_total",
                    rows, chunk_tokens, ns / 1e6, self._limit.most_ns / 1e6, cause,
                )  # fmt: skip
        if not measured.scores:
            self._limit.learn(rows, chunk_tokens, ns)
