"""The kernels for drafts, against plain Python."""

from __future__ import annotations

import random

import torch
from implementations import CPU, runs
from torch import Tensor

from gapless.base.records import NO_TOKEN, REJECTED, RIGHT
from gapless.kernels import layout as L
from gapless.kernels import plain
from gapless.kernels.seam import Kernels, MixedBatch
from gapless.kernels.tables import Tables
from gapless.kernels.views import Counts, Filters
from gapless.model.seam import BatchShape
from gapless.step.inputs import mixed_batch
from gapless.step.packet import Packet, PacketShape

ROWS, LONGEST, PAGE_SIZE, VOCAB = 9, 40, 4, 7


def world(seed: int) -> Tables:
    """Rows at any length, some inert, with drafts or without, some of these past what a step takes."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    state = torch.zeros(ROWS + 1, L.STATE_COLUMNS, dtype=torch.int32)
    params = torch.zeros(ROWS + 1, L.PARAM_COLUMNS, dtype=torch.int32)
    params[:, L.STOP_IDS : L.FIRST_PARAM] = NO_TOKEN
    for row in range(1, ROWS + 1):
        length = rng.choice((1, 2, rng.randrange(1, LONGEST - 8), LONGEST - 8))
        state[row, L.ACTIVE], state[row, L.LENGTH], state[row, L.COMPUTED] = rng.random() < 0.8, length, length - 1
        state[row, L.DRAFTED] = rng.choice((0, length, length + rng.randrange(6), length + 8))
        params[row, L.DRAFTS], params[row, L.MAX_LEN] = rng.choice((0, 1, 3, 8)), rng.randrange(length + 1, LONGEST + 1)
    history = torch.randint(0, rng.choice((2, VOCAB)), (ROWS + 1, LONGEST), dtype=torch.int32)
    pages = torch.randint(1, 99, (ROWS + 1, -(-LONGEST // PAGE_SIZE)), dtype=torch.int32)
    return Tables(state, params, history, pages, pages[:, None, :0])


def copied(tables: Tables, device: str) -> Tables:
    return Tables(*(table.to(device, copy=True) for table in tables))


def drafts_of(tables: Tables, row: int, places: int) -> int:
    """How many drafts a row runs, by definition."""
    return max(0, min(int(tables.state[row, L.DRAFTED] - tables.state[row, L.LENGTH]), places - 1))


def check_begin(kernels: Kernels, device: str, seed: int, places: int) -> None:
    made = world(seed)
    rows = [3, 1, 7, 9, 2, 0, 0]
    words = torch.tensor([0] * L.HEADER_WORDS + rows, dtype=torch.int32, device=device)
    counts = Counts.of_decode(len(rows), 0, places)
    batch = kernels.begin_decode(words, counts, copied(made, device), PAGE_SIZE)
    found = list(zip(*(column.tolist() for column in batch), strict=True))
    assert len(found) == len(rows) * places
    for index, (row, token, position, slot, kv_len) in enumerate(found):
        place, own = index // len(rows), rows[index % len(rows)]
        runs = bool(made.state[own, L.ACTIVE]) and place <= drafts_of(made, own, places)
        at = int(made.state[own, L.COMPUTED]) + place
        assert row == own and 0 <= token < VOCAB
        if runs:
            where = int(made.pages[own, at // PAGE_SIZE]) * PAGE_SIZE + at % PAGE_SIZE
            assert (token, position, slot, kv_len) == (int(made.history[own, at]), at, where, at + 1)
        else:
            assert (slot, kv_len) == (0, 1)


def check_begin_beside(kernels: Kernels, device: str, seed: int, places: int, decode: list[int]) -> None:
    """Every place of the rows that decode, then two prompts, the middle of one and a null row's; tokens of no row."""
    made, chunk, start, spare = world(seed), 5, 11, 4
    made.state[chunk, L.ACTIVE], made.state[chunk, L.LENGTH], made.state[chunk, L.COMPUTED] = 1, start + 7, start
    made.state[chunk, L.DRAFTED] = 0
    prompt = torch.randint(0, VOCAB, (7,)).tolist()
    rows, sizes = [*decode, chunk, 0], [1] * len(decode) + [7, 0]
    tables, words = copied(made, device), [0] * L.HEADER_WORDS + rows + sizes + prompt + [-77] * spare
    tokens = places * len(decode) + 7
    begun = begin(kernels, torch.tensor(words, dtype=torch.int32, device=device), len(decode), places, tables, tokens)
    found = list(zip(*(column.tolist()[:tokens] for column in (begun.ids, begun.positions, begun.slots)), strict=True))
    owners = [(row, place) for place in range(places) for row in decode] + [(chunk, index) for index in range(7)]
    made.history[chunk, start : start + 7] = torch.tensor(prompt, dtype=torch.int32)
    kv_lens = []
    for (own, place), (token, position, slot) in zip(owners, found, strict=True):
        at = int(made.state[own, L.COMPUTED]) + place
        runs = bool(made.state[own, L.ACTIVE]) and (own == chunk or place <= drafts_of(made, own, places))
        where = int(made.pages[own, at // PAGE_SIZE]) * PAGE_SIZE + at % PAGE_SIZE if runs else 0
        assert slot == where and 0 <= token < VOCAB
        assert not runs or (token, position) == (int(made.history[own, at]), at)
        kv_lens.append(at + 1 if runs else 1)
    first = places * len(decode)
    assert begun.rows.tolist() == [*decode * places, chunk, 0]
    assert begun.starts.tolist() == [*range(first), first, first + 7, first + 7]
    assert begun.last.tolist()[:-1] == [*range(first), first + 6]
    assert begun.kv_lens.tolist() == [*kv_lens[:first], start + 7, 1]
    for column in (begun.ids, begun.positions, begun.slots):
        assert not column[tokens:].any()
    assert torch.equal(tables.history[1:].cpu(), made.history[1:])


def begin(kernels: Kernels, words: Tensor, decode: int, places: int, tables: Tables, tokens: int) -> MixedBatch:
    """Begin a step with two chunks; in torch without tokens of no row."""
    if kernels.begin_mixed is not None:
        return kernels.begin_mixed(words, Counts(decode + 2, decode, 0, 0, tokens + 4, places), tables, PAGE_SIZE)
    shape = PacketShape(decode + 2, 0, 0, 2, 7)
    batch = mixed_batch(
        Packet.of(words, shape), tables, BatchShape(decode * places, ((11, 7), (0, 0)), LONGEST, places), PAGE_SIZE
    )
    inputs = batch.inputs
    assert batch.last is not None and inputs.starts is not None
    return MixedBatch(
        inputs.rows, batch.last, inputs.kv_lens, inputs.starts, inputs.ids, inputs.positions, inputs.slots
    )


def check_accept(kernels: Kernels, device: str, seed: int, places: int, width: int) -> None:
    rng, made = random.Random(seed), world(seed)
    rows = [*rng.sample(range(1, ROWS + 1), 6), 0]
    tokens, finite = torch.zeros(places, len(rows), dtype=torch.int64), torch.rand(places, len(rows)) < 0.9
    for index, row in enumerate(rows):
        for place in range(places):
            draft = int(made.history[row, min(int(made.state[row, L.LENGTH]) + place, LONGEST - 1)])
            tokens[place, index] = draft if rng.random() < 0.7 else rng.randrange(VOCAB)
    given = kernels.accept(
        tokens.flatten().to(device), finite.flatten().to(device),
        torch.tensor(rows, dtype=torch.int32, device=device), copied(made, device), width,
    )  # fmt: skip
    for index, row in enumerate(rows):
        drafts, wanted = drafts_of(made, row, places), [int(tokens[0, index])]
        while len(wanted) <= drafts and finite[len(wanted), index]:
            if int(made.history[row, int(made.state[row, L.LENGTH]) + len(wanted) - 1]) != wanted[-1]:
                break
            wanted.append(int(tokens[len(wanted), index]))
        wanted += [REJECTED] * (drafts + 1 - len(wanted))
        if places == 1 and width > 1 and drafts_of(made, row, 2):
            wanted.append(RIGHT if int(made.history[row, int(made.state[row, L.LENGTH])]) == wanted[0] else REJECTED)
        assert given[index].tolist() == wanted + [NO_TOKEN] * (width - len(wanted))


def check_ask(kernels: Kernels, device: str, seed: int, drafts: int) -> None:
    made = world(seed)
    rows, there = random.Random(seed).sample(range(1, ROWS + 1), 5), copied(made, device)
    kernels.ask(torch.tensor(rows, dtype=torch.int32, device=device), there, drafts)
    for row in rows:
        length, most = int(made.state[row, L.LENGTH]), int(made.params[row, L.MAX_LEN]) - 1
        allowed = max(0, min(int(made.params[row, L.DRAFTS]), most - length, drafts))
        assert int(there.state[row, L.DRAFTED]) == length + allowed
        made.state[row, L.DRAFTED] = length + allowed
    assert torch.equal(there.state.cpu(), made.state)


def check_keep_drafts(kernels: Kernels, device: str, seed: int) -> None:
    rng, made = random.Random(seed), world(seed)
    there, rows = copied(made, device), rng.sample(range(1, ROWS + 1), 4) * 2
    real = [rng.random() < 0.7 for _ in rows]
    places = [rng.randrange(LONGEST // 2) + LONGEST // 2 * (index > 3) for index in range(len(rows))]
    ids = [rng.randrange(VOCAB) for _ in rows]
    columns = (ids, places, rows, [7 if one else 0 for one in real])
    kernels.keep_drafts(*(torch.tensor(column, device=device) for column in columns), there)
    for index, row in enumerate(rows):
        if real[index]:
            made.history[row, places[index]] = ids[index]
    made.history[0, 0] = there.history[0, 0].cpu()  # whose word means nothing
    assert torch.equal(there.history.cpu(), made.history)


def check_look_up(kernels: Kernels, device: str, seed: int, most: int, lengths: tuple[int, int]) -> int:
    """Returns how many rows got drafts."""
    made = world(seed)
    rows, there = [*range(1, ROWS + 1), 0, 0], copied(made, device)
    kernels.look_up(torch.tensor(rows, dtype=torch.int32, device=device), there, most, *lengths)
    drafted = 0
    for row in rows[:ROWS]:
        length, allowed = int(made.state[row, L.LENGTH]), min(most, int(made.params[row, L.DRAFTS]))
        if not made.state[row, L.ACTIVE] or not allowed or length >= made.params[row, L.MAX_LEN] - 1:
            continue  # whose drafts, if any, are as good as before
        tokens, best = made.history[row, :length].tolist(), (lengths[0] - 1, 0)
        for end in range(1, length):
            same = 0
            while same < min(lengths[1], end) and tokens[end - 1 - same] == tokens[length - 1 - same]:
                same += 1
            best = max(best, (same, end)) if same >= lengths[0] else best
        count = min(allowed, int(made.params[row, L.MAX_LEN]) - 1 - length) if best[1] else 0
        for index in range(count):
            tokens.append(tokens[best[1] + index])
        assert int(there.state[row, L.DRAFTED]) == length + count
        assert there.history[row, : len(tokens)].tolist() == tokens
        assert torch.equal(there.history[row, len(tokens) :].cpu(), made.history[row, len(tokens) :])
        drafted += count > 0
    assert torch.equal(there.state[:, : L.DRAFTED].cpu(), made.state[:, : L.DRAFTED])
    return drafted


def check_sample(kernels: Kernels, device: str, seed: int, places: int, vocab: int) -> None:
    """What a place gives is what its row would give there, had it come that far: within its own filters."""
    made, rows = world(seed), [4, 8, 1, 6, 0]
    made.state[:, L.CUT_VALUE :: 2], made.state[:, L.CUT_ID :: 2] = L.KEEP_VALUE, L.KEEP_ID
    temperature = random.Random(seed).choice((0.0, 1.0))
    made.params[:, L.TEMPERATURE] = torch.tensor(temperature).view(torch.int32)
    made.params[:, L.TOP_P] = torch.tensor(1.0).view(torch.int32)
    made.params[:, L.SEED_LOW] = torch.arange(ROWS + 1)
    made.params[8, L.TOP_K], made.params[6, L.TOP_P] = 3, torch.tensor(0.4).view(torch.int32)
    made.params[4, L.MIN_LEN], made.params[4, L.STOP_IDS], made.params[4, L.TOP_K] = (
        int(made.state[4, L.LENGTH]) + 2,
        3,
        2,
    )
    logits = torch.randn(places, len(rows), vocab, generator=torch.Generator().manual_seed(seed))
    logits[:, 0, 3] = 50.0  # row 4 takes its stop id as soon as it may
    filtered = [0, 1, 3, 3]
    listed, there = torch.tensor(rows, dtype=torch.int32, device=device), copied(made, device)
    cut = [place * len(rows) + sample for sample in filtered for place in range(places)]
    flat, index = logits.to(device).flatten(0, 1), torch.tensor(cut, dtype=torch.int32, device=device)
    if temperature > 0:  # greedy rows are in no such list
        kernels.cut(flat, index, listed, there, Filters(top_k=True, top_p=True))
    tokens, finite = kernels.sample(flat, listed, there, None)
    for place, own in enumerate(logits):
        then, asked = copied(made, "cpu"), torch.tensor(rows, dtype=torch.int32)
        then.state[:, L.LENGTH] += place
        if temperature > 0:
            plain.KERNELS.cut(own, torch.tensor(filtered), asked, then, Filters(top_k=True, top_p=True))
        wanted, good = plain.KERNELS.sample(own, asked, then, None)
        for index, row in enumerate(rows, place * len(rows)):
            if place <= drafts_of(made, row, places):
                at = index % len(rows)
                assert int(tokens[index]) == int(wanted[at]) and bool(finite[index]) == bool(good[at])


@runs("places", [5, 1], cpu=[2], cuda=[2])
def test_a_step_with_drafts_begins_with_every_place_of_its_rows(implementation, places):
    for seed in range(2 if implementation.name == "interpreter" else 8):
        check_begin(implementation.kernels, implementation.device, seed, places)
        for decode in ([3], [3, 1, 7, 9, 2, 0], []):  # beside prompts
            check_begin_beside(implementation.kernels, implementation.device, seed, places, decode)


@runs("places, width", [(1, 5), (5, 5)], cpu=[(1, 1), (3, 3), (3, 9)], cuda=[(2, 5)])
def test_a_row_keeps_the_tokens_after_its_right_drafts(implementation, places, width):
    for seed in range(6 if implementation.name == "interpreter" else 12):
        check_accept(implementation.kernels, implementation.device, seed, places, width)


@runs("drafts", [4, 1, 8], on=CPU)
def test_a_row_is_asked_for_as_many_drafts_as_it_may_have(implementation, drafts):
    for seed in range(20):
        check_ask(implementation.kernels, "cpu", seed, drafts)


@runs(on=CPU)
def test_drafts_are_kept_in_the_histories_of_their_rows(implementation):
    for seed in range(20):
        check_keep_drafts(implementation.kernels, "cpu", seed)


@runs("lengths", [(2, 4)], cpu=[(1, 1), (1, 4), (3, 8)])
def test_tokens_that_followed_before_are_drafted(implementation, lengths):
    found = [
        check_look_up(implementation.kernels, implementation.device, seed, most, lengths)
        for seed in range(12)
        for most in ((1, 4, 8) if implementation.name in CPU else (4,))
    ]
    assert sum(found) > len(found) // 2


@runs(on=("interpreter",))
def test_tokens_that_followed_before_are_drafted_by_blocks(implementation, monkeypatch):
    from gapless.kernels import drafts_triton

    monkeypatch.setattr(drafts_triton, "MATCH_BLOCK", 8)
    assert sum(check_look_up(implementation.kernels, "cpu", seed, 4, (2, 4)) for seed in range(5)) > 3


@runs("places, vocab", [(3, 50)], cpu=[(5, 50)], cuda=[(2, 4000), (5, 4000)])
def test_a_place_draws_as_its_row_would_draw_there(implementation, places, vocab):
    for seed in range(2 if implementation.name == "interpreter" else 6):
        check_sample(implementation.kernels, implementation.device, seed, places, vocab)
