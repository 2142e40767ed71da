"""Scores of sampled tokens on tables written down by hand, against torch and against Python in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from implementations import BF16, F32, TRITON, runs
from native_kernels import load_native, load_plain_variant
from torch import Tensor

from gapless.base.records import NO_TOKEN
from gapless.kernels import layout as L
from gapless.kernels import plain
from gapless.kernels.tables import Tables

Score = Callable[[Tensor, Tensor, Tensor, Tensor, Tables, Tensor, int, int], None]
"""`seam.Kernels.score`, of whichever kernels are looked at."""
SLOTS, START, MARK = 3, 11, -77
PIECE = 1 << 14
"""Tokens that native/scores.cpp sums at once."""
KINDS = ("ties", "bad", "masked", "huge", "plain", "all equal")


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
    state = torch.arange((rows + 1) * L.STATE_COLUMNS, dtype=torch.int32).view(rows + 1, L.STATE_COLUMNS) * 7 + 5
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
    end = START + len(listed) * L.score_words(width)
    made = torch.empty(SLOTS, end + 9, dtype=torch.int32, device=device)
    reference, slot = made.clone(), (width + rows) % SLOTS
    if pinned:
        made = torch.empty(made.shape, dtype=torch.int32, pin_memory=True)
    words[L.PACKET_SLOT] = (slot + 1) % SLOTS
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
            assert int(line[L.SCORE_POSITION]) == -1
            line.copy_(reference)
    check_lines(kind, got[slot, START:end], want[slot, START:end], width)
    if kind != "bad":
        for entry, line in zip(listed, got[slot, START:end].view(len(listed), -1), strict=True):
            place, sample = divmod(entry, rows)
            check_directly(line, logits[entry].cpu(), tokens[sample][place], width)
            row = rows - sample
            position = int(tables.state[row, L.LENGTH]) - taken[sample] + place if place < taken[sample] else -1
            assert line[:3].tolist() == [
                int(words[L.HEADER_WORDS + sample]),
                int(tables.state[row, L.GENERATION]),
                position,
            ]


def check_lines(kind: str, got: Tensor, want: Tensor, width: int) -> None:
    """Lines against those of torch: numbers are equal, log-probabilities close."""
    got, want = got.view(-1, L.score_words(width)), want.view(-1, L.score_words(width))
    real = torch.zeros(L.score_words(width), dtype=torch.bool)
    real[L.SCORE_LOGPROB] = True
    real[L.SCORE_TOP + width :] = True
    pairs = [lines[:, real].contiguous().view(torch.float32) for lines in (got, want)]
    torch.testing.assert_close(*pairs, atol=1e-5, rtol=1e-6, equal_nan=True)
    good = ~want[:, L.SCORE_LOGPROB].contiguous().view(torch.float32).isnan()
    assert torch.equal(got[good][:, ~real], want[good][:, ~real]) and torch.equal(got[:, :3], want[:, :3])
    assert kind != "bad" or not good.all()


def check_directly(line: Tensor, logits: Tensor, target: int, width: int) -> None:
    logprob, rank, top, values = direct(logits, max(target, 0), width)
    reals, spare = line.view(torch.float32), width - len(top)
    assert float(reals[L.SCORE_LOGPROB]) == pytest.approx(logprob, abs=1e-5, rel=1e-6)
    assert line[L.SCORE_LOGPROB + 1 : L.SCORE_TOP + width].tolist() == [rank, *top, *[NO_TOKEN] * spare]
    assert reals[L.SCORE_TOP + width :].tolist() == pytest.approx([*values, *[-math.inf] * spare], abs=1e-5, rel=1e-6)


def check_alone(score: Score, device: str, dtype: torch.dtype, vocab: int) -> None:
    """A row's line has the same bits whatever else is in the list and in the batch."""
    logits = hard_logits("plain", 9, vocab, dtype, device)
    words, tokens, tables = world(9, [[5 * row] for row in range(9)], device)
    found = []
    for listed in ([6], [0, 1, 6], [8, 6, 6, 6]):
        lines = torch.full((1, 20 * L.score_words(5)), MARK, dtype=torch.int32, device=device)
        index = torch.tensor(listed, dtype=torch.int32, device=device)
        score(logits, index, words, tokens, tables, lines, 0, 5)
        at = listed.index(6) * L.score_words(5)
        found.append(lines[0, at : at + L.score_words(5)].tolist())
    assert found[0] == found[1] == found[2]


@runs(
    "width, kind", [(5, kind) for kind in KINDS], on=("native", *TRITON), keep=6,
    native=[(width, kind) for width in (0, 1, 20) for kind in KINDS],
    interpreter=[(width, kind) for width in (0, 1, 20) for kind in KINDS],
)  # fmt: skip
def test_scores_equal_the_direct_computation(implementation, width, kind):
    vocab = 4999 if implementation.name == "native" else 2600
    for dtype in implementation.dtypes[: 1 if implementation.name == "interpreter" and width != 5 else 2]:
        check_score(
            implementation.kernels.score, kind, dtype, implementation.device, 7, vocab, [0, 2, 3, 4, 6, 6], width
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_several_pieces_is_scored_as_one(kind):
    for vocab in (PIECE - 1, PIECE + 1, 2 * PIECE + 30):
        check_score(load_native().score, kind, BF16, "cpu", 3, vocab, [0, 1, 2], 20)


@pytest.mark.parametrize("kind", KINDS)
@runs("listed", on=("cuda",), cuda=[[0], [0, 2, 5, 5], [*range(32)]])
def test_scores_of_a_real_vocabulary_equal_the_direct_computation(implementation, listed, kind):
    for width, pinned in ((0, False), (1, True), (5, True), (20, True)):
        check_score(implementation.kernels.score, kind, BF16, "cuda", 33, 151_936, listed, width, pinned)


@runs("vocab", [1, 3, 19], on=("native", *TRITON), native=[15, 16, 17, 33], interpreter=[2048, 2049], cuda=[4999])
def test_scores_of_small_vocabularies_equal_the_direct_computation(implementation, vocab):
    score, device = implementation.kernels.score, implementation.device
    check_score(score, "ties", implementation.half, device, 5, vocab, [1, 4], 20)
    check_score(score, "plain", F32, device, 1, vocab, [0], 5)


@runs(on=("native", *TRITON))
def test_every_token_that_a_row_with_drafts_got_is_scored(implementation):
    listed = [place * 7 + row for row in (0, 2, 3, 4, 6) for place in range(3)]
    listed = [*listed, listed[-1]]
    score = implementation.kernels.score
    check_score(score, "ties", implementation.half, implementation.device, 7, 999, listed, 5, places=3)


@runs("vocab", on=TRITON, interpreter=[4500], cuda=[151_936])
def test_a_row_does_not_depend_on_others(implementation, vocab):
    check_alone(implementation.kernels.score, implementation.device, F32, vocab)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_row_does_not_depend_on_others_nor_on_threads(dtype):
    score = load_native().score
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            check_alone(score, "cpu", dtype, 2 * PIECE + 30)
    finally:
        torch.set_num_threads(before)


def test_threads_give_the_same_bits():
    score = load_native().score
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(lines_of(score, hard_logits("plain", 9, 3 * PIECE, torch.float32, "cpu"), 20))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


def lines_of(score, logits, width):
    """The lines of all rows, each with a token."""
    rows = len(logits)
    words, tokens, tables = world(rows, [[5 * row % logits.shape[1]] for row in range(rows)], "cpu")
    lines = torch.zeros(2, rows * L.score_words(width), dtype=torch.int32)
    score(logits, torch.arange(rows).int(), words, tokens, tables, lines, 0, width)
    return lines[1].view(rows, -1)


def test_ids_and_ranks_of_bad_rows_are_those_of_torch_too():
    """NaN of both signs and infinities in the order of their bits."""
    logits = hard_logits("bad", 4, 1000, torch.float32, "cpu")
    logits[0, 5], logits[1, 0], logits[2, 10] = -torch.nan, -torch.inf, torch.nan
    got, want = (lines_of(kernels.score, logits, 20) for kernels in (load_native(), plain.KERNELS))
    real = torch.zeros(got.shape[1], dtype=torch.bool)
    real[L.SCORE_LOGPROB] = real[L.SCORE_TOP + 20 :] = True
    assert torch.equal(got[:, ~real], want[:, ~real])
    assert bool(got[:, real].contiguous().view(torch.float32).isnan().all())


@pytest.mark.process
def test_scores_without_avx512_equal_the_direct_computation(tmp_path):
    score = partial(by_operator, load_plain_variant(tmp_path).score)
    for dtype in (F32, BF16):
        for kind in KINDS:
            check_score(score, kind, dtype, "cpu", 5, 4999, [0, 2, 3, 4], 5)


def by_operator(operator, logits, index, words, tokens, tables, outboxes, start, width):
    operator(logits, index, words, tokens, tables.state, outboxes, start, width)
