"""The beginning and the end of a step in Triton on tables written down by hand, against Python over lists and torch."""

from __future__ import annotations

import random
from itertools import accumulate

import torch
from torch import Tensor

from gapless.base.records import Flag
from gapless.kernels import begin_triton, finish_triton, mixed_triton, plain
from gapless.kernels.layout import (
    ACTIVE,
    COMPUTED,
    GENERATION,
    HEADER_WORDS,
    LATE,
    LENGTH,
    LINE_TOKENS,
    MAX_LEN,
    NO_TOKEN,
    PACKET_SLOT,
    PACKET_STEP,
    PARAM_COLUMNS,
    REJECTED,
    STATE_COLUMNS,
    STOP_IDS,
    line_words,
)
from gapless.kernels.tables import Tables
from gapless.kernels.views import Counts

STEP, SLOTS, MARK = 1234, 3, -77
LONGEST, PAGE_SIZE, MAX_PAGES = 40, 4, 10
VOCAB = 50


def moved(tables: Tables, device: str) -> Tables:
    """A copy on `device`."""
    return Tables(*(table.to(device, copy=True) for table in tables))


def world(rng: random.Random, size: int) -> Tables:
    """`size` rows in all states, the null row not counted: fresh, at a page's border, one before the end, finished."""
    state = torch.zeros(size + 1, STATE_COLUMNS, dtype=torch.int32)
    params = torch.full((size + 1, PARAM_COLUMNS), NO_TOKEN, dtype=torch.int32)
    params[0] = 0
    history = torch.zeros(size + 1, LONGEST, dtype=torch.int32)
    pages = torch.zeros(size + 1, MAX_PAGES, dtype=torch.int32)
    for row in range(1, size + 1):
        length = rng.choice((1, PAGE_SIZE, PAGE_SIZE + 1, LONGEST - 1, rng.randrange(1, LONGEST)))
        longest = rng.choice((length + 1, length + 1, LONGEST))
        active = int(rng.random() < 0.7)
        state[row, :8] = torch.tensor([rng.randrange(2**31), active, length, length - 1, 0, 3 * row, row, -row])
        params[row, MAX_LEN] = longest
        stops = rng.choice((0, 1, 5, PARAM_COLUMNS - STOP_IDS))
        params[row, STOP_IDS : STOP_IDS + stops] = torch.tensor([rng.randrange(VOCAB) for _ in range(stops)])
        history[row, :length] = torch.tensor([rng.randrange(VOCAB) for _ in range(length)])
        pages[row] = torch.tensor(rng.sample(range(1, 1000), MAX_PAGES))
    return Tables(state, params, history, pages, pages[:, None, :0])


def packet(rows: list[int], writes: list[tuple[int, int]], slot: int = 0, step: int = STEP) -> Tensor:
    words = [0] * HEADER_WORDS
    words[PACKET_STEP], words[PACKET_SLOT] = step, slot
    # What stands behind a packet is left over from an earlier one.
    return torch.tensor([*words, *rows, *(n for pair in writes for n in pair), *[MARK] * 50], dtype=torch.int32)


def batch_rows(rng: random.Random, size: int, used: int, padding: int) -> list[int]:
    return rng.sample(range(1, size + 1), used) + [0] * padding


def check_begin_decode(device: str, seed: int, size: int, used: int, padding: int, writes: int) -> None:
    """The page of the token's own place is one that this very packet brings."""
    rng = random.Random(seed)
    made = world(rng, size)
    rows = batch_rows(rng, size, used, padding)
    places = [row * MAX_PAGES + int(made.state[row, COMPUTED]) // PAGE_SIZE for row in rows[: min(used, writes)]]
    pairs = [(place, rng.randrange(1, 1000)) for place in places]
    pairs += [(0, 0)] * (writes - len(pairs))
    there, references = moved(made, device), moved(made, device)
    words = packet(rows, pairs).to(device)
    counts = Counts.of_decode(len(rows), writes)
    got = begin_triton.begin_decode(words, counts, there, PAGE_SIZE)
    reference = plain.begin_decode(words, counts, references, PAGE_SIZE)
    for flat, page in pairs:
        made.pages.view(-1)[flat] = page
    assert all(column.dtype == torch.int64 and column.shape == (len(rows),) for column in got)
    assert got.rows.tolist() == rows
    for index, row in enumerate(rows):
        position, active = int(made.state[row, COMPUTED]), bool(made.state[row, ACTIVE])
        page = int(made.pages[row, position // PAGE_SIZE])
        line = [int(column[index]) for column in got[1:]]
        expected = [int(made.history[row, position]), position, page * PAGE_SIZE + position % PAGE_SIZE, position + 1]
        assert line == (expected if active else [0, position, 0, 1]), (index, row)
    same(there, made)
    same(references, made)
    assert all(torch.equal(a, b) for name, a, b in zip(got._fields, got, reference, strict=True) if name != "ids")


def check_begin_mixed(device: str, seed: int, size: int, decode: int, chunks: list[int], spare: int, new: int) -> None:
    """`new` of the chunks' rows are admitted in this very step, with their pages; `spare` tokens belong to no row."""
    rng = random.Random(seed)
    made = world(rng, size)
    rows = rng.sample(range(1, size + 1), decode + len(chunks))
    sizes = [1] * decode + chunks
    admitted, pairs = [], []
    for row, count in zip(rows[decode:], chunks, strict=True):
        start = rng.randrange(LONGEST - count + 1)
        if len(admitted) < new:
            line = [rng.randrange(2**31), 1, start + count, start, 0, 0, *[row, -row] * ((STATE_COLUMNS - 6) // 2)]
            admitted.append([row, *line, *(rng.randrange(-5, 2**31) for _ in range(PARAM_COLUMNS))])
            pairs += [(row * MAX_PAGES + entry, rng.randrange(1, 1000)) for entry in range(MAX_PAGES)]
        else:
            made.state[row, : COMPUTED + 1] = torch.tensor([rng.randrange(2**31), 1, start + count, start])
    prompts = [[rng.randrange(VOCAB) for _ in range(count)] for count in chunks]
    sent = [*sizes, *(n for pair in pairs for n in pair), *(n for line in admitted for n in line)]
    words = packet(rows, [])[: HEADER_WORDS + len(rows)].tolist() + sent + [n for prompt in prompts for n in prompt]
    there = moved(made, device)
    total = sum(sizes)
    got = mixed_triton.begin_mixed(
        torch.tensor(words + [MARK] * 50, dtype=torch.int32, device=device),
        Counts(len(rows), decode, len(pairs), len(admitted), total + spare),
        there,
        PAGE_SIZE,
    )
    for row, *line in admitted:
        made.state[row] = torch.tensor(line[:STATE_COLUMNS])
        made.params[row] = torch.tensor(line[STATE_COLUMNS:])
    for flat, page in pairs:
        made.pages.view(-1)[flat] = page
    tokens, kv_lens = [], []
    for index, row in enumerate(rows):
        _, active, _, start = made.state[row, : COMPUTED + 1].tolist()
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
    assert [tuple(line) for line in torch.stack(got[4:], dim=1).tolist()] == tokens + [(0, 0, 0)] * spare
    same(there, made)


def taken(tokens: list[int], good: bool, length: int, params: Tensor) -> tuple[list[int], Flag]:
    """What an active row of that length takes of its tokens."""
    out: list[int] = []
    for token in tokens if good else ():
        if token < 0:
            break
        out.append(token)
        if token in params[STOP_IDS:].tolist():
            return out, Flag.STOP
        if length + len(out) >= params[MAX_LEN]:
            return out, Flag.LENGTH
    return out, (Flag.LIVE if out else Flag.HELD) if good else Flag.ERROR


def offered(rng: random.Random, params: Tensor, width: int) -> list[int]:
    """Tokens for a row: a stop id anywhere, and NO_TOKEN or REJECTED anywhere where a row may get several."""
    stops = [stop for stop in params[STOP_IDS:].tolist() if stop >= 0]
    tokens = [rng.randrange(VOCAB) for _ in range(width)]
    if stops and rng.random() < 0.5:
        tokens[rng.randrange(width)] = rng.choice(stops)
    if rng.random() < (0.4 if width > 1 else 0.1):
        tokens[rng.randrange(width)] = NO_TOKEN
    if width > 1 and rng.random() < 0.4:
        tokens[rng.randrange(1, width)] = REJECTED
    return tokens


def check_finish(
    device: str, seed: int, size: int, used: int, padding: int, *, chunks: bool, lines: Tensor, width: int = 1
) -> None:
    """`lines` int32 [SLOTS, M], which may be pinned memory of the host."""
    rng = random.Random(seed)
    made = world(rng, size)
    rows = batch_rows(rng, size, used, padding)
    samples = len(rows) - (used // 3 if chunks else 0)
    sizes = [rng.randrange(1, 5) for _ in rows] if chunks else None
    slot = rng.randrange(SLOTS)
    tokens = [offered(rng, made.params[row], width) for row in rows[:samples]]
    finite = [rng.random() < 0.8 for _ in tokens]
    late = [rng.random() < 0.2 for _ in rows]
    made.state[rows, LATE] = torch.tensor(late).int() * (torch.tensor(rows) > 0)
    lines.fill_(MARK)
    there, table = moved(made, device), [list(line) for line in made.state.tolist()]
    words = packet(rows, [], slot).to(device)
    reference_words, row_numbers = words.clone(), torch.tensor(rows, dtype=torch.int32, device=device)
    given = (
        row_numbers,
        None if sizes is None else torch.tensor(sizes, dtype=torch.int32, device=device),
        torch.tensor(tokens, device=device).view(samples, width), torch.tensor(finite, device=device),
    )  # fmt: skip
    references, reference_lines = moved(made, device), lines.to(device, copy=True)
    out, reference = (torch.full((samples, width), MARK, dtype=torch.int32, device=device) for _ in range(2))
    finish_triton.finish(words, *given, there, lines, out)
    plain.finish(reference_words, *given, references, reference_lines, reference)
    if device == "cuda":
        torch.cuda.synchronize()
    line = line_words(width)
    published, kept = [[STEP, samples, *[0] * (line - 2)]], []
    for index, row in enumerate(rows):
        generation, active, length, *_ = table[row]
        if index >= samples:
            if active:
                made.state[row, COMPUTED] += sizes[index] if sizes else 1
            continue
        offer = [NO_TOKEN] * width if late[index] else tokens[index]
        mine, flag = taken(offer, finite[index], length, made.params[row]) if active else ([], Flag.INERT)
        kept.append(mine + [min(token, NO_TOKEN) for token in tokens[index][len(mine) :]])
        published.append([row, generation, int(flag), *kept[-1], *[NO_TOKEN] * (line - LINE_TOKENS - width)])
        made.history[row, length : length + len(mine)] = torch.tensor(mine, dtype=torch.int32)
        if active:
            made.state[row, LENGTH] = length + len(mine)
            made.state[row, COMPUTED] = length + len(mine) - 1
        made.state[row, ACTIVE] = int(flag in (Flag.LIVE, Flag.HELD))
    assert out.tolist() == reference.tolist() == kept
    expected = torch.full(lines.shape, MARK, dtype=torch.int32)
    expected[slot, : line * len(published)] = torch.tensor(published, dtype=torch.int32).flatten()
    assert torch.equal(lines.cpu(), expected), "this slot, and nothing behind its lines"
    assert torch.equal(reference_lines.cpu(), expected)
    ahead = packet(rows, [], (slot + 1) % SLOTS, STEP + 1)
    assert torch.equal(words.cpu(), ahead) and torch.equal(reference_words.cpu(), ahead), "the packet of the next step"
    for tables in (there, references):
        assert torch.equal(tables.state.cpu(), made.state) and torch.equal(tables.history.cpu()[1:], made.history[1:])
        assert all(0 <= token < VOCAB for token in tables.history[0].tolist()), "an embedding takes these"
    assert made.state[0].tolist() == [0] * STATE_COLUMNS and made.state[:, GENERATION].tolist() == [t[0] for t in table]


def same(there: Tables, made: Tables) -> None:
    for name, got, expected in zip(Tables._fields, there, made, strict=True):
        assert torch.equal(got.cpu(), expected), name
