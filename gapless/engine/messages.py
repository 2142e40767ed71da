"""The typed messages between the process that talks and the process that computes, as msgpack.

A frame is one msgpack array of messages, so that a turn of either side costs one write. Arrays of numbers travel as
raw little-endian bytes whose lengths are checked. An unknown tag or an extra field is an error, never ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import msgspec
import numpy as np

from gapless.base.config import EngineConfig
from gapless.base.errors import (
    CheckpointError,
    ConfigError,
    DeviceError,
    EngineDeadError,
    EngineError,
    GaplessError,
    QueueFullError,
    RequestError,
    StalledError,
)
from gapless.base.params import MAX_LOGPROBS, SamplingParams
from gapless.base.records import Int64s, Request, StepLogprobs, StepTokens
from gapless.engine.seam import EngineInfo, Started, Stats
from gapless.engine.seam import View as SeamView
from gapless.loop.records import INTEGERS, ChunkRecord, StepRecord

MAX_REASON = 2_000
"""Characters of an error's text that cross the boundary."""


class Message(msgspec.Struct, tag=True, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Base of every message; the tag is the class name."""


class Boot(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The one JSON line on the child's stdin."""

    engine: EngineConfig


class Add(Message, frozen=True):
    """Front to child: serve this request. `params` holds what differs from the defaults."""

    key: int
    tokens: bytes
    params: dict[str, Any]
    seed: int
    stop_ids: tuple[int, ...]
    min_len: int
    max_len: int
    priority: int
    salt: str


class Abort(Message, frozen=True):
    """Front to child: end this request."""

    key: int


class Watch(Message, frozen=True):
    """Front to child: send Steps from now on, or no more."""

    on: bool


class Look(Message, frozen=True):
    """Front to child: answer with a View of the steps since `since`, ns."""

    number: int
    since: int


class Stop(Message, frozen=True):
    """Front to child: close the engine and exit."""


class Ready(Message, frozen=True):
    """Child to front: requests are welcome."""

    info: EngineInfo


class Began(Message, frozen=True):
    """Child to front: seam.Started."""

    key: int
    cached: int


class Logprobs(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """StepLogprobs; keys int64, positions and ranks int32, logprobs float32, and `width` int32 and float32 a line."""

    width: int
    keys: bytes
    positions: bytes
    logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top_logprobs: bytes


class Tokens(Message, frozen=True):
    """Child to front: seam's StepTokens; keys int64, tokens int32, flags int8."""

    step: int
    keys: bytes
    tokens: bytes
    flags: bytes
    logprobs: Logprobs | None = None


class Refused(Message, frozen=True):
    """Child to front: the core would not take this request."""

    key: int
    kind: str
    text: str
    param: str | None
    code: str | None


class Report(Message, frozen=True):
    """Child to front: the loop's numbers now."""

    stats: Stats


class Steps(Message, frozen=True):
    """Child to front: loop.records.StepRecord, in their order.

    `rows` is [steps, 20] int64: the 19 integers of a record, and which of `groups` its decode rows are. `groups` are
    the sizes of those groups and `keys` their members, one group after the other. `chunks` is [n, 4] int64: place of
    the step in `rows`, key, start, size.
    """

    rows: bytes
    groups: bytes
    keys: bytes
    chunks: bytes


class View(Message, frozen=True):
    """Child to front: seam.View."""

    number: int
    steps: Steps
    pages: bytes


class Died(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The child's last words, as one JSON line on its stdout, where an empty line is a heartbeat."""

    kind: str
    text: str


ToChild = Add | Abort | Watch | Look | Stop
FromChild = Ready | Began | Tokens | Refused | Report | Steps | View

encode = msgspec.msgpack.Encoder().encode
decode_to_child = msgspec.msgpack.Decoder(list[ToChild]).decode
decode_from_child = msgspec.msgpack.Decoder(list[FromChild]).decode

_KINDS: dict[str, type[GaplessError]] = {
    kind.__name__: kind
    for kind in (
        CheckpointError,
        ConfigError,
        DeviceError,
        EngineDeadError,
        EngineError,
        QueueFullError,
        RequestError,
        StalledError,
    )
}
_LOGPROB_TYPES = ("<i8", "<i4", "<f4", "<i4", "<i4", "<f4")
_DEFAULTS = {f.name: f.default for f in fields(SamplingParams)}


def pack_request(request: Request) -> Add:
    params = {}
    for name, default in _DEFAULTS.items():
        value = getattr(request.params, name)
        if value != default and value != ():
            params[name] = value
    tokens = np.ascontiguousarray(request.tokens, dtype="<i4").tobytes()
    return Add(
        request.key,
        tokens,
        params,
        request.seed,
        request.stop_ids,
        request.min_len,
        request.max_len,
        request.priority,
        request.salt,
    )


def unpack_request(add: Add) -> Request:
    """The request as it was before pack_request; its parameters are checked again."""
    return Request(
        add.key,
        np.frombuffer(add.tokens, dtype="<i4").astype(np.int32, copy=False),
        SamplingParams.from_dict(add.params),
        add.seed,
        add.stop_ids,
        add.min_len,
        add.max_len,
        add.priority,
        add.salt,
    )


def pack_tokens(item: StepTokens) -> Tokens:
    keys, tokens, flags = (
        np.ascontiguousarray(column, dtype=dtype).tobytes()
        for column, dtype in ((item.keys, "<i8"), (item.tokens, "<i4"), (item.flags, "i1"))
    )
    return Tokens(item.step, keys, tokens, flags, None if item.logprobs is None else _pack_logprobs(item.logprobs))


def _pack_logprobs(item: StepLogprobs) -> Logprobs:
    columns = zip(item, _LOGPROB_TYPES, strict=True)
    packed = (np.ascontiguousarray(column, dtype=dtype).tobytes() for column, dtype in columns)
    return Logprobs(item.top_ids.shape[1], *packed)


def unpack_tokens(message: Tokens) -> StepTokens:
    """Raises ValueError when the three columns do not agree on the number of rows."""
    rows = len(message.flags)
    if len(message.keys) != 8 * rows or len(message.tokens) != 4 * rows:
        raise ValueError(f"columns of step {message.step} differ in length")
    return StepTokens(
        message.step,
        np.frombuffer(message.keys, dtype="<i8").astype(np.int64, copy=False),
        np.frombuffer(message.tokens, dtype="<i4").astype(np.int32, copy=False),
        np.frombuffer(message.flags, dtype="i1").astype(np.int32),
        None if message.logprobs is None else _unpack_logprobs(message.logprobs, message.step),
    )


def _unpack_logprobs(message: Logprobs, step: int) -> StepLogprobs:
    lines, width = len(message.ranks) // 4, message.width
    columns = (
        *(message.keys, message.positions, message.logprobs, message.ranks),
        *(message.top_ids, message.top_logprobs),
    )
    sizes = [len(column) for column in columns]
    if not 0 <= width <= MAX_LOGPROBS or sizes != [lines * size for size in (8, 4, 4, 4, 4 * width, 4 * width)]:
        raise ValueError(f"columns of log-probabilities of step {step} differ in length")
    keys, positions, logprobs, ranks, top_ids, top_logprobs = (
        np.frombuffer(column, dtype=dtype).astype(dtype[1:], copy=False)
        for column, dtype in zip(columns, _LOGPROB_TYPES, strict=True)
    )
    top_ids, top_logprobs = top_ids.reshape(lines, width), top_logprobs.reshape(lines, width)
    return StepLogprobs(keys, positions, logprobs, ranks, top_ids, top_logprobs)


def pack_steps(records: Sequence[StepRecord]) -> Steps:
    groups: list[Int64s] = []
    rows, chunks = [], []
    for place, record in enumerate(records):
        if not groups or record.decode is not groups[-1]:
            groups.append(record.decode)
        rows.append((*record[:INTEGERS], len(groups) - 1))
        chunks += [(place, *chunk) for chunk in record.chunks]
    sizes = [len(group) for group in groups]
    keys = np.concatenate(groups) if groups else ()
    return Steps(*(np.array(column, "<i8").tobytes() for column in (rows, sizes, keys, chunks)))


def unpack_steps(message: Steps) -> list[StepRecord]:
    """Raises ValueError when the parts do not fit together."""
    rows = _table(message.rows, INTEGERS + 1)
    sizes, keys = _table(message.groups, 1)[:, 0], _table(message.keys, 1)[:, 0]
    chunks = _table(message.chunks, 4)
    group, place = rows[:, -1], chunks[:, 0]
    fits = (sizes >= 0).all() and sizes.sum() == len(keys) and (rows >= 0).all()
    fits = fits and (group < len(sizes)).all() and (place >= 0).all() and (place < len(rows)).all()
    if not fits:
        raise ValueError("the parts of a message of steps do not fit together")
    groups = np.split(keys, np.cumsum(sizes)[:-1]) if len(sizes) else []
    of_step: dict[int, list[ChunkRecord]] = {}
    for at, *chunk in chunks.tolist():
        of_step.setdefault(at, []).append(ChunkRecord(*chunk))
    return [
        StepRecord._make((*row[:-3], bool(row[-3]), bool(row[-2]), groups[row[-1]], tuple(of_step.get(at, ()))))
        for at, row in enumerate(rows.tolist())
    ]


def _table(data: bytes, width: int) -> Int64s:
    """[n, width] int64; ValueError when the bytes are no whole number of lines."""
    return np.frombuffer(data, dtype="<i8").astype(np.int64, copy=False).reshape(-1, width)


def pack_view(view: SeamView) -> View:
    return View(view.number, pack_steps(view.steps), view.pages)


def unpack_view(message: View) -> SeamView:
    return SeamView(message.number, unpack_steps(message.steps), message.pages)


def pack_refusal(key: int, error: Exception) -> Refused:
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    return Refused(key, type(error).__name__, str(error)[:MAX_REASON], param, code)


def unpack_refusal(message: Refused) -> Exception:
    if message.kind == RequestError.__name__:
        return RequestError(message.text, message.param, message.code)
    return revive(message.kind, message.text)


def revive(kind: str, text: str) -> GaplessError:
    """An error of our tree from its class name and text; EngineDeadError for a class that is not in it."""
    return _KINDS.get(kind, EngineDeadError)(text)


def last_words(error: BaseException) -> Died:
    """What to say of an error that ends the child: its own text when it is ours, and the first cause behind it."""
    text = str(error) if isinstance(error, GaplessError) else f"{type(error).__name__}: {error}"
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if cause is not error and str(cause) not in text:
        text = f"{text} (cause: {type(cause).__name__}: {cause})"
    return Died(type(error).__name__, text[:MAX_REASON])


def unpack_started(message: Began) -> Started:
    return Started(message.key, message.cached)
