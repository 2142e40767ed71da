"""Whole steps of a small Qwen3 with all Triton kernels, beside the same steps in plain torch."""

from __future__ import annotations

import json

import pytest
import torch
from implementations import runs
from model.paging_driver import VOCAB, load
from step.step_harness import Bench, request
from tiny_models import tiny_config

from gapless.base.records import Admission, Chunk, Flag, PageWrite
from gapless.kernels import linear, plain
from gapless.kernels.layout import CUT_ID, CUT_VALUE
from gapless.step.graphs import bucket_key

SIZES = tiny_config(vocab_size=VOCAB)


@pytest.fixture
def benches(tmp_path, monkeypatch, implementation):
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    # Kernels read weights as they are on a GPU: not in the layout that torch packs for a CPU.
    monkeypatch.setattr(linear, "packs", lambda weight: False)
    made = []
    for kernels in (plain.KERNELS, implementation.kernels):
        model = load(tmp_path, load_format="dummy", dtype="float32")
        model.kernels = kernels
        made.append(Bench(model, size=8, kernels=kernels))
    return made


def both(benches, what):
    """The same step on either; its lines."""
    lines = []
    for bench in benches:
        outbox = what(bench)
        lines.append([bench.step, *(column.tolist() for column in outbox[1:])])
        assert outbox.step == bench.step
    assert lines[0] == lines[1]
    _, rows, _, given, _ = lines[0]
    same_tables(benches, [row for row, flag in zip(rows, given, strict=True) if flag != Flag.INERT])
    caches = [bench.program.cache.data[1:] for bench in benches]
    torch.testing.assert_close(*caches, rtol=1e-4, atol=1e-4)
    return lines[0]


def same_tables(benches, sampled):
    """Cuts end at the same tokens: at their logits, which are rounded otherwise, and mean nothing in an inert row."""
    ours, theirs = (bench.tables for bench in benches)
    for expected, got in zip(ours[1:], theirs[1:], strict=True):
        assert torch.equal(expected, got)
    assert torch.equal(ours.state[:, :CUT_VALUE], theirs.state[:, :CUT_VALUE])
    cuts = [tables.state[sampled] for tables in (ours, theirs)]
    assert torch.equal(*(cut[:, CUT_ID] for cut in cuts))
    values = [cut[:, CUT_VALUE].contiguous().view(torch.float32) for cut in cuts]
    torch.testing.assert_close(*values, rtol=1e-4, atol=1e-4)


@runs(on=("interpreter",))
def test_steps_are_those_of_plain_torch(implementation, benches):
    prompts = ((5, 6, 7), tuple(range(20, 33)), (9,))
    settings = ({"temperature": 0.0}, {"temperature": 0.9}, {"temperature": 0.8, "top_k": 5})
    rows = []
    for key, (tokens, setting) in enumerate(zip(prompts, settings, strict=True)):
        asked = request(tokens=tokens, key=key, seed=key << 33, max_len=len(tokens) + 4 + key, **setting)
        admitted = []
        both(benches, lambda bench, asked=asked, admitted=admitted: _admit(bench, asked, admitted))
        rows.append(admitted[0])
    flags = set()
    for _ in range(7):
        line = both(benches, lambda bench: bench.run(rows))
        flags |= set(line[3])
    assert flags == {Flag.LIVE, Flag.LENGTH, Flag.INERT}


@pytest.mark.seeds
@runs(on=("interpreter",))
def test_steps_with_rows_that_adjust_their_logits_are_those_of_plain_torch(implementation, benches):
    asks = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "logit_bias": {7: 2.0}}
    settings = (
        {"temperature": 0.0, **asks}, {"temperature": 0.8, "top_k": 5, **asks}, {"temperature": 0.9},
        {"temperature": 0.9, "top_p": 0.7, "allowed_token_ids": list(range(20)), "frequency_penalty": 1.0},
    )  # fmt: skip
    rows = []
    for key, setting in enumerate(settings):
        asked = request(tokens=range(3, 9 + key), key=key, seed=key << 33, max_len=20, **setting)
        asked = asked._replace(bad_words=((11,), (12, 7)) if key == 0 else ())
        admitted = []
        both(benches, lambda bench, asked=asked, admitted=admitted: _admit(bench, asked, admitted))
        rows.append(admitted[0])
    for _ in range(5):
        both(benches, lambda bench: bench.run(rows))
    for slot in (1, 2, 3):
        ours, theirs = (bench.program.adjustments for bench in benches)
        torch.testing.assert_close(ours.adjusted[0, slot], theirs.adjusted[0, slot], rtol=1e-4, atol=1e-4)
        assert torch.equal(ours.counts[slot], theirs.counts[slot])


def _admit(bench, asked, admitted):
    row, outbox = bench.admit(asked)
    admitted.append(row)
    return outbox


@runs(on=("interpreter",))
def test_chunks_beside_decode_rows_give_the_lines_of_plain_torch(implementation, benches):
    asked = request(tokens=tuple(range(3, 20)), max_len=30, temperature=0.0)
    first = request(tokens=(4, 5), key=1, max_len=30, temperature=0.7)
    admitted = []
    both(benches, lambda bench: _admit(bench, first, admitted))
    both(benches, lambda bench: _admit(bench, asked, admitted))
    long = admitted[-1]
    for bench in benches:
        # As after a preemption: the first five tokens have their KV, the others run again.
        bench.tables.state[long, 2], bench.tables.state[long, 3] = 17, 5
    both(benches, lambda bench: bench.run((admitted[0],), (Chunk(long, 5, 4, False),)))
    line = both(benches, lambda bench: bench.run((admitted[0],), (Chunk(long, 9, 8, True),)))
    assert len(line[1]) == 2


@pytest.mark.seeds
@runs(on=("interpreter",))
def test_a_step_filled_up_to_its_bucket_gives_the_same_lines(implementation, benches):
    """A decode row, a continued chunk and a new row, beside null rows, a null chunk, and tokens of no row."""
    settings = ({"temperature": 0.9}, {"temperature": 0.0}, {"temperature": 0.8})
    asked = [request(tokens=range(2, 11), key=key, seed=key, max_len=30, **one) for key, one in enumerate(settings)]
    key = bucket_key(3, 0, chunks=4, tokens=32, pages=4)
    lines = []
    for bench, wanted in zip(benches, (None, key), strict=True):
        decode, continued = (bench.admit(one)[0] for one in asked[:2])
        bench.tables.state[continued, 2], bench.tables.state[continued, 3] = 9, 4
        row = bench.table.take(2, asked[2].tokens)
        bench.requests[row] = asked[2]
        new = Admission(row, int(bench.table.generation[row]), 2, 0, 9)
        chunks = Chunk(continued, 4, 5, True), Chunk(row, 0, 9, True)
        writes = PageWrite(row, 0, 40), PageWrite(row, 1, 41)
        outbox = bench.run((decode,), chunks, (new,), writes, wanted)
        lines.append([line for line in zip(*(column.tolist() for column in outbox[1:]), strict=True) if line[0]])
        assert len(outbox.rows) == (7 if wanted else 3)
        assert set(outbox.flags[outbox.rows == 0].tolist()) <= {Flag.INERT}
        lines[-1].append(bench.run((decode, continued, row)).tokens.tolist())
    assert lines[0] == lines[1] and len(lines[0]) == 4
    for expected, got in zip(benches[0].tables, benches[1].tables, strict=True):
        assert torch.equal(expected, got)
