"""Decides steps: from a plan to a packet's words and the keys of its programs. It launches nothing."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gapless.base.records import Int32s, Request, StepPlan
from gapless.model.seam import BatchShape
from gapless.pace.draft_gate import WITHOUT_DRAFTS, DraftGate, StepKind, Verify, kind_of
from gapless.step.graphs import StepGraphs
from gapless.step.keys import ForwardKey, ProgramKey, StepKey
from gapless.step.listing import NO_LISTS, Lanes, Lists
from gapless.step.logprobs import LogprobShape
from gapless.step.packet import Packer
from gapless.step.wishes import NO_FILL, Fill, fill_for


class Decision(NamedTuple):
    """The programs of a step, and their properties. Steps that run alike share one object."""

    key: StepKey
    samples: int
    """Outbox lines to read, including null rows."""
    logprobs: LogprobShape | None
    captured: bool
    """Whether every program is a replay."""
    missed: bool
    """Whether some program runs eagerly in a step of a kind meant to be replayed."""
    wanted: tuple[ProgramKey, ...]
    """Programs that have or will have graphs; empty if no graph fits the step."""
    lists: tuple[tuple[int, Int32s], ...]
    """Padded lists of the lanes, by their numbers"""
    prompt: tuple[Int32s, ...]
    kind: StepKind
    """The gate's kind of the step"""
    replies: bool
    """Whether the host waits for replies to some rows"""
    fill: Fill | None = None
    """Fill of new rows outside the packet."""


class Leader:
    """The wishes of rows, and the available graphs."""

    def __init__(self, packer: Packer, lanes: Lanes, graphs: StepGraphs, gate: DraftGate | None = None) -> None:
        """`gate` decides which steps run drafts; without a gate none does."""
        self.packer = packer
        self.lanes = lanes
        self.graphs = graphs
        self.gate = gate
        self._decode: tuple[int, ...] = ()
        self._lists = NO_LISTS
        """Lists of a step of these decode rows alone."""
        self._fill: Fill | None = None
        """Slot fill of the last admitted rows."""
        self._last: Decision | None = None
        """Last decision, if the last step had these decode rows alone."""

    def admit(self, plan: StepPlan, requests: list[Request]) -> None:
        """Note the wishes of new rows. `requests` belong to the plan's admissions, in order."""
        for admission, request in zip(plan.admissions, requests, strict=True):
            self.lanes.admit(admission.row, request)
            if self.gate is not None:
                self.gate.admit(admission.row, request)
        self._fill = fill_for(plan.admissions, requests, self.lanes.table, self.gate is not None)

    def decide(self, plan: StepPlan) -> Decision:
        """Decide how to run this plan, after its requests were admitted."""
        same = plan.decode is self._decode and not plan.chunks
        lists = self._lists if same else self.lanes.of(plan)
        verify = self._verify(plan, lists)
        forward = self.wanted(plan, lists.adapted, verify.places)
        if same and (last := self._last) is not None and last.captured and last.key.forward is forward:
            return last
        fill, self._fill = self._fill, None
        decision = self._decided(plan, forward, lists, verify)
        if beyond := plan.pages[decision.key.forward.packet.page_writes :]:
            fill = (fill or NO_FILL).with_pages(np.array(self.packer.page_words(beyond), np.int32))
        if fill is not None:
            decision = decision._replace(key=decision.key._replace(load=fill.key), fill=fill)
        # A step with chunks has rows beyond its decode tuple.
        self._decode, self._lists, self._last = ((), NO_LISTS, None) if plan.chunks else (plan.decode, lists, decision)
        return decision

    def _verify(self, plan: StepPlan, lists: Lists) -> Verify:
        """Decide about drafts. Prompt scores need token places of a batch without drafts."""
        if self.gate is None or lists.prompt:
            return WITHOUT_DRAFTS
        if not plan.chunks:
            return self.gate.decide(plan.decode)
        return self.gate.decide_beside(plan.decode, plan.chunk_tokens, sum([chunk.last for chunk in plan.chunks]))

    def forget(self) -> None:
        """Drop the last decision: graphs were captured or dropped."""
        self._last = None

    def write(self, plan: StepPlan, decision: Decision, requests: list[Request], words: Int32s, outbox: int) -> None:
        """Write the packet, from its header on; `outbox` is the slot for the step's results."""
        shape = decision.key.forward.packet
        self.packer.write(plan, shape, requests, words[: shape.words], outbox, decision.prompt)

    def wanted(self, plan: StepPlan, adapted: bool = False, places: int = 1) -> ForwardKey | None:
        """Return the forward of the plan's bucket, if any; `adapted` if a row has an adapter."""
        if not plan.chunks:
            key = self.graphs.decode_key(len(plan.decode), plan.bound, places)
        else:
            going_on = sum([not chunk.last for chunk in plan.chunks])
            key = self.graphs.mixed_key(len(plan.decode), len(plan.chunks), plan.chunk_tokens, places, going_on)
        if key is None or (not plan.chunks and len(plan.pages) > key.packet.page_writes):
            return None
        return key.adapted if adapted else key

    def _decided(self, plan: StepPlan, bucket: ForwardKey | None, lists: Lists, verify: Verify) -> Decision:
        samples = len(plan.decode) + sum([chunk.last for chunk in plan.chunks])
        wanted: tuple[ProgramKey, ...] = ()
        captured, forward = False, None if lists.prompt else bucket
        if forward is not None:
            if plan.chunks and not self.graphs.has(forward) and (larger := self.graphs.larger(forward)) is not None:
                self.graphs.wish(forward)
                forward = larger
            key = self.lanes.key(forward, verify.drafts, lists)
            wanted = key.programs()
            captured = self.graphs.find(wanted)
        if forward is None or not self.graphs.has(forward):
            key = self.lanes.key(self.exact(plan, samples, lists, verify.places), verify.drafts, lists)
        elif plan.chunks:
            # Null rows follow decode rows, and sampling chunks. The loop skips their lines.
            samples = forward.samples
            lists = lists.beyond(len(plan.decode), forward.batch.decode // verify.places)
        padded = self.lanes.padded(lists, key.forward.samples, verify.places)
        logprobs = lists.logprobs(verify.places)
        missed = not captured and (bucket is not None or (bool(self.graphs.buckets) and not plan.chunks))
        replies = any([one.lane.replies for one in lists.lanes])
        kind = kind_of(len(plan.decode), plan.chunk_tokens)
        return Decision(key, samples, logprobs, captured, missed, wanted, padded, lists.prompt, kind, replies)

    def exact(self, plan: StepPlan, samples: int, lists: Lists, places: int) -> ForwardKey:
        chunks = tuple((chunk.start, chunk.size) for chunk in plan.chunks)
        batch = BatchShape(len(plan.decode) * places, chunks, plan.bound, places)
        width = lists.width if lists.prompt else 0
        return ForwardKey(batch, self.packer.shape(plan, lists.prompts), samples, width, lists.adapted)
