"""SamplingParams: what one request asks of the sampler, and PARAMS, the registry of its fields.

A field of SamplingParams is an entry of the registry. Range checks, columns of the device table, what the packet
writes, the server's request fields and docs/sampling.md follow from it: a new parameter is a field here, and a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cache
from typing import Any, NamedTuple, get_args, get_type_hints

from gapless.base.errors import RequestError
from gapless.base.processors import MAX_ARGUMENT, MAX_ARGUMENTS, as_calls
from gapless.base.spellings import drop_default
from gapless.base.structured import StructuredOutputs, as_form

MAX_STOP_IDS = 32
"""Stop ids of one request, the end-of-sequence ids included: the width of the device table."""
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1_000
MAX_BIASES = 1_024
"""Tokens of one request's logit_bias, and of its allowed_token_ids."""
MAX_BIAS = 100.0
MAX_BAD_WORDS = 128
MAX_BAD_TOKENS = 1_024
"""Tokens of one request's bad words in all, each word with and without a leading space."""
MAX_THINKING = 1_000_000
"""Tokens of a thinking budget"""
PREFIX_FUNCTION = "prefix_allowed_tokens_fn"
MAX_N = 64
MAX_EXTRA_ARGS = 16
SLOT_LANE = "adjust"
"""The lane whose rows lease slots, which have its name"""
MAX_LOGPROBS = 20
"""Most likely tokens that a request may ask for beside the sampled one."""
_INT32 = 2**31 - 1


class Words(Enum):
    """Storage of a parameter in the device table."""

    REAL = "float32"
    INT = "int32"
    LONG = "int64"
    """Two words, the low one first"""
    SLOT = "slot"
    """int32: the slot that the row leases for a value other than the default, else 0"""

    @property
    def count(self) -> int:
        return 2 if self is Words.LONG else 1


class Param(NamedTuple):
    """A sampling parameter: an entry of the registry."""

    name: str
    kind: Any
    """The type that a caller gives, None included where that is a value."""
    default: Any
    doc: str
    low: float | None = None
    high: float | None = None
    open_low: bool = False
    """Whether `low` itself is out of range."""
    words: Words | None = None
    """How its column of the device table is typed; None when kernels do not read it."""
    lane: str = ""
    """Lane of a row whose value is not the default, by its name in step/lanes"""
    wire: bool = True
    """Whether it is a field of the server's requests under this name."""

    @property
    def optional(self) -> bool:
        return type(None) in get_args(self.kind)

    def check(self, value: object) -> None:
        """Raises RequestError naming the parameter when the value has the wrong type or is out of range."""
        if value is None and self.optional:
            return
        if self.lane == "score":
            check_logprobs(self.name, value)
        elif self.kind is bool and not isinstance(value, bool):
            raise RequestError(f"{self.name} must be true or false", self.name)
        elif self.kind is float and self.low is not None and self.high is not None:
            _check_real(self.name, value, self.low, self.high, self.open_low)
        elif self.low is not None and self.high is not None:
            _check_int(self.name, value, int(self.low), int(self.high))


def param(default: Any, doc: str, **entry: Any) -> Any:
    """A field of SamplingParams; `entry` as in Param."""
    return field(default=default, metadata={"doc": doc, **entry})


class _Named(type):
    """Makes settings of keyword arguments of other engines too. Raises RequestError for a name that is not known."""

    def __call__(cls, *args: Any, **given: Any) -> Any:
        known = cls.__dataclass_fields__  # type: ignore[attr-defined]
        if not given.keys() <= known.keys():
            given = {key: value for key, value in given.items() if key in known or not drop_default(key, value, known)}
        return super().__call__(*args, **given)


@dataclass(frozen=True)
class SamplingParams(metaclass=_Named):
    """Sampling settings of one request, in the ecosystem's names. docs/sampling.md shows them as a table."""

    n: int = param(1, "completions of the same prompt", low=1, high=MAX_N)
    temperature: float = param(1.0, "0 is greedy", low=0.0, high=100.0, words=Words.REAL)
    top_p: float = param(
        1.0, "keep the smallest set of best tokens whose probability reaches this; it counts what top_k leaves",
        low=0.0, high=1.0, open_low=True, words=Words.REAL, lane="cut",
    )  # fmt: skip
    top_k: int = param(
        0, "keep this many best tokens; 0 or -1 keeps all", low=-1, high=_INT32, words=Words.INT, lane="cut"
    )
    min_p: float = param(
        0.0, "drop tokens less likely than this share of the best", low=0.0, high=1.0, words=Words.REAL, lane="cut"
    )
    seed: int | None = param(
        None, "random stream of this request; none draws one. If logits are equal, equal seeds give equal tokens at "
        "any batch and depth (see --batch-invariant)",
        low=-(2**63), high=2**63 - 1, words=Words.LONG,
    )  # fmt: skip
    repetition_penalty: float = param(
        1.0, "logits of tokens in prompt or output are divided by this if positive, else multiplied",
        low=0.01, high=100.0, words=Words.REAL, lane="adjust",
    )  # fmt: skip
    frequency_penalty: float = param(
        0.0, "subtracted from a token's logit for every time that the output has it",
        low=-2.0, high=2.0, words=Words.REAL, lane="adjust",
    )  # fmt: skip
    presence_penalty: float = param(
        0.0, "subtracted from the logits of all tokens that the output has",
        low=-2.0, high=2.0, words=Words.REAL, lane="adjust",
    )  # fmt: skip
    logit_bias: Mapping[int, float] | None = param(
        None, f"token id -> number from -100 to 100, added to its logit; at most {MAX_BIASES}", lane="adjust"
    )
    allowed_token_ids: Sequence[int] | None = param(
        None, f"the only tokens that are sampled; at most {MAX_BIASES}", lane="adjust"
    )
    bad_words: Sequence[str] | None = param(
        None, f"texts whose last token is not sampled after the others, unless no other is left; at most "
        f"{MAX_BAD_WORDS}, of {MAX_BAD_TOKENS} tokens in all", lane="adjust",
    )  # fmt: skip
    structured_outputs: StructuredOutputs | None = param(
        None, "the form that the output must have (guides/structured.md)", lane="mask", wire=False
    )
    logits_processors: Sequence[str | Mapping[str, Any]] | None = param(
        None, f"processors of this engine by name, or objects with the name as `qualname` and up to {MAX_ARGUMENTS} "
        "numbers as `args` (guides/sampling.md)", lane="adjust",
    )  # fmt: skip
    prefix_allowed_tokens_fn: Callable[[int, Any], Sequence[int]] | None = param(
        None, "Python function of transformers' `generate`: (0, ids of prompt and output) -> ids that may come next "
        "(guides/sampling.md)", lane="mask", wire=False,
    )  # fmt: skip
    extra_args: Mapping[str, float] | None = param(
        None, f"numbers by name, for lanes that were added (extend/lane.md); at most {MAX_EXTRA_ARGS}"
    )
    stop: str | Sequence[str] | None = param(None, "strings that end the output, wherever token borders lie")
    stop_token_ids: Sequence[int] | None = param(None, "tokens that end the output")
    include_stop_str_in_output: bool = param(False, "keep the stop string in the text")
    ignore_eos: bool = param(False, "go on past the model's end-of-sequence tokens")
    max_tokens: int | None = param(16, "new tokens at most; none means up to the context limit", low=1, high=_INT32)
    min_tokens: int = param(0, "stop tokens are not sampled before this many new tokens", low=0, high=_INT32)
    skip_special_tokens: bool = param(True, "leave special tokens out of the text")
    speculate: bool = param(True, "draft tokens for the request, if the engine speculates; they change none")
    detokenize: bool = param(True, "make text at all", wire=False)
    logprobs: int | None = param(
        None, "log-probability and rank of every sampled token, and of this many most likely ones, from the raw logits",
        low=0, high=MAX_LOGPROBS, lane="score", wire=False,
    )  # fmt: skip
    prompt_logprobs: int | None = param(
        None, "log-probabilities of every prompt token but the first", low=0, high=MAX_LOGPROBS, lane="score"
    )
    truncate_prompt_tokens: int | None = param(
        None, "prompt tokens that are kept at most; -1 keeps as many as leave room for max_tokens, or for one more",
        low=-1, high=_INT32,
    )  # fmt: skip
    truncation_side: str | None = param(
        None, "what of a prompt that is longer goes: left (default) its beginning, right its end"
    )  # fmt: skip
    thinking_token_budget: int | None = param(
        None, "tokens of reasoning at most, then its end follows; -1 for any number (guides/sampling.md)",
        low=-1, high=MAX_THINKING,
    )  # fmt: skip

    def __post_init__(self) -> None:
        settings: Any = type(self)
        for entry in registry(settings):
            value = getattr(self, entry.name)
            if value is not entry.default:
                entry.check(value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) must not be above max_tokens ({self.max_tokens})", "min_tokens"
            )
        if self.truncate_prompt_tokens == 0 or self.truncation_side not in (None, "left", "right"):
            name = "truncate_prompt_tokens" if self.truncate_prompt_tokens == 0 else "truncation_side"
            rule = "-1, or 1 and more" if name.endswith("tokens") else "left or right"
            raise RequestError(f"{name} must be {rule}, got {_short(getattr(self, name))}", name)
        if self.thinking_token_budget == -1:
            object.__setattr__(self, "thinking_token_budget", None)
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_ids(self.stop_token_ids))
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        object.__setattr__(self, "allowed_token_ids", _allowed_ids(self.allowed_token_ids))
        object.__setattr__(self, "bad_words", _bad_words(self.bad_words))
        object.__setattr__(self, "logits_processors", as_calls(self.logits_processors))
        object.__setattr__(self, "extra_args", _extra_args(self.extra_args))
        object.__setattr__(self, "structured_outputs", as_form(self.structured_outputs))
        self._check_form()

    def _check_form(self) -> None:
        """Refuse what a form cannot go with: it alone decides which tokens come, and when the output ends."""
        if self.prefix_allowed_tokens_fn is not None and not callable(self.prefix_allowed_tokens_fn):
            raise RequestError(f"{PREFIX_FUNCTION} must be a function", PREFIX_FUNCTION)
        if self.structured_outputs is None:
            return
        thinking = self.structured_outputs.thinking
        other = "ignore_eos" if thinking and thinking.free else "min_tokens"
        for name in (other, "allowed_token_ids", PREFIX_FUNCTION):
            if getattr(self, name):
                source = self.structured_outputs.where
                raise RequestError(f"{name} does not go with {source}: leave one of them out", name)

    @property
    def masked_by(self) -> str:
        """The parameter that asks for masks of the allowed next tokens; empty if none does."""
        by_form = self.structured_outputs is not None
        return "structured_outputs" if by_form else PREFIX_FUNCTION * (self.prefix_allowed_tokens_fn is not None)

    def needs(self, lane: str) -> bool:
        """Return whether a row with these settings is worked on in this lane. A greedy row has no filters."""
        if lane == "cut" and self.temperature == 0:
            return False
        return bool(self._asked(lane))

    @property
    def leases(self) -> tuple[str, ...]:
        """Slot pools that a row with these settings leases from: such parameters, and the lane that adjusts logits."""
        adjusts = (SLOT_LANE,) if self.needs(SLOT_LANE) else ()
        return (*self._asked(Words.SLOT), *adjusts)

    def _asked(self, kind: str | Words) -> list[str]:
        """Names of the parameters of this lane, or column type, whose value is not the default."""
        settings: Any = type(self)
        return [entry.name for entry in _of(settings, kind) if getattr(self, entry.name) != entry.default]

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop or ())

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return tuple(self.stop_token_ids or ())

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, checked again."""
        return replace(self, **changes)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SamplingParams:
        """Build from a mapping; an unknown name is a RequestError."""
        return cls(**values)


@cache
def registry(settings: type) -> tuple[Param, ...]:
    """The entries of a class of settings, in the order of its fields."""
    kinds = get_type_hints(settings)
    return tuple(Param(one.name, kinds[one.name], one.default, **one.metadata) for one in fields(settings))


@cache
def _of(settings: type, kind: str | Words) -> tuple[Param, ...]:
    return tuple(entry for entry in registry(settings) if kind in (entry.lane, entry.words))


PARAMS = registry(SamplingParams)


def columns(params: Sequence[Param], first: int) -> dict[str, int]:
    """Return the column of each parameter that kernels read in the device table, by name, counted from `first`."""
    places = {}
    for entry in params:
        if entry.words:
            places[entry.name], first = first, first + entry.words.count
    return places


def check_extra_args(params: SamplingParams, known: Sequence[str]) -> None:
    """Raise RequestError for a name in `extra_args` that is not among these."""
    for name in params.extra_args or ():
        if name not in known:
            listed = ", ".join(sorted(known)) or "none"
            raise RequestError(f"extra_args: there is no {_short(name)}; known: {listed}", "extra_args")


def check_logprobs(name: str, value: object) -> None:
    """Check a number of alternatives asked for. Raises RequestError naming the field."""
    if value == -1:
        raise RequestError(f"{name} -1, for the whole vocabulary, is not supported: ask for 0 to {MAX_LOGPROBS}", name)
    if value is not None:
        _check_int(name, value, 0, MAX_LOGPROBS)


def _check_int(name: str, value: object, low: int, high: int, field: str = "") -> None:
    """`field` is the request's field if `name` is a part of it."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{name} must be a whole number from {low} to {high}, got {_short(value)}", field or name)


def _check_real(name: str, value: object, low: float, high: float, open_low: bool = False, field: str = "") -> None:
    # The form `low <= value <= high` refuses NaN too.
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not (good and low <= value <= high and not (open_low and value == low)):  # type: ignore[operator]
        bounds = f"above {low:g} and at most {high:g}" if open_low else f"from {low:g} to {high:g}"
        raise RequestError(f"{name} must be a number {bounds}, got {_short(value)}", field or name)


def _stop_strings(stop: object) -> tuple[str, ...]:
    if not isinstance(stop, (str, list, tuple)) and stop is not None:
        raise RequestError(f"stop must be a string or a list of strings, got {_short(stop)}", "stop")
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(strings) > MAX_STOP_STRINGS:
        raise RequestError(f"stop holds {len(strings)} strings, at most {MAX_STOP_STRINGS} are allowed", "stop")
    for text in strings:
        if not isinstance(text, str) or not text:
            raise RequestError("stop must hold non-empty strings", "stop")
        if len(text) > MAX_STOP_CHARS:
            raise RequestError(f"a stop string is longer than {MAX_STOP_CHARS} characters", "stop")
    return strings


def _biases(given: object) -> dict[int, float] | None:
    """Ids in JSON are strings."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, got {_short(given)}", "logit_bias")
    if len(given) > MAX_BIASES:
        raise RequestError(f"logit_bias has {len(given)} entries, at most {MAX_BIASES} are allowed", "logit_bias")
    biases = {}
    for token, bias in given.items():
        written = isinstance(token, str) and token.isascii() and token.isdecimal() and len(token) <= 10
        number = int(token) if written else token
        _check_int("a key of logit_bias", number, 0, _INT32, "logit_bias")
        _check_real(f"the bias of token {number}", bias, -MAX_BIAS, MAX_BIAS, field="logit_bias")
        biases[number] = float(bias)
    return biases or None


def _extra_args(given: object) -> dict[str, float] | None:
    if given is None:
        return None
    if not isinstance(given, Mapping) or len(given) > MAX_EXTRA_ARGS:
        raise RequestError(f"extra_args must map at most {MAX_EXTRA_ARGS} names to numbers", "extra_args")
    for name, number in given.items():
        if not isinstance(name, str):
            raise RequestError(f"a name in extra_args must be a string, got {_short(name)}", "extra_args")
        _check_real(f"{_short(name)} in extra_args", number, -MAX_ARGUMENT, MAX_ARGUMENT, field="extra_args")
    return {name: float(number) for name, number in given.items()} or None


def _allowed_ids(ids: object) -> tuple[int, ...] | None:
    if ids is None:
        return None
    if not isinstance(ids, (list, tuple)) or not 0 < len(ids) <= MAX_BIASES:
        raise RequestError(f"allowed_token_ids must be a list of 1 to {MAX_BIASES} token ids", "allowed_token_ids")
    for token in ids:
        _check_int("an entry of allowed_token_ids", token, 0, _INT32, "allowed_token_ids")
    return tuple(dict.fromkeys(ids))


def _bad_words(words: object) -> tuple[str, ...] | None:
    if words is None:
        return None
    if not isinstance(words, (list, tuple)) or len(words) > MAX_BAD_WORDS:
        raise RequestError(f"bad_words must be a list of at most {MAX_BAD_WORDS} strings", "bad_words")
    for word in words:
        if not isinstance(word, str) or not word.strip() or len(word) > MAX_STOP_CHARS:
            raise RequestError(
                f"bad_words must hold strings of 1 to {MAX_STOP_CHARS} characters that are not all spaces", "bad_words"
            )
    return tuple(words) or None


def _stop_ids(ids: object) -> tuple[int, ...]:
    if not isinstance(ids, (list, tuple)) and ids is not None:
        raise RequestError(f"stop_token_ids must be a list of token ids, got {_short(ids)}", "stop_token_ids")
    ids = tuple(ids or ())
    if len(ids) > MAX_STOP_IDS:
        raise RequestError(f"stop_token_ids holds {len(ids)} ids, at most {MAX_STOP_IDS} are allowed", "stop_token_ids")
    for token in ids:
        _check_int("stop_token_ids", token, 0, _INT32)
    return ids


def _short(value: object) -> str:
    # Python refuses to write out a whole number of thousands of digits.
    text = "a far larger number" if isinstance(value, int) and value.bit_length() > 1_000 else repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
