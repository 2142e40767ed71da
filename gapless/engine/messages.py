"""The messages between front and core. A thread gets the objects, a process the same as typed msgpack.

A frame is one msgpack array of messages, so that a turn of either side costs one write. Numeric arrays travel as raw
bytes with a checked dtype and, beyond one dimension, shape. An unknown tag or an extra field is an error, never
ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from itertools import groupby
from typing import Any, get_args

import msgspec
import numpy as np

from gapless.base import errors
from gapless.base.errors import EngineDeadError, GaplessError, RequestError
from gapless.base.params import MAX_LOGPROBS, SamplingParams
from gapless.base.progress import Phase
from gapless.base.records import (
    NO_TRANSFER,
    Int32s,
    Int64s,
    KVTransfer,
    PageEvent,
    Request,
    StepLogprobs,
    StepTokens,
)
from gapless.engine.seam import AdapterChange, EngineInfo, OperatorOrder
from gapless.engine.stats import Stats
from gapless.loop.records import STEP, ChunkRecord, StepTable

MAX_REASON = 2_000
"""Most characters of an error's text that cross the boundary."""


class Message(msgspec.Struct, tag=True, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Base of every message between front and core; the tag is the class name."""


class Add(Message, frozen=True):
    """Front to core: serve this request. Fields as in Request, except that `params` has only values other than
    defaults, and the core makes the matcher."""

    key: int
    tokens: Int32s
    params: dict[str, Any]
    seed: int
    stop_ids: tuple[int, ...]
    min_len: int
    max_len: int
    priority: int
    salt: str
    bad_words: tuple[tuple[int, ...], ...]
    adapter: str = ""
    processors: tuple[tuple[int, tuple[float, ...]], ...] = ()
    transfer: KVTransfer = NO_TRANSFER
    output: Int32s | None = None


class Abort(Message, frozen=True):
    """Front to core: end this request."""

    key: int


class SetWatching(Message, frozen=True):
    """Front to core: start or stop sending Steps."""

    on: bool


class Look(Message, frozen=True):
    """Front to core: answer with a View of the steps since `since`, ns."""

    number: int
    since: int


class ChangeAdapter(Message, frozen=True):
    """Front to core: load or unload an adapter, and answer with a Changed."""

    number: int
    change: AdapterChange


class UpdateWeights(Message, frozen=True):
    """Front to core: load the weights of this directory, and answer with a Changed."""

    number: int
    path: str


class Operate(Message, frozen=True):
    """Front to core: carry out an operator's order, and answer with a Changed."""

    number: int
    order: OperatorOrder


class SendPageEvents(Message, frozen=True):
    """Front to core: start sending PageEventList. A second one restarts with a PageChange.CLEARED."""


class Stop(Message, frozen=True):
    """Front to core: close the engine and exit."""


class Ready(Message, frozen=True):
    """Core to front: the engine accepts requests."""

    info: EngineInfo


class Tokens(Message, frozen=True):
    """Core to front: the settled tokens of one step. Raises ValueError if its columns differ in length."""

    settled: StepTokens

    def __post_init__(self) -> None:
        step, keys, tokens, flags, logprobs = self.settled
        alike = keys.ndim == 1 and keys.shape == tokens.shape[:1] == flags.shape
        if not alike or tokens.ndim > 2 or tokens.size < len(keys):
            raise ValueError(f"columns of step {step} differ in length: {keys.shape}, {tokens.shape}, {flags.shape}")
        if logprobs is not None:
            _check_logprobs(step, logprobs)


def _check_logprobs(step: int, columns: StepLogprobs) -> None:
    *flat, top_ids, top_logprobs = (column.shape for column in columns)
    agree = len(top_ids) == 2 and top_ids == top_logprobs and set(flat) == {top_ids[:1]}
    if not (agree and top_ids[1] <= MAX_LOGPROBS):
        raise ValueError(f"columns of log-probabilities of step {step} differ in length")


class Admitted(Message, frozen=True):
    """Core to front: this request left the queue; `cached` of its prompt tokens came from the prefix index."""

    key: int
    cached: int


class Refused(Message, frozen=True):
    """Core to front: this request was refused."""

    key: int
    error: GaplessError


class StatsReport(Message, frozen=True):
    """Core to front: the loop's present numbers."""

    stats: Stats


class Steps(Message, frozen=True):
    """Core to front: a loop.records.StepTable.

    `rows` are its columns, [steps] of STEP. `runs` are steps with the same decode rows: their number, and the rows'
    keys. `waits` is empty for one rank.
    """

    rows: bytes
    runs: tuple[tuple[int, Int64s], ...]
    chunks: tuple[tuple[ChunkRecord, ...], ...]
    waits: tuple[tuple[int, ...], ...] = ()


class View(Message, frozen=True):
    """Core to front: the answer to the Look with this number; `pages` as Core.page_map."""

    number: int
    steps: Steps
    pages: bytes


class Changed(Message, frozen=True):
    """Core to front: the ChangeAdapter, UpdateWeights or Operate with this number is done, or refused; `names` are the
    present adapters."""

    number: int
    names: tuple[str, ...]
    error: GaplessError | None


class PageEventList(Message, frozen=True):
    """Core to front: changes of the prefix index. Raises ValueError for tokens that do not fill pages."""

    events: tuple[PageEvent, ...]

    def __post_init__(self) -> None:
        for event in self.events:
            pages, tokens = len(event.digests), event.tokens
            if tokens.ndim != 1 or (len(tokens) % pages if pages else len(tokens)):
                raise ValueError(f"{tokens.size} tokens on {pages} pages")


class Doing(msgspec.Struct, tag=True, forbid_unknown_fields=True, frozen=True):
    """Progress of the child's start, as one JSON line on its stdout; an empty line is a heartbeat."""

    phase: Phase


class Died(msgspec.Struct, tag=True, forbid_unknown_fields=True, frozen=True):
    """The child's last words, as one JSON line on its stdout."""

    kind: str
    text: str


ToCore = Add | Abort | SetWatching | Look | ChangeAdapter | UpdateWeights | Operate | SendPageEvents | Stop
OnControl = Doing | Died
FromCore = Ready | Admitted | Tokens | Refused | StatsReport | Steps | View | Changed | PageEventList

_KINDS = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, GaplessError)
}
_DEFAULTS = {f.name: f.default for f in fields(SamplingParams)}


def pack_request(request: Request) -> Add:
    params = {}
    for name, default in _DEFAULTS.items():
        value = getattr(request.params, name)
        if value != default and value != ():
            params[name] = value
    key, tokens, _, *rest, _ = request
    return Add(key, tokens, params, *rest)  # type: ignore[arg-type]


def unpack_request(add: Add) -> Request:
    """Return the request given to pack_request, its parameters checked again."""
    key, tokens, params, *rest = msgspec.structs.astuple(add)
    return Request(key, tokens, SamplingParams.from_dict(params), *rest)


def pack_steps(steps: StepTable) -> Steps:
    runs = [list(same) for _, same in groupby(steps.decode, key=id)]
    waits = tuple(steps.waits) if any(steps.waits) else ()
    return Steps(steps.rows.tobytes(), tuple([(len(run), run[0]) for run in runs]), tuple(steps.chunks), waits)


def unpack_steps(message: Steps) -> StepTable:
    """Return the steps. Raises ValueError for inconsistent parts."""
    rows = np.frombuffer(message.rows, STEP)
    whole = all([count > 0 and keys.ndim == 1 for count, keys in message.runs])
    waits = [*message.waits] or [()] * len(rows)
    if not (whole and sum([count for count, _ in message.runs]) == len(rows) == len(message.chunks) == len(waits)):
        raise ValueError("the parts of a message of steps do not fit together")
    if not (rows.view("<i8") >= 0).all():
        raise ValueError("a step's number or time is negative, which does not fit")
    decode = [keys for count, keys in message.runs for _ in range(count)]
    return StepTable(rows, decode, [*message.chunks], waits)


def revive(kind: str, text: str) -> GaplessError:
    """Return one of our errors from its class name and text; EngineDeadError for an unknown class."""
    return _KINDS.get(kind, EngineDeadError)(text)


def last_words(error: BaseException) -> Died:
    """Return the message of an error that ends the child: its text, and its first cause."""
    text = str(error) if isinstance(error, GaplessError) else f"{type(error).__name__}: {error}"
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if cause is not error and str(cause) not in text:
        text = f"{text} (cause: {type(cause).__name__}: {cause})"
    return Died(type(error).__name__, text[:MAX_REASON])


def _pack(value: object) -> object:
    """Convert types unknown to msgpack: arrays, and our errors."""
    if isinstance(value, np.ndarray):
        return value.dtype.char, value.tobytes(), value.shape if value.ndim > 1 else ()
    if isinstance(value, GaplessError):
        param, code = getattr(value, "param", None), getattr(value, "code", None)
        return type(value).__name__, str(value)[:MAX_REASON], param, code
    raise NotImplementedError(f"{type(value).__name__} is part of no message")


def _unpack(kind: object, parts: Any) -> object:
    """Return the array or the error. Raises ValueError for inconsistent parts, or another dtype."""
    if kind is GaplessError:
        name, text, param, code = msgspec.convert(parts, tuple[str, str, str | None, str | None])
        return RequestError(text, param, code) if name == RequestError.__name__ else revive(name, text)
    char, data, shape = parts
    dtype = array_dtype(kind)
    if char != dtype.char:
        raise ValueError(f"an array of {char!r} where {dtype} is expected")
    column = np.frombuffer(data, dtype)
    return column.reshape(shape) if shape else column


@cache
def array_dtype(kind: object) -> np.dtype[Any]:
    """Return the dtype of an array's annotation. Its form differs between releases of numpy."""
    number: type[np.generic] = get_args(get_args(kind)[-1])[0]
    return np.dtype(number)


encode = msgspec.msgpack.Encoder(enc_hook=_pack).encode


def decoder(kinds: Any) -> Callable[[bytes], list[Any]]:
    """Return the reader of frames of these kinds of messages. It raises ValueError for any other."""
    return msgspec.msgpack.Decoder(list[kinds], dec_hook=_unpack).decode


decode_to_core = decoder(ToCore)
decode_from_core = decoder(FromCore)
