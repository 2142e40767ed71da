"""The protections of masks: who may write a slot's mail and when, and what the device believes of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from automaton import Automaton
from mutation.tools import Site, both, replaced
from simulation import world
from simulation.scenario import VOCAB, Scenario

from gapless.kernels.layout import DRAFTED, LATE, LENGTH, MAIL_ALONG, MAIL_TAG, OWNER
from gapless.loop import masks as loop_masks
from gapless.loop.loop import Loop
from gapless.loop.masks import NOTHING, Masks
from gapless.step.mail import Mail, tag_of
from gapless.step.program import StepProgram


def stale_mail(loop: Loop) -> None:
    """A new row finds the mail of the slot's last owner, which had as many tokens. Lengths meet by chance alone."""
    masks, mail = loop.masks, loop.launcher.executor.mail
    if masks is None:
        return  # as in engines on several devices, which take no matchers
    admit = masks.admit

    def with_a_ghost(key: int, slot: int, owner: int, tokens: Any) -> None:
        mail.post(slot, tag_of(owner - 1, len(tokens)), ~mail.new_mask())
        admit(key, slot, owner, tokens)

    masks.admit = with_a_ghost  # type: ignore[method-assign]


def believed(known: int) -> Callable[[], AbstractContextManager[None]]:
    """The device looks at these bits of a tag alone."""

    def adjust(original: Callable[..., None], self: StepProgram, key: Any, at: Any) -> None:
        if key.masked:
            state = self.tables.state.index_select(0, self.adjustments.rows).long()
            expected = self.adjustments.wishes[:, OWNER].long() << 32 | state[:, LENGTH]
            place = torch.arange(key.places)
            tags, expected = at.mail.view(torch.int64)[:, MAIL_TAG // 2 :][:, : key.places], expected[:, None] + place
            tags.copy_(torch.where((tags & known) == (expected & known), expected, tags))
        original(self, key, at)

    return lambda: replaced(StepProgram, "adjust", adjust)


def never_held() -> AbstractContextManager[None]:
    """A row whose mask is late is sampled without it."""

    def adjust(original: Callable[..., None], self: StepProgram, key: Any, at: Any) -> None:
        original(self, key, at)
        self.tables.state[:, LATE].zero_()

    return replaced(StepProgram, "adjust", adjust)


def never_cut() -> AbstractContextManager[None]:
    """Drafts are verified where no mask has come for them."""

    def adjust(original: Callable[..., None], self: StepProgram, key: Any, at: Any) -> None:
        drafted = self.tables.state[:, DRAFTED].clone()
        original(self, key, at)
        self.tables.state[:, DRAFTED].copy_(drafted)

    return replaced(StepProgram, "adjust", adjust)


def of_any_drafts() -> AbstractContextManager[None]:
    """A mask after drafts is believed to be of those that the row has."""

    def adjust(original: Callable[..., None], self: StepProgram, key: Any, at: Any) -> None:
        if key.masked and key.places > 1:
            rows = self.adjustments.rows.long()
            place = torch.arange(key.places - 1) + self.tables.state[rows, LENGTH, None]
            drafts = self.tables.history[rows[:, None], place.clamp(max=self.tables.history.shape[1] - 1).long()]
            at.mail[:, MAIL_ALONG : MAIL_ALONG + key.places - 1].copy_(drafts)
        original(self, key, at)

    return replaced(StepProgram, "adjust", adjust)


def other_drafts(loop: Loop) -> None:
    """The host is given another first draft of each row than the one that the row then has."""
    program = loop.launcher.program
    reply = program.reply

    def misleading(key: Any, at: Any) -> None:
        tables, rows = program.tables, program.adjustments.rows.long()
        place = tables.state[rows, LENGTH].clamp(max=tables.history.shape[1] - 1).long()
        drafts = tables.history[rows, place]
        tables.history[rows, place] = (drafts + 1) % VOCAB
        reply(key, at)
        tables.history[rows, place] = drafts

    program.reply = misleading  # type: ignore[method-assign]


def goes_on() -> AbstractContextManager[None]:
    """A matcher that has followed drafts for their masks does not go back."""
    return replaced(Automaton, "rollback", lambda original, self, count: None)


def tag_first() -> AbstractContextManager[None]:
    """A mask is written when its tag has been there for a while."""
    waiting: dict[int, tuple[int, Any]] = {}

    def post(original: Callable[..., None], self: Mail, slot: int, tag: int, words: Any) -> None:
        waiting[slot] = tag, words.copy()
        self.tags[slot, 0] = tag

    def replies(original: Callable[..., Any], self: Mail, followed: Any) -> Any:
        for slot in [*waiting]:
            plain_post(self, slot, *waiting.pop(slot))
        return original(self, followed)

    plain_post = Mail.post
    return both(replaced(Mail, "post", post), replaced(Mail, "replies", replies))


def any_reply() -> AbstractContextManager[None]:
    """The host takes what it finds for the token that it waits for."""

    def replies(original: Callable[..., Any], self: Mail, followed: Any) -> Any:
        return original(self, np.where((followed != NOTHING) & (self.told != 0), self.told - 1, followed))

    return replaced(Mail, "replies", replies)


def stays_behind() -> AbstractContextManager[None]:
    """A matcher whose row comes back goes on where it was, though tokens were settled that it has not followed."""

    def admitted(original: Callable[..., None], self: Masks, row: Any, slot: int, owner: int, tokens: Any) -> None:
        row.length = max(row.length, len(tokens))
        original(self, row, slot, owner, tokens)

    return replaced(Masks, "admitted", admitted)


def late_attendant(loop: Loop) -> None:
    """The attendant looks at one step of eight, so that rows are often given up before it has read their tokens."""
    masks, looks = loop.masks, itertools.count()
    if masks is None:
        return
    answer = masks.answer

    def seldom() -> None:
        if next(looks) % 8 == 0:
            answer()

    masks.answer = seldom  # type: ignore[method-assign]


def any_mask() -> AbstractContextManager[None]:
    """A mask that allows no token is posted like any other."""
    return replaced(loop_masks, "allows_some", lambda original, words: True)


def guesses_end_requests() -> AbstractContextManager[None]:
    """A matcher that breaks along a guess is not replaced."""

    def restore(original: Callable[..., None], self: Masks, row: Any) -> None:
        row.spare = None
        original(self, row)

    return replaced(Masks, "restore", restore)


def copies_stay_behind() -> AbstractContextManager[None]:
    """The copy of a matcher does not follow what is settled."""
    return replaced(Masks, "let_copy_follow", lambda original, self, row, tokens: None)


@contextmanager
def failures_unread() -> Iterator[None]:
    """A row whose matcher has failed is held for ever. Sound runs with such matchers take less than 150 turns."""
    with replaced(Masks, "take_failed", lambda original, self: []), patch.object(world, "MOST_TURNS", 250):
        yield


def fails(scenario: Scenario) -> bool:
    return any(job.fails_at is not None for job in scenario.jobs)


def masks(scenario: Scenario) -> bool:
    return any(job.automaton is not None for job in scenario.jobs)


def masked_drafts(scenario: Scenario) -> bool:
    return masks(scenario) and scenario.drafts not in (None, 1.0)


LOW = 2**32 - 1
SITES = (
    Site("a mask of the slot's last owner is none", 25, believed(LOW), stale_mail, stale_mail, masks),
    Site("a mask of another position is none", 1, believed(-1 - LOW), where=masks),
    Site("a row whose mask is late is held", 1, never_held, where=masks),
    Site("a draft without a mask is not verified", 1, never_cut, where=masked_drafts),
    Site("a mask after drafts is of these drafts", 1, of_any_drafts, other_drafts, other_drafts, masked_drafts),
    Site("a matcher goes back after drafts", 1, goes_on, where=masked_drafts),
    Site("a matcher that breaks along a guess ends no request", 1, guesses_end_requests, where=masked_drafts),
    Site("a matcher's copy follows what is settled", 1, copies_stay_behind, where=masked_drafts),
    Site("a mask is written before its tag", 1, tag_first, where=masks),
    Site("a reply has the tag of its token", 1, any_reply, where=masks),
    Site(
        "a matcher follows what was settled meanwhile",
        1,
        stays_behind,
        late_attendant,
        late_attendant,
        masks,
    ),
    Site("a mask that allows no token ends its request, and not as bad KV does", 16, any_mask, where=fails),
    Site("a request whose matcher fails is ended", 1, failures_unread, where=fails),
)
