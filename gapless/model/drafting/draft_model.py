"""Draft models: a small model of the same vocabulary that drafts for a larger one.

It runs the very tokens that its model runs, in the same steps, so its keys and values exist for every token in a
page: prompts, prefix hits and resumed requests need nothing more. In a step that verifies it runs them place by place,
each from its own draft, and the last draft too, since that may be kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from typing import NamedTuple, Self

import torch
from torch import Tensor

from gapless.comm.alone import ONE_RANK
from gapless.comm.seam import Group
from gapless.kernels.kv import KVFormat, KVLayout
from gapless.kernels.seam import Kernels
from gapless.kernels.tables import Tables
from gapless.model.attention import AttentionPlan
from gapless.model.drafting.draws import Draws, PlaceTokens
from gapless.model.seam import BatchShape, KVCache, Model, StepInputs
from gapless.model.spec import ModelSpec


class PageShare(NamedTuple):
    """The place of a draft model's layers in the pages: after its model's, in a shape of their own."""

    spare: int
    """Layers of the model's shape that a page has beside the model's own"""
    first: int
    """The draft model's first layer, in a page seen as layers of its shape"""
    unused: int
    """Layers of its shape after its own"""
    kv: KVLayout
    """The layer of its memory"""

    @classmethod
    def of(cls, model: ModelSpec, draft: ModelSpec, kind: KVFormat = KVFormat.AUTO) -> PageShare:
        """Share pages between two models, of a rank's heads. A page is whole layers of either shape, so up to a few may
        be unused."""
        large, small = (
            KVLayout(kind, at.kv_heads, at.head_dim, torch.float32)
            for at in (model.layer.attention, draft.layer.attention)
        )
        width, own = large.entry_bytes, small.entry_bytes
        layers, first = len(model.layers), -(-len(model.layers) * width // own)
        whole = math.lcm(width, own)
        last = first + len(draft.layers)
        page = -(-last * own // whole) * whole
        return cls(page // width - layers, first, page // own - last, small)

    def view(self, cache: KVCache, scales: Tensor | None = None) -> KVCache:
        """Return the whole memory as layers of the draft model's shape, with its scales."""
        pages, _, _, page_size = cache.data.shape[:4]
        return KVCache(cache.data.view(self.kv.shape(pages, -1, page_size)), scales=scales)


class DraftModel:
    """A draft model beside its model. Implements `model.drafting.seam.Head`."""

    def __init__(
        self, draft: Model, model: Model, kernels: Kernels, view: Callable[[KVCache], KVCache],
        group: Group = ONE_RANK,
    ) -> None:  # fmt: skip
        """`view` returns the draft model's part of the KV memory."""
        self.draft, self.model, self.kernels, self.view, self.group = draft, model, kernels, view, group

    def beside(self, model: Model) -> Self:
        """See `model.drafting.seam.Head`. This drafter is cut down as the model is."""
        head = copy(self)
        head.model, head.draft = model, self.draft.first_layers()
        return head

    def ask(self, rows: Tensor, tables: Tables, drafts: int) -> None:
        """See `model.drafting.seam.Head`."""
        self.kernels.ask(rows, tables, drafts)

    def forward(self, inputs: StepInputs, plan: AttentionPlan, tables: Tables, cache: KVCache) -> Tensor:
        """Run the draft model, which drafts where rows have several places; then the model."""
        own = inputs._replace(adapters=None)
        if inputs.places > 1:
            self._draft(own, plan.decode, tables, cache)
        if inputs.places == 1 or inputs.starts is not None:
            self.draft.forward(own, plan, self.view(cache))
        return self.model.forward(inputs, plan, cache)

    def _draft(self, inputs: StepInputs, count: int, tables: Tables, cache: KVCache) -> None:
        """Write drafts to the inputs of places after the first, of `count` tokens in all, and to the rows' history."""
        tokens, own = PlaceTokens.of(inputs).up_to(count), self.view(cache)
        places = tokens.split(inputs.places)
        rows = len(places[0].rows)
        plan = self.draft.plan(BatchShape(rows, (), inputs.columns * cache.page_size))
        draws = Draws(self.kernels, places[0].rows, tables, self.draft.vocab_size, group=self.group)
        for index, place in enumerate(places):
            alone = inputs._replace(**place._asdict(), places=1, starts=None)
            hidden = self.draft.forward(alone, plan, own)
            if index + 1 < len(places):
                places[index + 1].ids.copy_(draws.next(self.draft.logits(hidden)))
        tokens.beyond(rows).keep(self.kernels, tables)
