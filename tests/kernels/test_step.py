"""The beginning and the end of a step on tables written down by hand, against Python over lists."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
import torch
from implementations import Implementation, runs
from step_tables import LONGEST, MARK, MAX_PAGES, PAGE_SIZE, SLOTS, STEP, VOCAB, batch_rows, moved, packet, world
from torch import Tensor

from gapless.base.records import NO_TOKEN, REJECTED, Flag
from gapless.kernels import layout as L
from gapless.kernels.seam import Kernels, MixedBatch
from gapless.kernels.tables import Tables
from gapless.kernels.views import Counts
from gapless.model.seam import BatchShape
from gapless.step.inputs import apply_admissions, apply_pages, mixed_batch
from gapless.step.packet import Packet, PacketShape


def check_begin_decode(
    implementation: Implementation, seed: int, size: int, used: int, padding: int, writes: int
) -> None:
    """The page of the token's own place is one that this very packet brings."""
    rng = random.Random(seed)
    made = world(rng, size)
    rows = batch_rows(rng, size, used, padding)
    places = [row * MAX_PAGES + int(made.state[row, L.COMPUTED]) // PAGE_SIZE for row in rows[: min(used, writes)]]
    pairs = [(place, rng.randrange(1, 1000)) for place in places]
    pairs += [(0, 0)] * (writes - len(pairs))
    there, words = moved(made, implementation.device), packet(rows, pairs).to(implementation.device)
    got = implementation.kernels.begin_decode(words, Counts.of_decode(len(rows), writes), there, PAGE_SIZE)
    for flat, page in pairs:
        made.pages.view(-1)[flat] = page
    assert all(column.dtype == torch.int64 and column.shape == (len(rows),) for column in got)
    assert got.rows.tolist() == rows
    for index, row in enumerate(rows):
        position, active = int(made.state[row, L.COMPUTED]), bool(made.state[row, L.ACTIVE])
        page = int(made.pages[row, position // PAGE_SIZE])
        token, *line = [int(column[index]) for column in got[1:]]
        slot = page * PAGE_SIZE + position % PAGE_SIZE
        assert line == ([position, slot, position + 1] if active else [position, 0, 1]), (index, row)
        assert token == int(made.history[row, position]) if active else 0 <= token < VOCAB
    same(there, made)


def check_begin_mixed(
    implementation: Implementation, seed: int, size: int, decode: int, chunks: list[int], spare: int, new: int
) -> None:
    """`new` of the chunks' rows are admitted in this very step, with their pages; `spare` tokens belong to no row."""
    rng = random.Random(seed)
    made = world(rng, size)
    rows = rng.sample(range(1, size + 1), decode + len(chunks))
    sizes = [1] * decode + chunks
    admitted, pairs = [], []
    for row, count in zip(rows[decode:], chunks, strict=True):
        start = rng.randrange(LONGEST - count + 1)
        if len(admitted) < new:
            line = [rng.randrange(2**31), 1, start + count, start, 0, 0, *[row, -row] * ((L.STATE_COLUMNS - 6) // 2)]
            admitted.append([row, *line, *(rng.randrange(-5, 2**31) for _ in range(L.PARAM_COLUMNS))])
            pairs += [(row * MAX_PAGES + entry, rng.randrange(1, 1000)) for entry in range(MAX_PAGES)]
        else:
            made.state[row, : L.COMPUTED + 1] = torch.tensor([rng.randrange(2**31), 1, start + count, start])
    prompts = [[rng.randrange(VOCAB) for _ in range(count)] for count in chunks]
    sent = [*sizes, *(n for pair in pairs for n in pair), *(n for line in admitted for n in line)]
    words = packet(rows, [])[: L.HEADER_WORDS + len(rows)].tolist() + sent + [n for prompt in prompts for n in prompt]
    there, starts = moved(made, implementation.device), [int(made.state[row, L.COMPUTED]) for row in rows[decode:]]
    starts[: len(admitted)] = [line[1 + L.COMPUTED] for line in admitted]
    shape = PacketShape(len(rows), len(pairs), len(admitted), len(chunks), sum(chunks))
    sent_words = torch.tensor(words + [MARK] * 50, dtype=torch.int32, device=implementation.device)
    got, spare = begin_mixed(
        implementation.kernels, sent_words, shape, [*zip(starts, chunks, strict=True)], spare, there
    )
    for row, *line in admitted:
        made.state[row] = torch.tensor(line[: L.STATE_COLUMNS])
        made.params[row] = torch.tensor(line[L.STATE_COLUMNS :])
    for flat, page in pairs:
        made.pages.view(-1)[flat] = page
    tokens, kv_lens = [], []
    for index, row in enumerate(rows):
        _, active, _, start = made.state[row, : L.COMPUTED + 1].tolist()
        if index >= decode:
            made.history[row, start : start + sizes[index]] = torch.tensor(prompts[index - decode])
        for position in range(start, start + sizes[index]):
            page = int(made.pages[row, position // PAGE_SIZE])
            token = int(made.history[row, position])
            tokens.append((token, position, page * PAGE_SIZE + position % PAGE_SIZE) if active else (0, position, 0))
        kv_lens.append(start + sizes[index] if active else 1)
    ends = list(accumulate(sizes))
    expected = [rows, [max(end - 1, 0) for end in ends], kv_lens, [0, *ends]]
    assert [column.tolist() for column in got[:4]] == expected
    lines = [tuple(line) for line in torch.stack(got[4:], dim=1).tolist()]
    for found, wanted in zip(lines, tokens, strict=False):
        assert found == wanted or (wanted[2] == 0 and found[2] == 0 and 0 <= found[0] < VOCAB)
    assert lines[len(tokens) :] == [(0, 0, 0)] * spare
    same(there, made)


def begin_mixed(
    kernels: Kernels, words: Tensor, shape: PacketShape, chunks: list[tuple[int, int]], spare: int, tables: Tables
) -> tuple[MixedBatch, int]:
    """The batch, and how many of its tokens belong to no row: in torch there are none."""
    decode, tokens = shape.rows - len(chunks), shape.rows - len(chunks) + shape.chunk_tokens
    if kernels.begin_mixed is not None:
        counts = Counts(shape.rows, decode, shape.page_writes, shape.admissions, tokens + spare)
        return kernels.begin_mixed(words, counts, tables, PAGE_SIZE), spare
    sent = Packet.of(words, shape)
    apply_admissions(sent, tables)
    apply_pages(sent.pages, tables)
    inputs, last = mixed_batch(sent, tables, BatchShape(decode, tuple(chunks), LONGEST), PAGE_SIZE)[:2]
    return MixedBatch(inputs.rows, last, inputs.kv_lens, inputs.starts, inputs.ids, inputs.positions, inputs.slots), 0


def taken(tokens: list[int], good: bool, length: int, params: Tensor) -> tuple[list[int], Flag]:
    """What an active row of that length takes of its tokens."""
    out: list[int] = []
    for token in tokens if good else ():
        if token < 0:
            break
        out.append(token)
        if token in params[L.STOP_IDS : L.FIRST_PARAM].tolist():
            return out, Flag.STOP
        if length + len(out) >= params[L.MAX_LEN]:
            return out, Flag.LENGTH
    return out, (Flag.LIVE if out else Flag.HELD) if good else Flag.ERROR


def offered(rng: random.Random, params: Tensor, width: int) -> list[int]:
    """Tokens for a row: a stop id anywhere, and NO_TOKEN or REJECTED anywhere where a row may get several."""
    stops = [stop for stop in params[L.STOP_IDS : L.FIRST_PARAM].tolist() if stop >= 0]
    tokens = [rng.randrange(VOCAB) for _ in range(width)]
    if stops and rng.random() < 0.5:
        tokens[rng.randrange(width)] = rng.choice(stops)
    if rng.random() < (0.4 if width > 1 else 0.1):
        tokens[rng.randrange(width)] = NO_TOKEN
    if width > 1 and rng.random() < 0.4:
        tokens[rng.randrange(1, width)] = REJECTED
    return tokens


def check_finish(
    implementation: Implementation, seed: int, size: int, used: int, padding: int, *, chunks: bool, lines: Tensor,
    width: int = 1,
) -> None:  # fmt: skip
    """`lines` int32 [SLOTS, M], which may be pinned memory of the host."""
    rng, device = random.Random(seed), implementation.device
    made = world(rng, size)
    rows = batch_rows(rng, size, used, padding)
    samples = len(rows) - (used // 3 if chunks else 0)
    sizes = [rng.randrange(1, 5) for _ in rows] if chunks else None
    slot = rng.randrange(SLOTS)
    tokens = [offered(rng, made.params[row], width) for row in rows[:samples]]
    finite = [rng.random() < 0.8 for _ in tokens]
    late = [rng.random() < 0.2 for _ in rows]
    made.state[rows, L.LATE] = torch.tensor(late).int() * (torch.tensor(rows) > 0)
    lines.fill_(MARK)
    there, table = moved(made, device), [list(line) for line in made.state.tolist()]
    words = packet(rows, [], slot).to(device)
    row_numbers = torch.tensor(rows, dtype=torch.int32, device=device)
    given = (
        row_numbers,
        None if sizes is None else torch.tensor(sizes, dtype=torch.int32, device=device),
        torch.tensor(tokens, device=device).view(samples, width), torch.tensor(finite, device=device),
    )  # fmt: skip
    out = torch.full((samples, width), MARK, dtype=torch.int32, device=device)
    implementation.kernels.finish(words, *given, there, lines, out)
    if device == "cuda":
        torch.cuda.synchronize()
    line = L.line_words(width)
    published, kept = [[STEP, samples, *[0] * (line - 2)]], []
    for index, row in enumerate(rows):
        generation, active, length, *_ = table[row]
        if index >= samples:
            if active:
                made.state[row, L.COMPUTED] += sizes[index] if sizes else 1
            continue
        offer = [NO_TOKEN] * width if late[index] else tokens[index]
        mine, flag = taken(offer, finite[index], length, made.params[row]) if active else ([], Flag.INERT)
        kept.append(mine + [min(token, NO_TOKEN) for token in tokens[index][len(mine) :]])
        published.append([row, generation, int(flag), *kept[-1], *[NO_TOKEN] * (line - L.LINE_TOKENS - width)])
        made.history[row, length : length + len(mine)] = torch.tensor(mine, dtype=torch.int32)
        if active:
            made.state[row, L.LENGTH] = length + len(mine)
            made.state[row, L.COMPUTED] = length + len(mine) - 1
        made.state[row, L.ACTIVE] = int(flag in (Flag.LIVE, Flag.HELD))
    assert out.tolist() == kept
    expected = torch.full(lines.shape, MARK, dtype=torch.int32)
    expected[slot, : line * len(published)] = torch.tensor(published, dtype=torch.int32).flatten()
    assert torch.equal(lines.cpu(), expected), "this slot, and nothing behind its lines"
    ahead = packet(rows, [], (slot + 1) % SLOTS, STEP + 1)
    assert torch.equal(words.cpu(), ahead), "the packet of the next step"
    assert torch.equal(there.state.cpu(), made.state) and torch.equal(there.history.cpu()[1:], made.history[1:])
    assert all(0 <= token < VOCAB for token in there.history[0].tolist()), "an embedding takes these"
    assert made.state[0].tolist() == [0] * L.STATE_COLUMNS and made.state[:, L.GENERATION].tolist() == [
        t[0] for t in table
    ]


def same(there: Tables, made: Tables) -> None:
    for name, got, expected in zip(Tables._fields, there, made, strict=True):
        assert torch.equal(got.cpu(), expected), name


@runs(
    "used, padding, writes", [(3, 5, 40), (1, 0, 0), (1, 0, 1), (0, 4, 2), (70, 58, 100)], keep=3,
    cuda=[(200, 56, 300), (1500, 548, 1500)],
)  # fmt: skip
def test_a_decode_step_begins_with_its_rows(implementation, used, padding, writes):
    for seed in range(2):
        check_begin_decode(implementation, seed, 1600 if used > 70 else 80, used, padding, writes)


@runs(
    "decode, chunks, spare, new",
    [(3, [7, 1, 30], 0, 2), (0, [1], 0, 0), (30, [5, 2, 8, 40], 300, 4), (2, [3, 3], 1, 0), (0, [0, 0, 9], 3, 1)],
    keep=3, cuda=[(400, [40] * 200, 5000, 150)],
)  # fmt: skip
def test_a_step_with_chunks_begins_with_its_rows_and_tokens(implementation, decode, chunks, spare, new):
    for seed in range(2):
        check_begin_mixed(implementation, seed, 650, decode, chunks, spare, new)


@runs(on=("interpreter",))
def test_a_step_with_chunks_begins_in_small_programs(implementation, monkeypatch):
    """So that each goes over its row's tokens several times."""
    from gapless.kernels import mixed_triton

    monkeypatch.setattr(mixed_triton, "MIXED_BLOCK", 8)
    monkeypatch.setattr(mixed_triton, "SPLITS", 2)
    check_begin_mixed(implementation, 0, 50, 3, [40, 33, 17], 50, 2)


@runs("used, padding", [(5, 3), (1, 0), (0, 3), (61, 4)], keep=2, cuda=[(300, 4), (1500, 548)])
@pytest.mark.parametrize("width, chunks", [(5, True), (5, False), (1, True), (1, False), (9, True)])
def test_a_step_ends_with_lines_and_lengths(implementation, used, padding, width, chunks):
    rows = 1600 if used > 70 else 80
    shape = SLOTS, 2 * L.line_words(width) * rows
    places = [torch.empty(shape, dtype=torch.int32, device=implementation.device)]
    if implementation.name == "cuda":
        places.append(torch.empty(shape, dtype=torch.int32, pin_memory=True))
    for lines in places:
        for seed in range(3):
            check_finish(implementation, seed, rows, used, padding, chunks=chunks, lines=lines, width=width)
