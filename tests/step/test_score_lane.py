"""The score lane: log-probabilities of one step against a computation in float64, in Python's own order of tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from direct import Varied
from step_harness import Bench, request, rows_in
from test_capture_ready import recorded

from gapless.base.records import Admission, Chunk, Flag, PageWrite, StepPlan
from gapless.kernels import scores
from gapless.kernels.scores import measure, pieces
from gapless.memory.ledger import Ledger
from gapless.memory.rows import RowTable
from gapless.step.listing import NO_LISTS, Lanes
from gapless.testing.checksum import ChecksumModel, continue_prompt

VOCAB = 97


def direct(logits, target, width):
    """(log-probability, rank, ids, log-probabilities) of one row."""
    values = [float(x) for x in logits]
    best = max(values)
    total = best + math.log(sum(math.exp(x - best) for x in values))
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    top = order[:width]
    return values[target] - total, order.index(target) + 1, top, [values[token] - total for token in top]


def rows(kind, count=40, vocab=61):
    """Logits of a kind that is hard in its own way."""
    numbers = torch.Generator().manual_seed(3)
    logits = torch.randn(count, vocab, generator=numbers)
    if kind == "ties":
        logits = (logits * 2).round()
    elif kind == "all equal":
        logits = torch.full_like(logits, -3.5)
    elif kind == "huge":
        logits = logits * 1e4
    elif kind == "masked":
        logits = logits.masked_fill(torch.rand(count, vocab, generator=numbers) < 0.9, -torch.inf)
        logits[:, 7] = 0.25
    return logits, torch.randint(vocab, (count,), generator=numbers)


@pytest.mark.parametrize("kind", ["plain", "ties", "all equal", "huge", "masked"])
@pytest.mark.parametrize("width", [0, 1, 5, 20])
def test_scores_are_those_of_a_direct_computation(kind, width):
    logits, targets = rows(kind)
    own, ranks, ids, tops = (part.tolist() for part in measure(logits, targets, width))
    for i, target in enumerate(targets.tolist()):
        logprob, rank, top, values = direct(logits[i], target, width)
        assert own[i] == pytest.approx(logprob, abs=1e-5, rel=1e-6)
        assert (ranks[i], ids[i]) == (rank, top)
        assert tops[i] == pytest.approx(values, abs=1e-5, rel=1e-6)


def test_a_vocabulary_smaller_than_the_width_is_padded():
    logits, targets = rows("ties", vocab=3)
    _, _, ids, tops = measure(logits, targets, 5)
    assert ids[:, :3].sort(-1).values.tolist() == [[0, 1, 2]] * len(ids)
    assert ids[:, 3:].tolist() == [[-1, -1]] * len(ids) and tops[:, 3:].isneginf().all()


@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_give_nan(spoilt):
    logits, targets = rows("plain")
    logits[5, 9] = spoilt
    logits[6] = -torch.inf
    own = measure(logits, targets, 1)[0]
    assert own.isnan().nonzero().flatten().tolist() == [5, 6]


@pytest.mark.parametrize(("count", "vocab"), [(0, 10), (1, 10), (7, 10), (8, 10), (9, 10), (3, 10**6)])
def test_pieces_cover_every_row_within_the_bound(count, vocab, monkeypatch):
    monkeypatch.setattr(scores, "PIECE_BYTES", 4 * 40)
    found = list(pieces(count, vocab))
    assert [row for piece in found for row in range(piece.start, piece.stop)] == list(range(count))
    assert all(1 <= piece.stop - piece.start <= max(1, 40 // vocab) for piece in found)


# Through the step program.


def varied_logits(tokens):
    fold = ChecksumModel(VOCAB, 64)
    bench = Bench(fold, max_len=64)
    bench.model.logits = lambda hidden: (kept.append(hidden.clone()), Varied.scores(fold, hidden))[1]
    kept = []
    bench.admit(request(tokens=tokens, temperature=0.0, max_len=60))
    return Varied.scores(fold, kept[-1])[0]


def check(line, tokens, position, width):
    """One line of an outbox against the logits in front of `tokens[position]`."""
    logprob, rank, top, values = direct(varied_logits(tokens[:position]), tokens[position], width)
    assert line.logprob == pytest.approx(logprob, abs=1e-5)
    assert (line.position, line.rank, line.ids) == (position, rank, top)
    assert line.tops == pytest.approx(values, abs=1e-5)


PROMPT = (5, 6, 7, 8, 9, 10, 11)


def test_sampled_and_prompt_tokens_in_one_step():
    """A row in decode that asks, one that does not, and a prompt in two chunks."""
    bench = Bench(Varied(VOCAB, 64), max_len=64)
    mine, _ = bench.admit(request(tokens=(1, 2), temperature=0.0, logprobs=5, key=1))
    other, outbox = bench.admit(request(tokens=(3,), temperature=0.0, key=2))
    assert bench.lines == []
    asked = request(tokens=PROMPT, temperature=0.0, logprobs=0, prompt_logprobs=3, key=3)
    row = bench.table.take(3, asked.tokens)
    bench.requests[row] = asked
    writes = [PageWrite(row, entry, 50 + entry) for entry in range(4)]
    outbox = bench.run((other, mine), (Chunk(row, 0, 4, False),), (Admission(row, 1, 3, 0, 7),), writes)
    assert [(line.row, line.generation) for line in bench.lines] == [(row, 1)] * 4 + [(mine, 1)]
    known = bench.tables.history[mine].tolist()
    assert known[3] == outbox.tokens[1]
    check(bench.lines[-1], known, 3, 5)
    for place, line in enumerate(bench.lines[:-1], 1):
        check(line, PROMPT, place, 5)
    outbox = bench.run((other,), (Chunk(row, 4, 3, True),))
    assert [line.position for line in bench.lines] == [5, 6, 7]
    check(bench.lines[-1], [*PROMPT, int(outbox.tokens[1])], 7, 5)
    for place, line in enumerate(bench.lines[:-1], 5):
        check(line, PROMPT, place, 5)


def test_the_logits_are_raw_whatever_the_sampler_does():
    """Temperature, filters and banned stop ids choose the token; its log-probability is the model's own."""
    settings = {"temperature": 1.7, "top_k": 2, "min_tokens": 5, "seed": 4}
    best = direct(varied_logits(PROMPT), 0, 4)[2]
    bench = Bench(Varied(VOCAB, 64), max_len=64)
    asked = request(tokens=PROMPT, stop_ids=best[:3], min_len=len(PROMPT) + 5, logprobs=5, **settings)
    _, outbox = bench.admit(asked)
    token = int(outbox.tokens[0])
    assert token not in best[:3], "three were banned"
    check(bench.lines[0], [*PROMPT, token], 7, 5)
    assert bench.lines[0].ids[:3] == best[:3], "and they are still the most likely"


def test_a_row_without_a_token_has_no_score():
    class Spoilt(Varied):
        def logits(self, hidden):
            logits = super().logits(hidden)
            logits[0] = torch.nan
            return logits

    bench = Bench(Varied(VOCAB, 64), max_len=64)
    bad, _ = bench.admit(request(tokens=(1, 2), temperature=0.0, logprobs=1, key=1))
    ended, outbox = bench.admit(request(tokens=(3,), temperature=0.0, logprobs=1, max_len=2, key=2))
    assert outbox.flags[0] == Flag.LENGTH and [line.position for line in bench.lines] == [1]
    bench.model.logits = Spoilt.logits.__get__(Spoilt(VOCAB, 64))
    outbox = bench.run((bad, ended))
    assert outbox.flags.tolist() == [Flag.ERROR, Flag.INERT]
    assert [line.position for line in bench.lines] == [-1, -1]


def test_pieces_do_not_show(monkeypatch):
    whole, cut = [], []
    for kept, size in ((whole, 64 << 20), (cut, 4 * VOCAB * 3)):
        monkeypatch.setattr(scores, "PIECE_BYTES", size)
        bench = Bench(Varied(VOCAB, 64), max_len=64)
        for key in range(4):
            bench.admit(
                request(
                    tokens=range(key, key + 11), temperature=0.0, logprobs=5, prompt_logprobs=5, key=key, max_len=16
                )
            )
            kept += bench.lines
        bench.run((1, 2, 3, 4))
        kept += bench.lines
    assert whole == cut and len(whole) == 4 * 11 + 4


def test_operations_follow_from_the_key_alone():
    """As for every other step: a captured one would serve any rows of the same key."""
    bench = Bench(Varied(VOCAB, 64), max_len=64)
    stop = continue_prompt((5, 6), 3, VOCAB)[-1]
    made = [
        bench.admit(request(key=key, tokens=(5, 6), max_len=30, stop_ids=(stop,), logprobs=5, temperature=0.0))[0]
        for key in range(2)
    ]
    first = recorded(bench, tuple(made))
    assert any("topk" in name for name, _ in first)
    assert all(recorded(bench, tuple(made)) == first for _ in range(3))


def test_nothing_of_it_runs_when_nobody_asks():
    bench = Bench(Varied(VOCAB, 64), max_len=64)
    rows = [bench.admit(request(key=key, tokens=(5, 6), temperature=0.0))[0] for key in range(2)]
    names = {name for name, _ in recorded(bench, tuple(rows))}
    assert not [name for name in names if "softmax" in name or "topk" in name or "sort" in name]


# What a step asks for.


def plan_of(decode=(), chunks=()):
    return StepPlan(1, tuple(decode), tuple(chunks), (), (), 0)


def test_widths_are_few_and_no_wider_than_asked():
    lanes = Lanes(RowTable(4, 16, Ledger()))
    for row, top in enumerate((0, 1, 4, 6), 1):
        lanes.admit(row, request(logprobs=top, tokens=(1,)))
    found = [lanes.of(plan_of(range(1, count + 1))) for count in (1, 2, 3, 4)]
    assert [(rows_in(lists, "score"), lists.width) for lists in found] == [
        ((0,), 0), ((0, 1), 1), ((0, 1, 2), 5), ((0, 1, 2, 3), 20)
    ]  # fmt: skip
    lanes.admit(4, request())
    lists = lanes.of(plan_of((4, 3)))
    assert (rows_in(lists, "score"), lists.width, rows_in(lists, "cut")) == ((1,), 5, ())
    assert lanes.of(plan_of((4,))) == NO_LISTS


def test_the_last_prompt_token_is_scored_and_nothing_behind_it():
    """After a preemption the known tokens are more than the prompt: the others were scored when they were sampled."""
    table = RowTable(2, 16, Ledger())
    lanes = Lanes(table)
    row = table.take(1, np.arange(10, 20, dtype=np.int32))
    lanes.admit(row, request(tokens=range(10, 16), prompt_logprobs=1))
    asked = lanes.of(plan_of((), [Chunk(row, 0, 3, False)]))
    assert asked.prompt[0].tolist() == [[0, 0, 11], [1, 0, 12], [2, 0, 13]]
    asked = lanes.of(plan_of((7, 8), [Chunk(9, 0, 4, True), Chunk(row, 3, 7, True)]))
    assert asked.prompt[0].tolist() == [[6, 3, 14], [7, 3, 15]]
    assert not lanes.of(plan_of((), [Chunk(row, 5, 5, True)])).prompts
