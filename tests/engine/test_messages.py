"""The wire between the two processes: what goes in comes out, and what does not follow the protocol is refused."""

from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest

from gapless.base.errors import CheckpointError, DeviceError, EngineDeadError, QueueFullError, RequestError
from gapless.base.params import SamplingParams
from gapless.base.records import PageChange, PageEvent, Request, StepLogprobs, StepTokens
from gapless.engine import messages as m
from gapless.engine.seam import AdapterChange, EngineInfo
from gapless.engine.stats import Stats
from gapless.loop.records import COLUMNS, STEP, ChunkRecord, StepRecord, StepTable
from gapless.offload.lower import LowerCounts
from gapless.plan.queue import QueueCounts

PARAMS = SamplingParams(
    *(3, 0.5, 0.9, 7, 0.1, -5),
    stop=["a", "b"],
    stop_token_ids=[1, 2],
    include_stop_str_in_output=True,
    ignore_eos=True,
    max_tokens=None,
    min_tokens=4,
    skip_special_tokens=False,
    speculate=False,
    detokenize=False,
    logprobs=0,
    prompt_logprobs=20,
)


def request(params=PARAMS, tokens=(1, 2, 2**31 - 1)):
    return Request(
        2**62 + 1, np.array(tokens, np.int32), params, 2**63 - 1, (5, 6), 10, 20, priority=-3, salt="täna:nt"
    )


@pytest.mark.parametrize("params", [SamplingParams(), PARAMS], ids=["defaults", "everything"])
def test_a_request_survives_its_encoding(params):
    before = request(params)
    (message,) = m.decode_to_core(m.encode([m.pack_request(before)]))
    after = m.unpack_request(message)
    assert after.tokens.dtype == np.int32
    assert after.tokens.tolist() == before.tokens.tolist()
    assert after._replace(tokens=before.tokens) == before


def test_default_parameters_cost_no_bytes():
    assert m.pack_request(request(SamplingParams())).params == {}


@pytest.mark.parametrize("rows", [0, 1, 256])
def test_tokens_of_a_step_survive_their_encoding(rows):
    before = StepTokens(
        7,
        np.arange(rows, dtype=np.int64) + 2**40,
        np.arange(rows, dtype=np.int32),
        (np.arange(rows) % 5).astype(np.int32),
    )
    (message,) = m.decode_from_core(m.encode([m.Tokens(before)]))
    after = message.settled
    assert after.step == 7
    for column in ("keys", "tokens", "flags"):
        assert getattr(after, column).tolist() == getattr(before, column).tolist()
        assert getattr(after, column).dtype == getattr(before, column).dtype


@pytest.mark.parametrize("error", [None, RequestError("no such file", "lora_path", "x")])
def test_a_change_of_adapters_and_its_answer_survive_their_encoding(error):
    change = m.ChangeAdapter(3, AdapterChange("tidy", "a/b", in_place=True))
    assert m.decode_to_core(m.encode([change])) == [change]
    (answer,) = m.decode_from_core(m.encode([m.Changed(3, ("a", "b"), error)]))
    assert (answer.number, answer.names) == (3, ("a", "b"))
    assert type(answer.error) is type(error) and str(answer.error) == str(error)
    assert getattr(answer.error, "param", None) == getattr(error, "param", None)


def scored(lines, width):
    numbers = np.arange(lines * width, dtype=np.float32).reshape(lines, width)
    return StepLogprobs(
        np.arange(lines, dtype=np.int64) + 2**40,
        np.arange(lines, dtype=np.int32),
        np.full(lines, -np.inf, np.float32),
        np.arange(lines, dtype=np.int32) + 1,
        numbers.astype(np.int32) - 1,
        -numbers / 3,
    )


@pytest.mark.parametrize("lines", [0, 1, 300])
@pytest.mark.parametrize("width", [0, 1, 20])
def test_log_probabilities_survive_their_encoding(lines, width):
    no_rows = np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int32)
    before = StepTokens(7, *no_rows, scored(lines, width))
    (message,) = m.decode_from_core(m.encode([m.Tokens(before)]))
    after = message.settled
    for name, column in before.logprobs._asdict().items():
        got = getattr(after.logprobs, name)
        assert (got.dtype, got.shape, got.tolist()) == (column.dtype, column.shape, column.tolist())


def sent(message):
    """The message as it comes out of the wire."""
    (got,) = m.decode_from_core(m.encode([message]))
    return got


def frame_of(settled):
    """What the wire would carry of a Tokens message that cannot be made."""
    return m.encode([("Tokens", settled)])


def test_columns_that_differ_in_length_are_refused():
    one, two = np.zeros(1, np.int32), np.zeros(2, np.int32)
    settled = StepTokens(1, one.astype(np.int64), one, two)
    with pytest.raises(ValueError, match="columns of step 1 differ in length"):
        m.decode_from_core(frame_of(settled))
    with pytest.raises(ValueError, match="columns of step 1 differ in length"):
        m.Tokens(settled)


@pytest.mark.parametrize(
    "parts",
    [
        ("l", b"1234", ()),
        ("l", b"123456789", ()),
        ("i", b"1234", ()),
        ("l", b"12345678" * 2, ()),
        ("l", b"12345678", (1, 1)),
        ("l", b"12345678", (2,)),
        ("l", b"12345678", "1"),
        ("l", "12345678", ()),
        ("O", b"12345678", ()),
        ("l", b"12345678"),
        b"12345678",
        None,
    ],
)
def test_an_array_has_the_dtype_and_the_size_that_it_says(parts):
    good = ("i", b"1234", ())
    assert sent(m.Tokens(StepTokens(1, *[np.zeros(1, kind) for kind in (np.int64, np.int32, np.int32)])))
    with pytest.raises(msgspec.ValidationError):
        m.decode_from_core(frame_of((1, parts, good, good, None)))


@pytest.mark.parametrize("name", ["keys", "positions", "logprobs", "ranks", "top_ids", "top_logprobs"])
@pytest.mark.parametrize("change", ["empty", "short", "deep", "wide"])
def test_columns_of_log_probabilities_must_agree(name, change):
    good = StepTokens(1, np.empty(0, np.int64), *(np.empty(0, np.int32),) * 2, scored(2, 2))
    assert sent(m.Tokens(good)).settled.logprobs.top_ids.shape == (2, 2)
    column = getattr(good.logprobs, name)
    changed = {"empty": column[:0], "short": column[:1], "deep": column[None], "wide": np.repeat(column, 2, axis=-1)}
    bad = good._replace(logprobs=good.logprobs._replace(**{name: changed[change]}))
    with pytest.raises(ValueError, match="log-probabilities of step 1 differ in length"):
        m.decode_from_core(frame_of(bad))


def test_log_probabilities_are_no_wider_than_any_request_may_ask():
    with pytest.raises(ValueError, match="log-probabilities of step 1 differ in length"):
        m.Tokens(StepTokens(1, np.empty(0, np.int64), *(np.empty(0, np.int32),) * 2, scored(2, 21)))


def test_tokens_without_log_probabilities_cost_next_to_no_bytes():
    no_rows = np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int32)
    assert m.encode([m.Tokens(StepTokens(7, *no_rows))]).endswith(b"\xc0")


def steps(rows=4, ranks=True):
    """Records that share their decode keys as the loop's do, and chunks on some."""
    first, second = np.arange(3, dtype=np.int64) + 2**40, np.empty(0, np.int64)
    groups = [first, first, second, first, first]
    chunks = [(), (ChunkRecord(9, 0, 5), ChunkRecord(2**62, 4, 1)), (), (), (ChunkRecord(7, 1, 2),)]
    numbers = [{name: 2**53 + 100 * row + place for place, name in enumerate(COLUMNS)} for row in range(5)]
    flags = [{"waited": n % 2 == 0, "missed": n == 3, "chained": n == 1, "in_vain": n == 2} for n in range(5)]
    more = [{"decode": groups[n], "chunks": chunks[n], "waits": (n, 2**53) if ranks else ()} for n in range(5)]
    made = [StepRecord(**{**numbers[n], **flags[n]}, **more[n]) for n in range(5)]
    return StepTable.of(made[:rows])


def same(before, after):
    assert len(before) == len(after)
    for old, new in zip(before, after, strict=True):
        assert new._replace(decode=None) == old._replace(decode=None)
        assert new.decode.tolist() == old.decode.tolist() and new.decode.dtype == np.int64
        assert {type(new.waited), type(new.missed), type(new.chained), type(new.in_vain)} == {bool}


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_step_records_survive_their_encoding(rows):
    before = steps(rows)
    (message,) = m.decode_from_core(m.encode([m.pack_steps(before)]))
    after = m.unpack_steps(message)
    same(before, after)
    if rows == 5:
        assert after[0].decode is not after[3].decode and sum(len(keys) for _, keys in message.runs) == 6
    assert len(message.waits) == rows and not m.pack_steps(steps(rows, ranks=False)).waits
    same(steps(rows, ranks=False), m.unpack_steps(m.pack_steps(steps(rows, ranks=False))))
    view = sent(m.View(3, message, b"fcox"))
    assert (view.number, view.pages) == (3, b"fcox")
    same(before, m.unpack_steps(view.steps))


def refused_steps(**parts):
    with pytest.raises(ValueError, match=r"fit|buffer"):
        m.unpack_steps(msgspec.structs.replace(m.pack_steps(steps(5)), **parts))


def test_parts_of_steps_must_fit():
    whole = m.pack_steps(steps(5))
    rows, runs, chunks = whole.rows, whole.runs, whole.chunks
    assert [count for count, _ in runs] == [2, 1, 2]
    for short in (rows[: -STEP.itemsize], rows[:-8], rows[:-1], b""):
        refused_steps(rows=short)
    negative = np.frombuffer(rows, "<i8").copy()
    negative[len(COLUMNS) - 1] = -1
    refused_steps(rows=negative.tobytes())
    for wrong in (runs[1:], (*runs, runs[0]), ()):
        refused_steps(runs=wrong)
    keys = runs[0][1]
    for count in (-1, 0, 1, 2**40):
        refused_steps(runs=((count, keys), *runs[1:]))
    refused_steps(runs=((-1, keys), (4, keys), *runs[2:]))
    refused_steps(runs=((2, keys[None]), *runs[1:]))
    for wrong in (chunks[1:], (*chunks, ()), ()):
        refused_steps(chunks=wrong)
    refused_steps(waits=whole.waits[1:])


def page_events():
    tokens = np.arange(8, dtype=np.int32)
    stored = PageEvent(PageChange.STORED, 1, (b"a" * 32, b"b" * 32), b"p" * 32, tokens, "t:s", "lora", 6)
    return (PageEvent(PageChange.CLEARED), stored, PageEvent(PageChange.REMOVED, 0, (b"c" * 32,)))


def test_page_events_survive_their_encoding():
    before = page_events()
    assert m.decode_to_core(m.encode([m.SendPageEvents()])) == [m.SendPageEvents()]
    (message,) = m.decode_from_core(m.encode([m.PageEventList(before)]))
    assert len(message.events) == len(before)
    for one, other in zip(message.events, before, strict=True):
        assert one.tokens.dtype == np.int32 and one.tokens.tolist() == other.tokens.tolist()
        assert one._replace(tokens=other.tokens) == other


@pytest.mark.parametrize("change", [{"digests": ()}, {"digests": (b"a",) * 3}, {"tokens": np.zeros((2, 4), np.int32)}])
def test_page_events_whose_tokens_fill_no_pages_are_refused(change):
    stored = page_events()[1]._replace(**change)
    with pytest.raises(ValueError, match="8 tokens on"):
        m.PageEventList((stored,))


def test_one_frame_holds_a_turn():
    info = EngineInfo("m", "cpu", "float32", 10, 20, 3, 4, 5, 6, "auto", 7, (("weights", 0.5),))
    frame = [
        m.Ready(info),
        m.Admitted(1, 2),
        m.StatsReport(Stats(queue=QueueCounts(running=3), lower=(LowerCounts(hits=2),))),
    ]
    assert m.decode_from_core(m.encode(frame)) == frame


@pytest.mark.parametrize(
    "frame",
    [
        [["Launch", 1]],
        [["Abort", 1, 2]],
        [["Abort"]],
        [["Abort", "1"]],
        [["Admitted", [1, 2]]],
        {"Abort": 1},
        ["Stop"],
    ],
    ids=["tag", "extra", "missing", "type", "direction", "object", "bare"],
)
def test_other_shapes_are_refused(frame):
    with pytest.raises(msgspec.ValidationError):
        m.decode_to_core(msgspec.msgpack.encode(frame))


def test_an_unknown_parameter_is_refused():
    add = m.Add(1, np.empty(0, np.int32), {"temperature": 0.0, "no_such": 1}, 0, (), 0, 1, 0, "", ())
    with pytest.raises(RequestError, match="no_such"):
        m.unpack_request(add)


def test_refusals_keep_class_and_field():
    refused = sent(m.Refused(1, RequestError("too long", "prompt", "context_length_exceeded")))
    error = refused.error
    assert (refused.key, type(error), str(error)) == (1, RequestError, "too long")
    assert (error.param, error.code) == ("prompt", "context_length_exceeded")
    assert type(sent(m.Refused(1, QueueFullError("full"))).error) is QueueFullError
    assert len(str(sent(m.Refused(1, RequestError("x" * 10_000))).error)) == m.MAX_REASON


@pytest.mark.parametrize("parts", [("RequestError", "t", None), ("RequestError", "t", 1, None), "RequestError", None])
def test_refusals_of_another_shape_are_refused(parts):
    with pytest.raises(ValueError, match=r"Expected"):
        m.decode_from_core(m.encode([("Refused", 1, parts)]))


def test_an_object_of_another_class_is_part_of_no_message():
    with pytest.raises(NotImplementedError, match="OSError"):
        m.encode([m.Refused(1, OSError("disk on fire"))])


def test_last_words_name_the_first_cause():
    try:
        try:
            raise OSError("disk on fire")
        except OSError as inner:
            raise DeviceError("step 3 failed") from inner
    except DeviceError as error:
        died = m.last_words(error)
    assert died == m.Died("DeviceError", "step 3 failed (cause: OSError: disk on fire)")
    assert m.last_words(KeyError("x")).text == "KeyError: 'x'"
    assert len(m.last_words(CheckpointError("x" * 10_000)).text) == m.MAX_REASON


def test_foreign_classes_come_back_as_a_dead_engine():
    assert type(m.revive("CheckpointError", "t")) is CheckpointError
    assert type(m.revive("SystemExit", "t")) is EngineDeadError


@pytest.mark.parametrize("shape", [Any, tuple[Any, ...], TypeVar("Shape")])
def test_dtypes_are_read_from_every_form_of_an_arrays_annotation(shape):
    """numpy 2.5 spells the shape in another way than earlier releases."""
    for number in (np.int32, np.int64, np.float32):
        assert m.array_dtype(np.ndarray[shape, np.dtype[number]]) == number
