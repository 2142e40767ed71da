"""A lane that adds a number to the logit of one token, for rows with extra_args={"nudge": 5.0, "nudge_token": 42}."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from gapless.step.lane import Lane, Listed, spread


class NudgeKey(NamedTuple):
    """Nudges rows. Its last field distinguishes it from the keys of other lanes."""

    rows: int
    batch: int = 0
    lane: str = "nudge"

    def run(self, state, at, rows, tokens, bits):
        """Add to the model's logits. Padding repeats the last entry, so each sum is computed before any is written."""
        rows, tokens = rows[: self.rows].long(), tokens[: self.rows].long().clamp(0, at.logits.shape[1] - 1)
        nudged = at.logits[rows, tokens].float() + bits[: self.rows].view(torch.float32)
        at.logits.index_put_((rows, tokens), nudged.to(at.logits.dtype))


class NudgeLane(Lane):
    name = "nudge"
    owns = (NudgeKey,)
    lists = 3  # rows, their tokens, the bits of the numbers
    reads = ("nudge", "nudge_token")

    def asks(self, request):
        asked = request.params.extra_args or {}
        return (int(asked.get("nudge_token", 0)), asked["nudge"]) if "nudge" in asked else None

    def listed(self, samples, rows, asking, table):
        return Listed(self, samples, [asking[row] for row in rows])

    def sent(self, listed, batch, places):
        tokens, numbers = zip(*listed.asked, strict=True)
        values = tokens, np.array(numbers, np.float32).view(np.int32)
        return spread(listed.samples, batch, places), *[tuple(np.repeat(each, places).tolist()) for each in values]

    def keys(self, listed, size, sample):
        return NudgeKey(size * sample.places, sample.drafted), None  # before sampling, and nothing after it

    def likely(self, steps):
        return map(NudgeKey, steps.sizes)
