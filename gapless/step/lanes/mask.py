"""The lane of rows with matchers: which tokens may come next, and their tokens for the mask makers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from gapless.base.records import Request
from gapless.step.keys import LaneKey, SampleKey
from gapless.step.lane import Buffers, DeviceState, Lane, LaneSizes, Listed


class MaskKey(NamedTuple):
    """Fetches the masks of rows."""

    rows: int
    drafted: tuple[int, int] = (0, 1)
    """Rows of the batch, if they have drafts, and logits of each row"""

    def run(self, state: DeviceState, at: Buffers, index: Tensor) -> None:
        """Fetch the masks of the listed rows from their mail, or mark them as late."""
        batch, places = self.drafted
        at.mail.fetch()
        state.kernels.mask(index[: self.rows], at.rows(batch), state.tables, at.mail.words, places)


class ReplyKey(NamedTuple):
    """Sends the sampled tokens to the mask makers."""

    rows: int
    drafts: int | None = None
    """Most drafts in a reply; None if no row gets drafts"""

    def run(self, state: DeviceState, at: Buffers, index: Tensor) -> None:
        """Write the new tokens and next drafts of the listed rows to their mail."""
        drafts, most = (0, 0) if self.drafts is None else (self.drafts, state.outbox.width - 1)
        state.kernels.reply(index[: self.rows], at.rows(), at.tokens, state.tables, at.mail.words, drafts, most)
        at.mail.send()


class MaskLane(Lane):
    name = "mask"
    owns = (MaskKey, ReplyKey)
    replies = True

    def asks(self, request: Request) -> bool | None:
        return None if request.matcher is None else True

    def keys(self, listed: Listed, size: int, sample: SampleKey) -> tuple[MaskKey, ReplyKey]:
        # Drafts after a step without any are seldom verified, and their masks cost more than one.
        drafts = sample.places - 1 if sample.drafts else None
        return MaskKey(size, (sample.drafted, sample.places)), ReplyKey(size, drafts)

    def likely(self, steps: LaneSizes) -> Iterator[LaneKey]:
        yield from (MaskKey(size, (batch, places)) for size, batch, places in steps.drafted)
        for size in steps.sizes:
            yield from (MaskKey(size), ReplyKey(size))
            yield from (ReplyKey(size, each - 1) for each in ((1, *steps.places) if steps.places else ()))
