"""Scores of sampled tokens on tables written down by hand, against torch and against Python in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gapless.kernels import plain
from gapless.kernels.layout import (
    GENERATION,
    HEADER_WORDS,
    LENGTH,
    NO_TOKEN,
    PACKET_SLOT,
    SCORE_LOGPROB,
    SCORE_POSITION,
    SCORE_TOP,
    STATE_COLUMNS,
    score_words,
)
from gapless.kernels.tables import Tables

Score = Callable[[Tensor, Tensor, Tensor, Tensor, Tables, Tensor, int, int], None]
"""`seam.Kernels.score`, of whichever kernels are looked at."""
SLOTS, START, MARK = 3, 11, -77
KINDS = ("plain", "ties", "all equal", "huge", "masked", "bad")


def hard_logits(kind: str, rows: int, vocab: int, dtype: torch.dtype, device: str) -> Tensor:
    """Logits of a kind that is hard in its own way."""
    numbers = torch.Generator().manual_seed(len(kind) + rows)
    logits = torch.randn(rows, vocab, generator=numbers) * 3
    if kind == "ties":
        logits = logits.round()
        logits[:, ::3] *= -1.0  # zeros of both signs
    elif kind == "all equal":
        logits = torch.full_like(logits, -3.5)
    elif kind == "huge":
        logits = logits * 1e3
    elif kind == "masked":
        logits = logits.masked_fill(torch.rand(rows, vocab, generator=numbers) < 0.98, -torch.inf)
        logits[:, vocab // 2] = 0.25
    elif kind == "bad":
        for row, value in enumerate((torch.nan, torch.inf, -torch.nan)):
            logits[row % rows, (row * 977) % vocab] = value
        logits[-1] = -torch.inf
    return logits.to(dtype).to(device)


def world(rows: int, tokens: list[list[int]], device: str) -> tuple[Tensor, Tensor, Tables]:
    """The packet after `finish`, the tokens and the tables of a batch of `rows`: it has the table's rows backwards."""
    state = torch.arange((rows + 1) * STATE_COLUMNS, dtype=torch.int32).view(rows + 1, STATE_COLUMNS) * 7 + 5
    words = torch.tensor([9, 0, *range(rows, 0, -1)], dtype=torch.int32)
    none = torch.empty(0, dtype=torch.int32, device=device)
    there = torch.tensor(tokens, dtype=torch.int32, device=device)
    return words.to(device), there, Tables(state.to(device), none, none, none, none)


def direct(logits: Tensor, target: int, width: int) -> tuple[float, int, list[int], list[float]]:
    """(log-probability, rank, ids, log-probabilities) of one row, in float64 and Python's own order of tokens."""
    values = logits.double()
    order = torch.sort(values, descending=True, stable=True).indices.tolist()
    best = values.max()
    total = float(best) + math.log(float((values - best).exp().sum()))
    top = order[:width]
    return float(values[target]) - total, order.index(target) + 1, top, [float(values[one]) - total for one in top]


def check_score(
    score: Score, kind: str, dtype: torch.dtype, device: str, rows: int, vocab: int, listed: list[int], width: int,
    pinned: bool = False, places: int = 1,
) -> None:  # fmt: skip
    """Scores of the `listed` places of a batch, of which every fifth row has no token; outboxes may be pinned."""
    logits = hard_logits(kind, places * rows, vocab, dtype, device)
    likely = logits.float().nan_to_num().argmax(-1).tolist()
    each = [
        [likely[n] if n % 2 else (n * 1234 + 7) % vocab for n in range(row, len(likely), rows)] for row in range(rows)
    ]
    taken = [0 if row % 5 == 4 else places - row % places for row in range(rows)]
    tokens = [[*line[:count], *[NO_TOKEN] * (places + 1 - count)] for line, count in zip(each, taken, strict=True)]
    words, there, tables = world(rows, tokens, device)
    index = torch.tensor(listed, dtype=torch.int32, device=device)
    end = START + len(listed) * score_words(width)
    made = torch.empty(SLOTS, end + 9, dtype=torch.int32, device=device)
    reference, slot = made.clone(), (width + rows) % SLOTS
    if pinned:
        made = torch.empty(made.shape, dtype=torch.int32, pin_memory=True)
    words[PACKET_SLOT] = (slot + 1) % SLOTS
    for lines, how in ((made, score), (reference, plain.score)):
        lines.fill_(MARK)
        how(logits, index, words, there, tables, lines, START, width)
    if device == "cuda":
        torch.cuda.synchronize()
    got, want = made.cpu(), reference.cpu()
    outside = torch.ones_like(got, dtype=torch.bool)
    outside[slot, START:end] = False
    assert (got[outside] == MARK).all(), "written somewhere else"
    lines, expected = (one[slot, START:end].view(len(listed), -1) for one in (got, want))
    for entry, line, reference in zip(listed, lines, expected, strict=True):
        if entry >= rows and tokens[entry % rows][entry // rows] == NO_TOKEN:  # its position says so, the rest nothing
            assert int(line[SCORE_POSITION]) == -1
            line.copy_(reference)
    check_lines(kind, got[slot, START:end], want[slot, START:end], width)
    if kind != "bad":
        for entry, line in zip(listed, got[slot, START:end].view(len(listed), -1), strict=True):
            place, sample = divmod(entry, rows)
            check_directly(line, logits[entry].cpu(), tokens[sample][place], width)
            row = rows - sample
            position = int(tables.state[row, LENGTH]) - taken[sample] + place if place < taken[sample] else -1
            assert line[:3].tolist() == [
                int(words[HEADER_WORDS + sample]),
                int(tables.state[row, GENERATION]),
                position,
            ]


def check_lines(kind: str, got: Tensor, want: Tensor, width: int) -> None:
    """Lines against those of torch: numbers are equal, log-probabilities close."""
    got, want = got.view(-1, score_words(width)), want.view(-1, score_words(width))
    real = torch.zeros(score_words(width), dtype=torch.bool)
    real[SCORE_LOGPROB] = True
    real[SCORE_TOP + width :] = True
    pairs = [lines[:, real].contiguous().view(torch.float32) for lines in (got, want)]
    torch.testing.assert_close(*pairs, atol=1e-5, rtol=1e-6, equal_nan=True)
    good = ~want[:, SCORE_LOGPROB].contiguous().view(torch.float32).isnan()
    assert torch.equal(got[good][:, ~real], want[good][:, ~real]) and torch.equal(got[:, :3], want[:, :3])
    assert kind != "bad" or not good.all()


def check_directly(line: Tensor, logits: Tensor, target: int, width: int) -> None:
    logprob, rank, top, values = direct(logits, max(target, 0), width)
    reals, spare = line.view(torch.float32), width - len(top)
    assert float(reals[SCORE_LOGPROB]) == pytest.approx(logprob, abs=1e-5, rel=1e-6)
    assert line[SCORE_LOGPROB + 1 : SCORE_TOP + width].tolist() == [rank, *top, *[NO_TOKEN] * spare]
    assert reals[SCORE_TOP + width :].tolist() == pytest.approx([*values, *[-math.inf] * spare], abs=1e-5, rel=1e-6)


def check_alone(score: Score, device: str, dtype: torch.dtype, vocab: int) -> None:
    """A row's line has the same bits whatever else is in the list and in the batch."""
    logits = hard_logits("plain", 9, vocab, dtype, device)
    words, tokens, tables = world(9, [[5 * row] for row in range(9)], device)
    found = []
    for listed in ([6], [0, 1, 6], [8, 6, 6, 6]):
        lines = torch.full((1, 20 * score_words(5)), MARK, dtype=torch.int32, device=device)
        index = torch.tensor(listed, dtype=torch.int32, device=device)
        score(logits, index, words, tokens, tables, lines, 0, 5)
        at = listed.index(6) * score_words(5)
        found.append(lines[0, at : at + score_words(5)].tolist())
    assert found[0] == found[1] == found[2]
