"""Speculation: the drafter of an engine, and the sizes of steps with drafts."""

from __future__ import annotations

from typing import NamedTuple

from gapless.model.drafting.seam import Drafter, Head, Learner
from gapless.pace.draft_gate import ENDING, FEWER


class Speculation(NamedTuple):
    """A drafter, and the bounds of the steps that run its drafts."""

    drafts: int
    drafter: Drafter | None
    rows: int
    """Most rows of a step with drafts"""
    head: Head | None = None
    """Drafting head, in place of a drafter"""
    learner: Learner | None = None
    """Update after each step, for drafters that learn"""

    @property
    def places(self) -> int:
        """Most tokens of a row in a step with drafts, in and out."""
        return self.drafts + 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of places of steps with drafts, ascending, the last `places`."""
        return (*(1 + drafts for drafts in FEWER if drafts < self.drafts), self.places)

    @property
    def samples(self) -> int:
        """Most logits of a step with drafts."""
        return (self.rows + ENDING) * self.places
