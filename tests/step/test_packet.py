"""The packet: what the host writes is what the tables hold, whatever lay in the slot before."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from step_harness import request, rows_in

from gapless.base.params import MAX_STOP_IDS, SamplingParams, Words, columns, param, registry
from gapless.base.records import NO_TOKEN, Admission, Chunk, PageWrite, StepPlan
from gapless.kernels import layout
from gapless.kernels.layout import (
    ACTIVE,
    COMPUTED,
    CUT_VALUE,
    GENERATION,
    HEADER_WORDS,
    KEEP_ID,
    KEEP_VALUE,
    LENGTH,
    MIN_LEN,
    MIN_P,
    PARAM_OF,
    SEED_HIGH,
    SEED_LOW,
    STOP_IDS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)  # fmt: skip
from gapless.kernels.tables import Tables
from gapless.memory.ledger import Ledger
from gapless.memory.rows import RowTable
from gapless.memory.slots import NO_SLOT
from gapless.step.inputs import apply_admissions, apply_pages
from gapless.step.listing import Lanes
from gapless.step.packet import Packer, Packet, max_words, write_params

ROWS, MAX_LEN, MAX_PAGES, TOKENS = 6, 24, 6, 40


def known_tokens():
    table = RowTable(ROWS, MAX_LEN, Ledger())
    table.tokens[:] = np.random.default_rng(0).integers(0, 2**31 - 1, table.tokens.shape)
    return table


@st.composite
def plans(draw):
    """Plans as the planner makes them: decode rows, then chunks that sample, then the others."""
    rows = draw(st.permutations(range(1, ROWS + 1)))
    rows = rows[: draw(st.integers(1, ROWS))]
    decoding = draw(st.integers(0, len(rows)))
    chunks = []
    for row in rows[decoding:]:
        start = draw(st.integers(0, MAX_LEN - 2))
        chunks.append(Chunk(row, start, draw(st.integers(1, min(6, MAX_LEN - start))), draw(st.booleans())))
    chunks.sort(key=lambda chunk: not chunk.last)
    entries = draw(st.lists(st.tuples(st.sampled_from(rows), st.integers(0, MAX_PAGES - 1)), unique=True, max_size=9))
    pages = tuple(PageWrite(row, entry, draw(st.integers(0, 2**31 - 1))) for row, entry in entries)
    admitted = [chunk for chunk in chunks if draw(st.booleans())]
    admissions = tuple(
        Admission(c.row, draw(st.integers(1, 2**31 - 1)), 7, c.start, draw(st.integers(1, 2**31 - 1))) for c in admitted
    )
    step = draw(st.integers(1, 2**31 - 1))
    return StepPlan(step, tuple(rows[:decoding]), tuple(chunks), admissions, pages, MAX_LEN)


@st.composite
def requests(draw):
    return request(
        temperature=draw(st.floats(0, 100)), top_p=draw(st.floats(1e-6, 1)), top_k=draw(st.integers(0, 2**31 - 1)),
        min_p=draw(st.floats(0, 1)), seed=draw(st.integers(-(2**63), 2**63 - 1)),
        stop_ids=draw(st.lists(st.integers(0, 2**31 - 1), max_size=MAX_STOP_IDS)),
        min_len=draw(st.integers(0, 2**31 - 1)), max_len=draw(st.integers(2, 2**31 - 1)),
    )  # fmt: skip


def packed(packer, plan, asked):
    """The packet of a plan in a slot full of rubbish, as the device sees it."""
    words = np.full(max_words(ROWS, MAX_PAGES + 2 * ROWS, TOKENS), -77, np.int32)
    shape = packer.shape(plan)
    assert shape.words <= len(words)
    packer.write(plan, shape, asked, words, 3)
    assert words[:HEADER_WORDS].tolist() == [plan.step, 3]
    assert (words[shape.words :] == -77).all(), "written behind the packet"
    return Packet.of(torch.from_numpy(words), shape)


@settings(max_examples=120, deadline=None, database=None, derandomize=True)
@given(plans(), st.data())
def test_a_plan_arrives_as_it_was_sent(plan, data):
    table = known_tokens()
    asked = [data.draw(requests()) for _ in plan.admissions]
    packet = packed(Packer(table, MAX_PAGES), plan, asked)
    assert packet.rows.tolist() == [*plan.decode, *(chunk.row for chunk in plan.chunks)]
    if plan.chunks:
        assert packet.sizes.tolist() == [1] * len(plan.decode) + [chunk.size for chunk in plan.chunks]
    else:
        assert packet.sizes.tolist() == []
    prompt = [table.tokens[chunk.row, chunk.start + i] for chunk in plan.chunks for i in range(chunk.size)]
    assert packet.tokens.tolist() == prompt
    check_tables(packet, plan, asked)


def check_tables(packet, plan, asked):
    tables = Tables.new(ROWS, MAX_LEN, MAX_PAGES, torch.device("cpu"))
    for tensor in tables:
        tensor.fill_(-5)
    apply_admissions(packet, tables)
    apply_pages(packet.pages, tables)
    pages = {(write.row, write.entry): write.page for write in plan.pages}
    for row in range(ROWS + 1):
        for entry in range(MAX_PAGES):
            assert tables.pages[row, entry] == pages.get((row, entry), -5)
    admitted = {admission.row: admission for admission in plan.admissions}
    for row in range(ROWS + 1):
        state = tables.state[row]
        if row not in admitted:
            assert (state == -5).all() and (tables.params[row] == -5).all()
            continue
        admission = admitted[row]
        assert state[[GENERATION, ACTIVE]].tolist() == [admission.generation, 1]
        assert state[[LENGTH, COMPUTED]].tolist() == [admission.length, admission.start]
        cuts = state[CUT_VALUE:].tolist()
        assert cuts == [KEEP_VALUE, KEEP_ID] * (len(cuts) // 2) and len(cuts) >= 4
    for admission, one in zip(plan.admissions, asked, strict=True):
        check_params(tables.params[admission.row], one)
    assert (tables.history == -5).all()


def check_params(found, asked):
    reals, sampling = found.view(torch.float32), asked.params
    assert found[[MIN_LEN, layout.MAX_LEN, TOP_K]].tolist() == [asked.min_len, asked.max_len, sampling.top_k]
    expected = torch.tensor([sampling.temperature, sampling.top_p, sampling.min_p])
    assert torch.equal(reals[[TEMPERATURE, TOP_P, MIN_P]], expected)
    assert found[SEED_LOW : SEED_HIGH + 1].clone().view(torch.int64).item() == asked.seed
    stops = found[STOP_IDS : layout.FIRST_PARAM].tolist()
    assert stops == [*asked.stop_ids, *[NO_TOKEN] * (MAX_STOP_IDS - len(asked.stop_ids))]


def test_a_parameter_added_to_the_registry_reaches_its_column():
    @dataclass(frozen=True)
    class Settings(SamplingParams):
        penalty: float = param(0.0, "for this test", low=-2.0, high=2.0, words=Words.REAL)
        most: int = param(0, "for this test", low=0, high=9, words=Words.INT)
        bias: int | None = param(None, "for this test", words=Words.SLOT)

    entries = registry(Settings)
    places, added = columns(entries, layout.FIRST_PARAM), {"penalty", "most", "bias"}
    assert {name: places[name] for name in PARAM_OF} == PARAM_OF and set(places) - set(PARAM_OF) == added
    asked = Settings(penalty=1.5, most=7, top_k=3, bias=0)
    assert asked.leases == ("bias",) and not Settings().leases
    line = np.full(
        layout.FIRST_PARAM + len(places) + 1, -5, np.int32
    )  # the seed takes two words, and the request writes it
    write_params(line, entries, places, Settings(), {})
    assert line[places["bias"]] == NO_SLOT
    with pytest.raises(KeyError):  # a row never runs without the slot that it asks for
        write_params(line, entries, places, asked, {})
    write_params(line, entries, places, asked, {"bias": 4})
    assert line[places["bias"]] == 4
    assert line.view(np.float32)[places["penalty"]] == 1.5 and line[places["most"]] == 7 and line[TOP_K] == 3
    assert line[[MIN_LEN, layout.MAX_LEN, SEED_LOW, SEED_HIGH]].tolist() == [-5] * 4


def test_columns_in_cpp_are_those_of_the_layout():
    """C++ says them once more, by the same names."""
    glue, adjust = ((Path(layout.__file__).parent / "native" / name).read_text() for name in ("glue.h", "adjust.cpp"))
    values = {f"{name.removesuffix('_penalty').upper()}": at for name, at in PARAM_OF.items() if "penalty" in name}
    values |= {"FIRST_PENALTY": values["REPETITION"], "PENALTY_END": 1 + max(values.values())}
    for kind, source in (("State", glue), ("Param", glue), ("Wish", glue), ("Penalty", adjust)):
        found, value = re.search(rf"enum {kind} {{([^}}]*)}};", source), -1
        assert found is not None
        for name, text in re.findall(r"(\w+)(?: = ([^,]+))?", found[1]):
            value = eval(text, {**vars(layout), **values}) if text else value + 1
            assert value == (values[name] if name in values else getattr(layout, name))
    assert f"WISHES = ARGUMENTS + {layout.WISHES - layout.ARGUMENTS};" in glue


def test_the_rows_of_an_unchanged_decode_set_are_written_every_time():
    packer = Packer(known_tokens(), MAX_PAGES)
    decode = (3, 1, 4)
    for step in (1, 2):
        plan = StepPlan(step, decode, (), (), (), MAX_LEN)
        assert packed(packer, plan, []).rows.tolist() == [3, 1, 4]
    other = StepPlan(3, (3, 4), (), (), (), MAX_LEN)
    assert packed(packer, other, []).rows.tolist() == [3, 4]


def test_a_steady_step_is_the_header_and_the_rows():
    packer = Packer(known_tokens(), MAX_PAGES)
    assert packer.shape(StepPlan(1, (1, 2, 3), (), (), (), MAX_LEN)).words == HEADER_WORDS + 3


def test_the_largest_plan_fits():
    table = known_tokens()
    packer = Packer(table, MAX_PAGES)
    share = TOKENS // ROWS
    sizes = [share + (TOKENS - share * ROWS) * (row == 1) for row in range(1, ROWS + 1)]
    chunks = [Chunk(row, 0, size, True) for row, size in enumerate(sizes, 1)]
    admissions = [Admission(row, 1, row, 0, 9) for row in range(1, ROWS + 1)]
    writes = [PageWrite(row, entry, 1) for row in range(1, ROWS + 1) for entry in range(MAX_PAGES)]
    plan = StepPlan(1, (), tuple(chunks), tuple(admissions), tuple(writes[: MAX_PAGES + 2 * ROWS]), 0)
    lanes = Lanes(table)
    for row in range(1, ROWS + 1):  # prompts that go on behind their chunks: every position is scored, and every row
        lanes.admit(row, request(tokens=range(TOKENS), logprobs=20, prompt_logprobs=0))
    lists = lanes.of(plan)
    assert (len(rows_in(lists, "score")), lists.prompts, lists.width) == (ROWS, TOKENS, 20)
    assert packer.shape(plan, lists.prompts).words == max_words(ROWS, MAX_PAGES + 2 * ROWS, TOKENS)


def test_more_stop_ids_than_the_table_holds_are_an_assertion():
    plan = StepPlan(1, (), (Chunk(1, 0, 1, True),), (Admission(1, 1, 1, 0, 1),), (), 0)
    with pytest.raises(AssertionError):
        packed(Packer(known_tokens(), MAX_PAGES), plan, [request(stop_ids=range(MAX_STOP_IDS + 1))])


def test_each_page_group_has_its_part_of_a_row_s_line():
    packer = Packer(known_tokens(), MAX_PAGES, groups=3)
    writes = (PageWrite(2, 1, 7), PageWrite(2, 1, 8, 1), PageWrite(1, 0, 9, 2))
    packet = packed(packer, StepPlan(1, (1, 2), (), (), writes, MAX_LEN), [])
    line = 3 * MAX_PAGES
    assert packet.pages.tolist() == [[2 * line + 1, 7], [2 * line + MAX_PAGES + 1, 8], [line + 2 * MAX_PAGES, 9]]
