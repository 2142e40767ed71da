"""SamplingParams: what one request asks of the sampler. Every number is range-checked here, once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from gapless.base.errors import RequestError

MAX_STOP_IDS = 32
"""Stop ids of one request, the end-of-sequence ids included: the width of the device table."""
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1_000
MAX_N = 64
MAX_LOGPROBS = 20
"""Most likely tokens that a request may ask for beside the sampled one."""
_INT32 = 2**31 - 1


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings of one request, in the ecosystem's names.

    Attributes:
        n: completions of the same prompt, 1..64.
        temperature: 0 is greedy; up to 100.
        top_p: keep the smallest set of tokens whose probability reaches this, 0 < top_p <= 1.
        top_k: keep this many best tokens; 0 or -1 keeps all.
        min_p: drop tokens less likely than this share of the best, 0..1.
        seed: random stream of this request; None draws one. Equal seeds give equal tokens at any batch and depth.
        stop: strings that end the output, wherever token borders lie.
        stop_token_ids: tokens that end the output.
        include_stop_str_in_output: keep the stop string in the text.
        ignore_eos: go on past the model's end-of-sequence tokens.
        max_tokens: new tokens at most; None means up to the context limit.
        min_tokens: stop tokens are not sampled before this many new tokens.
        skip_special_tokens: leave special tokens out of the text.
        detokenize: make text at all.
        logprobs: log-probability and rank of every sampled token, and of this many most likely ones, 0..20. They are
            those of the raw logits: temperature, top-k and the like do not change them.
        prompt_logprobs: the same of every prompt token but the first.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    skip_special_tokens: bool = True
    detokenize: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1, MAX_N)
        _check_real("temperature", self.temperature, 0.0, 100.0)
        _check_real("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_int("top_k", self.top_k, -1, _INT32)
        _check_real("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, _INT32)
        _check_int("min_tokens", self.min_tokens, 0, _INT32)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) must not be above max_tokens ({self.max_tokens})", "min_tokens"
            )
        for name in ("logprobs", "prompt_logprobs"):
            check_logprobs(name, getattr(self, name))
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false", name)
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_ids(self.stop_token_ids))
        object.__setattr__(self, "top_k", max(self.top_k, 0))

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
        """Build from a mapping; an unknown name is a RequestError that lists the known ones."""
        known = {f.name for f in fields(cls)}
        for name in values:
            if name not in known:
                raise RequestError(f"unknown sampling parameter {name!r}; known: {', '.join(sorted(known))}", name)
        return cls(**values)


def check_logprobs(name: str, value: object) -> None:
    """How many of the most likely tokens somebody asks for. Raises RequestError naming the field."""
    if value == -1:
        raise RequestError(f"{name} -1, for the whole vocabulary, is not supported: ask for 0 to {MAX_LOGPROBS}", name)
    if value is not None:
        _check_int(name, value, 0, MAX_LOGPROBS)


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{name} must be a whole number from {low} to {high}, got {_short(value)}", name)


def _check_real(name: str, value: object, low: float, high: float, open_low: bool = False) -> None:
    # The form `low <= value <= high` refuses NaN too.
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not (good and low <= value <= high and not (open_low and value == low)):  # type: ignore[operator]
        bounds = f"above {low:g} and at most {high:g}" if open_low else f"from {low:g} to {high:g}"
        raise RequestError(f"{name} must be a number {bounds}, got {_short(value)}", name)


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
