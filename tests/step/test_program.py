"""One step on the device: who gets a token, with which flag, and what is left of a row that has finished."""

from __future__ import annotations

import pytest
import torch
from step_harness import Bench, request

from gapless import guard
from gapless.base.records import NO_TOKEN, Admission, Chunk, Flag, PageWrite
from gapless.kernels.layout import ACTIVE, COMPUTED, LENGTH
from gapless.testing.checksum import ChecksumModel, continue_prompt

VOCAB = 97
PROMPT = (5, 6, 7)


class Spoilt(ChecksumModel):
    """Logits of the batch rows named in `spoil` are replaced."""

    def __init__(self):
        super().__init__(VOCAB, 32)
        self.spoil = {}

    def logits(self, hidden):
        logits = super().logits(hidden)
        for row, value in self.spoil.items():
            logits[row] = value
        return logits


@pytest.fixture
def bench():
    return Bench(Spoilt())


def line(outbox, index=0):
    return int(outbox.tokens[index]), int(outbox.flags[index])


def greedy(**fields):
    return request(tokens=PROMPT, temperature=0.0, **fields)


def direct(count):
    return continue_prompt(PROMPT, count, VOCAB)


def test_tokens_are_those_of_the_direct_computation_until_the_length_is_reached(bench):
    row, outbox = bench.admit(greedy(max_len=8))
    lines = [line(outbox)] + [line(bench.run((row,))) for _ in range(6)]
    tokens = direct(5)
    assert [token for token, _ in lines[:5]] == tokens
    assert [flag for _, flag in lines] == [Flag.LIVE] * 4 + [Flag.LENGTH] + [Flag.INERT] * 2
    assert [token for token, _ in lines[5:]] == [NO_TOKEN] * 2
    assert bench.tables.history[row, :8].tolist() == [*PROMPT, *tokens]


def test_one_new_token_ends_with_the_prompt_step(bench):
    _, outbox = bench.admit(greedy(max_len=4))
    assert line(outbox) == (direct(1)[0], Flag.LENGTH)


def test_a_stop_id_ends_the_row_and_is_told(bench):
    tokens = direct(4)
    row, outbox = bench.admit(greedy(stop_ids=(96, tokens[2])))
    assert tokens.index(tokens[2]) == 2
    lines = [line(outbox)] + [line(bench.run((row,))) for _ in range(3)]
    assert lines[:3] == [(tokens[0], Flag.LIVE), (tokens[1], Flag.LIVE), (tokens[2], Flag.STOP)]
    assert lines[3] == (NO_TOKEN, Flag.INERT)


def test_a_stop_at_the_last_place_is_a_stop(bench):
    _, outbox = bench.admit(greedy(max_len=4, stop_ids=tuple(direct(1))))
    assert line(outbox)[1] == Flag.STOP


def test_stop_ids_do_not_end_a_row_before_its_minimum(bench):
    first = direct(1)[0]
    row, outbox = bench.admit(greedy(stop_ids=(first,), min_len=len(PROMPT) + 1, min_tokens=1))
    token, flag = line(outbox)
    assert token != first and flag == Flag.LIVE
    known = [*PROMPT, token]
    following = continue_prompt(known, 1, VOCAB)[0]
    assert line(bench.run((row,))) == (following, Flag.STOP if following == first else Flag.LIVE)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_finite_logits_ends_alone(bench, value, temperature):
    rows = [bench.admit(request(tokens=(i, 3), temperature=temperature, top_k=1, key=i))[0] for i in range(3)]
    expected = [continue_prompt((i, 3), 3, VOCAB) for i in range(3)]
    bench.model.spoil = {1: value}
    outbox = bench.run(rows)
    bench.model.spoil = {}
    assert [line(outbox, i) for i in (0, 2)] == [(expected[i][1], Flag.LIVE) for i in (0, 2)]
    assert line(outbox, 1) == (NO_TOKEN, Flag.ERROR)
    outbox = bench.run(rows)
    assert [line(outbox, i) for i in (0, 2)] == [(expected[i][2], Flag.LIVE) for i in (0, 2)]
    assert line(outbox, 1) == (NO_TOKEN, Flag.INERT)
    assert bench.tables.history[rows[1], 3] == 0, "a failed row appends nothing"


def test_logits_that_are_in_part_minus_infinite_are_good(bench):
    row, _ = bench.admit(greedy())
    logits = torch.full((VOCAB,), -torch.inf)
    logits[11] = 0.0
    bench.model.spoil = {0: guard.device_tensor(logits)}
    assert line(bench.run((row,))) == (11, Flag.LIVE)


def test_an_inert_row_changes_nothing_but_the_null_page(bench):
    row, _ = bench.admit(greedy(max_len=5))
    other, _ = bench.admit(request(tokens=(9,), temperature=0.0))
    bench.run((row, other))
    bench.run((row,))
    state, history = bench.tables.state[row].clone(), bench.tables.history[1:].clone()
    assert state[ACTIVE] == 0
    cache = bench.program.cache.data
    cache[0] = 0
    before = cache.clone()
    for _ in range(3):
        assert line(bench.run((row,))) == (NO_TOKEN, Flag.INERT)
    assert torch.equal(bench.tables.state[row], state)
    assert torch.equal(bench.tables.history[1:], history)
    assert torch.equal(cache[1:], before[1:]) and not torch.equal(cache[0], before[0])


def test_chunks_that_do_not_sample_move_the_row_and_say_nothing(bench):
    asked = request(tokens=(1, 2, 3, 4, 5, 6, 7), temperature=0.0)
    row, _ = bench.admit(asked)
    late = bench.table.take(9, asked.tokens)
    bench.requests[late] = asked
    writes = [PageWrite(late, 0, 50), PageWrite(late, 1, 51)]
    outbox = bench.run((row,), (Chunk(late, 0, 3, False),), (Admission(late, 1, 9, 0, 7),), writes)
    assert outbox.rows.tolist() == [row]
    assert bench.tables.state[late, [ACTIVE, LENGTH, COMPUTED]].tolist() == [1, 7, 3]
    outbox = bench.run((row,), (Chunk(late, 3, 4, True),))
    assert outbox.rows.tolist() == [row, late]
    assert outbox.tokens[1] == continue_prompt(asked.tokens.tolist(), 1, VOCAB)[0]
    assert bench.tables.state[late, [ACTIVE, LENGTH, COMPUTED]].tolist() == [1, 8, 7]


def test_lines_carry_row_and_generation(bench):
    row, outbox = bench.admit(greedy(max_len=4))
    assert (outbox.step, outbox.rows.tolist(), outbox.generations.tolist()) == (1, [row], [1])
    bench.table.retire(row, 0)
    again, outbox = bench.admit(greedy(max_len=4))
    assert again == row
    assert (outbox.step, outbox.rows.tolist(), outbox.generations.tolist()) == (2, [row], [2])


def test_a_new_request_on_an_old_row_starts_anew(bench):
    row, _ = bench.admit(request(tokens=PROMPT, temperature=0.0, max_len=20, stop_ids=direct(1)))
    bench.table.retire(row, 0)
    again, outbox = bench.admit(request(tokens=(8, 9), temperature=0.0, max_len=20))
    assert again == row
    tokens = [line(outbox)[0]] + [line(bench.run((again,)))[0] for _ in range(4)]
    assert tokens == continue_prompt((8, 9), 5, VOCAB)


def test_seeded_rows_draw_the_same_tokens_in_any_batch():
    def tokens_of(company):
        bench = Bench(FlatModel(VOCAB, 32))
        rows = [bench.admit(asked)[0] for asked in company]
        outboxes = [bench.run(rows) for _ in range(6)]
        mine = rows[-1]
        return [int(outbox.tokens[outbox.rows.tolist().index(mine)]) for outbox in outboxes]

    me = request(tokens=PROMPT, seed=77, top_p=0.9, key=1)
    alone = tokens_of([me])
    assert len(set(alone)) > 1
    assert tokens_of([request(tokens=(1,), temperature=0.0), me]) == alone
    assert tokens_of([request(tokens=(1, 2), seed=5, top_k=3), request(tokens=(3,), seed=77), me]) == alone


class FlatModel(ChecksumModel):
    """Logits that leave the choice to the sampler."""

    def logits(self, hidden):
        return super().logits(hidden) * 0.1


def test_a_step_that_samples_nothing_has_an_empty_outbox(bench):
    asked = request(tokens=PROMPT, temperature=0.0)
    row = bench.table.take(1, asked.tokens)
    bench.requests[row] = asked
    admission = Admission(row, 1, 1, 0, len(PROMPT))
    outbox = bench.run((), (Chunk(row, 0, 2, False),), (admission,), (PageWrite(row, 0, 3),))
    assert outbox.step == 1 and len(outbox.rows) == len(outbox.tokens) == 0
