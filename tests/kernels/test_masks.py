"""Masks, against their definition: which rows get theirs, which are late, and which tokens come back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from implementations import runs

from gapless.base.records import NO_TOKEN
from gapless.device import Ring
from gapless.kernels import layout as L
from gapless.kernels.seam import Kernels
from gapless.kernels.tables import Tables
from gapless.step.mail import Mail, mail_bytes, tag_of


def mask_of(tokens: list[int], mail: Mail) -> Any:
    """The mask that allows these tokens."""
    words, at = mail.new_mask(), np.array(tokens, np.int64)
    np.bitwise_or.at(words.view(np.uint32), at // 32, (1 << at % 32).astype(np.uint32))
    return words


class World:
    """`count` rows of any generation and length, most of which get masks. With `places`, some have drafts."""

    def __init__(self, rng: random.Random, count: int, vocab: int, device: str, places: int = 1) -> None:
        tables = Tables.new(count, 40, 4, torch.device("cpu"), vocab, places)
        tables.history.random_(0, vocab)
        tables.masks.random_(-(2**31), 2**31 - 1)
        self.mail = Mail(Ring(count + 1, mail_bytes(vocab, places), pin=device == "cuda"), vocab, places)
        self.mail.words.random_(-(2**31), 2**31 - 1)
        for row in range(1, count + 1):
            state = tables.state[row]
            drafted = rng.choice((0, rng.randrange(9))) if places > 1 else 0
            state[L.LENGTH] = rng.choice((1, 7, 2**31 - 1)) if drafted == 0 else rng.choice((1, 7, 31))
            state[L.DRAFTED] = int(state[L.LENGTH]) + drafted if drafted else 0
            state[L.ACTIVE], state[L.LATE] = int(rng.random() < 0.8), rng.randrange(2)
            state[L.GENERATION], tables.params[row, L.MASKED] = rng.randrange(1, 2**31), int(rng.random() < 0.7)
        self.tags = [tag_of(*pair) for pair in tables.state[:, [L.GENERATION, L.LENGTH]].tolist()]
        self.tables = Tables(*(one.to(device) for one in tables))
        # The rows are sampled in another order, the null row among them; the list names most, and is filled up.
        self.rows = torch.tensor([*range(count, 0, -1), 0], dtype=torch.int32, device=device)
        self.listed = [sample for sample in range(count + 1) if sample == 0 or rng.random() < 0.7]
        self.index = torch.tensor([*self.listed, *self.listed[-1:] * 2], dtype=torch.int32, device=device)

    def masked(self) -> list[tuple[int, int]]:
        """The sample and row of each listed row that gets masks."""
        rows, masked = self.rows.tolist(), self.tables.params[:, L.MASKED].tolist()
        return [(sample, rows[sample]) for sample in self.listed if masked[rows[sample]]]

    def drafts(self, row: int, most: int) -> list[int]:
        """The row's next drafts, `most` at most."""
        length, drafted = self.tables.state[row, [L.LENGTH, L.DRAFTED]].tolist()
        return self.tables.history[row, length : min(drafted, length + most)].tolist() if drafted > length else []


def check_mask(kernels: Kernels, vocab: int, device: str, seed: int, places: int = 1) -> None:
    """Rows whose mail has their tag get that mask; the others are late, and all else stays.

    So it is after each draft whose mask is made for it, up to the first where that is not so.
    """
    rng = random.Random(seed)
    world = World(rng, rng.choice((1, 3, 9)), vocab, device, places)
    masks, state = world.tables.masks.cpu().clone(), world.tables.state.cpu().clone()
    for _, row in world.masked():
        tag, going, kept = world.tags[row], True, -1
        drafts = world.drafts(row, places - 1)
        for place in range(places):
            allowed = rng.sample(range(vocab), rng.choice((0, 1, vocab // 2, vocab)))
            found = rng.choice((*[tag] * (3 + 3 * places), tag - 1, tag + 1, tag + 2**32, tag - 2**32, 0))
            draft = drafts[place - 1] if 0 < place <= len(drafts) else 0
            named = rng.choice((*[draft] * 9, draft + 1))
            words = mask_of(allowed, world.mail)
            world.mail.post(row, found, words, place, named)
            going &= found == tag and place <= len(drafts) and (place == 0 or named == draft)
            if going:
                masks[row, place] = torch.from_numpy(words)
                kept = place
        state[row, L.LATE] = int(kept < 0)
        if kept >= 0 and places > 1:
            state[row, L.DRAFTED] = state[row, L.LENGTH] + kept
    before = world.mail.words.clone()
    kernels.mask(world.index, world.rows, world.tables, world.mail.words, places)
    found_masks, found_state = world.tables.masks.cpu(), world.tables.state.cpu()
    assert torch.equal(found_masks[1:], masks[1:]) and torch.equal(found_state[1:], state[1:])
    assert torch.equal(world.mail.words, before)


def check_reply(kernels: Kernels, vocab: int, device: str, seed: int, width: int = 1) -> None:
    """Live rows that got tokens have these and their next drafts in their mail, with the tag that they have now."""
    rng = random.Random(seed)
    world, count = World(rng, rng.choice((1, 3, 9)), vocab, device, width), rng.randrange(width)
    tokens = torch.tensor(
        [[rng.choice((NO_TOKEN, rng.randrange(vocab))) for _ in range(width)] for _ in world.rows], dtype=torch.int32
    )  # fmt: skip
    expected = {row: tokens[sample].tolist() for sample, row in world.masked()}
    before = world.mail.words.clone()
    kernels.reply(world.index, world.rows, tokens.to(device), world.tables, world.mail.words, count, 0)
    if device == "cuda":
        torch.cuda.synchronize()
    for row in range(1, len(world.tags)):
        given = expected.get(row, [NO_TOKEN])
        if given[0] != NO_TOKEN and world.tables.state[row, L.ACTIVE]:
            (reply,) = [(got, drafts) for own, got, drafts in replies_of(world, row, width) if own == row]
            assert reply == (given, world.drafts(row, count))
            assert torch.equal(world.mail.words[row, L.MAIL_ALONG :], before[row, L.MAIL_ALONG :])
            assert torch.equal(world.mail.words[row, : L.MAIL_TOLD], before[row, : L.MAIL_TOLD])
        else:
            assert torch.equal(world.mail.words[row], before[row])


def check_expected(kernels: Kernels, vocab: int, device: str, seed: int, width: int) -> None:
    """A live row that got the tokens that its mail expects has the next ones as drafts, or more that begin with them.

    Its mail has the same drafts.
    """
    rng = random.Random(seed)
    world, most = World(rng, rng.choice((1, 3, 9)), vocab, device, width), width - 1
    tables, history, drafted = world.tables, *(one.cpu().clone() for one in (world.tables.history, world.tables.state))
    tokens, told = torch.full((len(world.rows), width), NO_TOKEN, dtype=torch.int32), set[int]()
    for sample, row in world.masked():
        count, length = rng.randrange(width + 1), int(drafted[row, L.LENGTH])
        given = [rng.randrange(vocab) for _ in range(count)]
        tokens[sample, :count] = torch.tensor(given, dtype=torch.int32)
        asked, max_len = rng.choice((0, 2, 9)), length + rng.choice((0, 1, 3, 20)) if length < 99 else length
        tables.params[row, L.DRAFTS], tables.params[row, L.MAX_LEN] = asked, max_len
        run = [*given, *(rng.randrange(vocab) for _ in range(rng.randrange(width)))]
        if run and rng.random() < 0.2:
            place = rng.randrange(len(run))
            run[place] = (run[place] + 1) % vocab
        tag = world.tags[row] - count
        found = rng.choice((*[tag] * 6, tag - 1, tag + 1, tag + 2**32, 0))
        world.mail.post_ahead(row, found, run)
        if not tables.state[row, L.ACTIVE] or not count:
            continue
        right = found == tag and run[:count] == given
        left = max(0, min(len(run) - count, asked, max_len - 1 - length, most)) if right else 0
        expected = torch.tensor(run[count : count + left], dtype=torch.int32)
        if left and rng.random() < 0.5:
            tables.history[row, length : length + left] = history[row, length : length + left] = expected
        if left and not (
            drafted[row, L.DRAFTED] - length >= left and history[row, length : length + left].equal(expected)
        ):
            history[row, length : length + left] = expected
            drafted[row, L.DRAFTED] = length + left
        told.add(row)
    before = world.mail.words.clone()
    kernels.reply(world.index, world.rows, tokens.to(device), tables, world.mail.words, most, most)
    assert torch.equal(tables.history.cpu()[1:], history[1:]) and torch.equal(tables.state.cpu()[1:], drafted[1:])
    for row in range(1, len(world.tags)):
        if row in told:
            (found,) = [drafts for own, _, drafts in replies_of(world, row, width) if own == row]
            assert found == world.drafts(row, most)
        else:
            assert torch.equal(world.mail.words[row], before[row])


def replies_of(world: World, row: int, width: int) -> list[Any]:
    """The replies that a host would find which knows all but `width` of this row's tokens."""
    return world.mail.replies(np.full(len(world.tags), world.tags[row] - width))


@runs(
    "vocab, places", [(131, 9), (5, 1), (32, 5)], cpu=[(131, 1), (70_001, 5)], interpreter=[(2500, 3)],
    cuda=[(2500, 5), (151_936, 9)],
)  # fmt: skip
def test_a_row_gets_its_mask_or_is_late_without_one(implementation, vocab, places):
    for seed in range(8 if implementation.name != "interpreter" and vocab < 70_000 else 4):
        check_mask(implementation.kernels, vocab, implementation.device, seed, places)


@runs("width", [1, 3, 9])
def test_a_live_row_that_got_a_token_has_it_in_its_mail(implementation, width):
    for seed in range(8):
        check_reply(implementation.kernels, 131, implementation.device, seed, width)


@runs("width", [2, 5, 9])
def test_a_row_that_got_expected_tokens_drafts_the_expected_next(implementation, width):
    for seed in range(12):
        check_expected(implementation.kernels, 131, implementation.device, seed, width)
