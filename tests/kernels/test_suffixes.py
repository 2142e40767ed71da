"""The kernels for drafts from other answers, against plain Python."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from implementations import CPU, runs
from test_drafts import LONGEST, ROWS, VOCAB, copied, world

from gapless.base.records import RIGHT
from gapless.kernels import layout as L
from gapless.kernels.seam import Kernels
from gapless.kernels.suffixes import new_suffixes
from gapless.kernels.tables import Tables
from gapless.kernels.views import Recall

ENTRIES = 64
"""So few that contexts take entries from each other"""


def digest(tenant: int, tokens: list[int]) -> int:
    """By definition."""
    found = tenant * L.DIGEST_BEGIN % 2**32
    for token in reversed(tokens):
        found = (found ^ token) * L.DIGEST_MIX % 2**32
        found ^= found >> L.DIGEST_SHIFT
    return found


class Noted(NamedTuple):
    """An entry."""

    tenant: int
    digest: int
    token: int
    seen: int
    same: int


class Book:
    """What is noted, in plain Python."""

    def __init__(self, lengths: int) -> None:
        self.lengths = L.SUFFIX_LENGTHS[:lengths]
        self.entries: dict[tuple[int, int], Noted] = {}

    def find(self, tenant: int, tokens: list[int], least: int) -> tuple[int, int]:
        """The longest end of the tokens that is noted, and what followed; (0, 0) where none is."""
        for length in reversed(self.lengths):
            own = digest(tenant, tokens[-length:])
            noted = self.entries.get((length, own % ENTRIES))
            if len(tokens) < length or noted is None or (noted.tenant, noted.digest) != (tenant, own):
                continue
            if 1000 * noted.same >= least * noted.seen:
                return length, noted.token
        return 0, 0

    def note(self, places: list[tuple[int, list[int], int]]) -> None:
        """Rows' tenants, tokens and what follows, all at one place: of those with one entry the last writes."""
        told: dict[tuple[int, int], Noted] = {}
        for tenant, tokens, token in places:
            for length in self.lengths:
                if len(tokens) >= length and tenant > 0:
                    own = digest(tenant, tokens[-length:])
                    told[length, own % ENTRIES] = self.noted((length, own % ENTRIES), tenant, own, token)
        self.entries |= told

    def noted(self, key: tuple[int, int], tenant: int, own: int, token: int) -> Noted:
        old = self.entries.get(key)
        if old is None or (old.tenant, old.digest) != (tenant, own):
            return Noted(tenant, own, token, 1, 1)
        seen, same = old.seen + 1, old.same + (old.token == token)
        if old.token != token and 2 * same < seen:
            return Noted(tenant, own, token, 1, 1)
        return old._replace(seen=seen, same=same) if seen < 64 else old._replace(seen=seen // 2, same=same // 2)

    def table(self) -> torch.Tensor:
        table = new_suffixes(len(self.lengths), ENTRIES, torch.device("cpu"))
        for (length, at), noted in self.entries.items():
            own = noted.digest - (noted.digest >> 31 << 32)
            words = torch.tensor([noted.tenant, own, noted.token, noted.seen, noted.same, 0])
            table[self.lengths.index(length), at] = words
        return table


def made(seed: int) -> tuple[random.Random, Tables]:
    rng, tables = random.Random(seed), world(seed)
    tables.params[:, L.TENANT] = torch.tensor([rng.choice((0, 1, 1, 2**31 - 1)) for _ in range(ROWS + 1)])
    tables.params[0, L.TENANT] = 0
    return rng, tables


def note_all(book: Book, rows: list[int], tables: Tables, tokens: torch.Tensor) -> None:
    for place in range(tokens.shape[1]):
        written = []
        for row, given in zip(rows, tokens.tolist(), strict=True):
            count = sum(token >= 0 for token in given)
            if place < count:
                end = int(tables.state[row, L.LENGTH]) - count + place
                before = tables.history[row, :end].tolist()
                written.append((int(tables.params[row, L.TENANT]), before, given[place]))
        book.note(written)


def check_remember(kernels: Kernels, device: str, seed: int, width: int, lengths: int, steps: int = 6) -> int:
    """Returns how many entries there are."""
    rng, tables = made(seed)
    book, table = Book(lengths), new_suffixes(lengths, ENTRIES, torch.device(device))
    for _ in range(steps):
        tables.history[:] = torch.randint(0, 2, tables.history.shape) * 3
        rows = [*rng.sample(range(1, ROWS + 1), 6), 0, 0]
        tokens = torch.randint(RIGHT, 0, (len(rows), width), dtype=torch.int32)  # what `finish` has after the last
        for index, row in enumerate(rows[:-2]):
            count = min(rng.randint(0, width), int(tables.state[row, L.LENGTH]))
            end = int(tables.state[row, L.LENGTH])
            tokens[index, :count] = tables.history[row, end - count : end]
        listed = torch.tensor(rows, dtype=torch.int32, device=device)
        kernels.remember(listed, tokens.to(device), copied(tables, device), table)
        note_all(book, rows, tables, tokens)
        assert torch.equal(table[:, :-1].cpu(), book.table()[:, :-1])
    return len(book.entries)


def check_recall(kernels: Kernels, device: str, seed: int, asked: Recall, lengths: int) -> int:
    """Returns how many rows got drafts of others' answers."""
    rng, tables = made(seed)
    book = Book(lengths)
    for row in range(1, ROWS + 1):  # its own tenant's answer, that of all where it has no drafts
        tokens = tables.history[row].tolist()
        end = int(tables.state[row, L.LENGTH])
        for at in range(max(0, end - 8), min(end + 9, LONGEST)):
            follows = [tokens[at], rng.randrange(VOCAB)] if rng.random() < 0.3 else [tokens[at]]
            for token in follows:
                book.note([(int(tables.params[row, L.TENANT]), tokens[:at], token)])
        tables.history[row, end:] = VOCAB  # what is drafted is not there yet
        count = rng.choice((0, 0, 1, 4))
        tables.state[row, L.DRAFTED] = min(end + count, int(tables.params[row, L.MAX_LEN]) - 1)
    rows = [*range(1, ROWS + 1), 0, 0]
    same = torch.tensor([rng.choice((0, 2, 3, 8)) if tables.state[row, L.DRAFTED] else 0 for row in rows])
    same, listed, there = same.int(), torch.tensor(rows, dtype=torch.int32), copied(tables, device)
    kernels.recall(listed.to(device), same.to(device), there, book.table().to(device), asked)
    drafted = 0
    for row, own in zip(rows[:ROWS], same.tolist(), strict=False):
        end, settings = int(tables.state[row, L.LENGTH]), tables.params[row].tolist()
        most = min(asked.most, settings[L.DRAFTS], settings[L.MAX_LEN] - 1 - end)
        tokens, match = tables.history[row, :end].tolist(), own
        while tables.state[row, L.ACTIVE] and len(tokens) - end < most and settings[L.TENANT]:
            found, token = book.find(settings[L.TENANT], tokens, asked.least)
            if len(tokens) == end:
                if found <= own:
                    break
                match = found
            if not found or len(tokens) - end >= asked.factor * match // 1000:
                break
            tokens.append(token)
        wanted, last = tables.history[row].clone(), int(tables.state[row, L.DRAFTED])
        wanted[: len(tokens)] = torch.tensor(tokens)
        assert torch.equal(there.history[row].cpu(), wanted)
        if tables.state[row, L.ACTIVE] and most > 0:
            last = len(tokens) if len(tokens) > end else min(last, end + asked.factor * own // 1000)
        assert int(there.state[row, L.DRAFTED]) == last
        drafted += len(tokens) > end
    assert torch.equal(there.history[0].cpu(), tables.history[0]) and torch.equal(there.params.cpu(), tables.params)
    return drafted


@runs("width, lengths", [(1, 3), (5, 2)], cpu=[(5, 3), (9, 1)])
def test_tokens_that_follow_are_noted_for_their_tenant(implementation, width, lengths):
    steps, seeds = {"interpreter": (4, 2), "torch": (20, 3)}.get(implementation.name, (40, 6))
    found = [
        check_remember(implementation.kernels, implementation.device, seed, width, lengths, steps)
        for seed in range(seeds)
    ]
    assert sum(found) > 12


@runs(
    "asked, lengths", [(Recall(4, 1000, 100), 3)], cpu=[(Recall(1, 250, 0), 1), (Recall(8, 9000, 700), 1)],
    interpreter=[(Recall(8, 1500, 700), 3)], cuda=[(Recall(4, 1000, 100), 2)],
)  # fmt: skip
def test_noted_tokens_are_drafted_for_their_tenant(implementation, asked, lengths):
    seeds = range(20 if implementation.name in CPU else 3)
    found = [check_recall(implementation.kernels, implementation.device, seed, asked, lengths) for seed in seeds]
    assert sum(found) > 0 or asked.factor == 250  # whose drafts are none
