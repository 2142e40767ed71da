"""Admission: a prompt and its sampling parameters become requests, checked once, here."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gapless.base.errors import RequestError
from gapless.base.params import MAX_BAD_TOKENS, MAX_STOP_IDS, SamplingParams
from gapless.base.processors import numbered
from gapless.base.records import NO_TRANSFER, Int32s, KVTransfer, Request
from gapless.engine.frontdoor import ModelAssets
from gapless.engine.seam import EngineInfo

PromptInput = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, {"prompt": text}, or {"prompt_token_ids": ids} (optionally with "prompt" as its text)."""

MAX_ID_CHARS = 128
_MASK = 2**64 - 1


class Resolved(NamedTuple):
    """An admitted request: one Request for each of its completions, over the same prompt."""

    prompt: str | None
    tokens: Int32s
    params: SamplingParams
    requests: tuple[Request, ...]


class Resolver:
    """Turns prompts into requests for one engine. Keys are never reused; thread-safe.

    Requests without a seed draw one from `seed`.
    """

    def __init__(self, front: ModelAssets, info: EngineInfo, seed: int = 0) -> None:
        self.tokenizer = front.tokenizer
        self._eos_ids = front.eos_ids
        self._own_limit = front.defaults.get("max_tokens")
        """The model's max_new_tokens: a request with this default may end earlier, at the end of the context"""
        self._info = info
        self._seed = seed
        self.keys: Iterator[int] = itertools.count(1)
        self._draws: Iterator[int] = itertools.count(1)

    def resolve(
        self, prompt: PromptInput, params: SamplingParams, *, priority: int = 0, salt: str = "", adapter: str = "",
        transfer: KVTransfer = NO_TRANSFER, prompt_only: bool = False,
    ) -> Resolved:  # fmt: skip
        """Raises RequestError naming the field. Text is tokenised here, after a cheap length test."""
        _check_kinds(params, priority, salt)
        if params.stop and not params.detokenize:
            raise RequestError("stop strings need the text: set detokenize to true", "stop")
        text, ids = _split(prompt)
        vocab, context = self._info.vocab_size, self._info.max_model_len
        tokens = _token_ids(self.encode(text or "") if ids is None else ids, vocab)
        _check_budget(params)
        wanted = params.max_tokens
        asked = 0 if prompt_only else None if wanted == self._own_limit else wanted
        if params.truncate_prompt_tokens is not None:
            tokens = _truncated(tokens, params, context, asked)
        _check_context(len(tokens), params.min_tokens, asked, context)
        room = context + prompt_only - len(tokens)
        wanted = room if wanted is None else wanted
        first = Request(
            key=0,
            tokens=tokens,
            params=params,
            seed=self._seed_of(params),
            stop_ids=stop_ids(params, vocab, self._eos_ids),
            min_len=len(tokens) + params.min_tokens,
            max_len=len(tokens) + min(wanted, room),
            priority=priority,
            salt=salt,
            bad_words=self._bad_words(params),
            adapter=adapter,
            processors=numbered(params.logits_processors or (), self._info.processors),  # type: ignore[arg-type]
            transfer=transfer,
        )
        _check_ids(params, first.stop_ids, vocab)
        # The prompt is scored once; the other completions may find it in the prefix cache.
        others = params.replace(prompt_logprobs=None) if params.n > 1 else params
        other = first._replace(params=others, transfer=transfer._replace(offer=""))
        requests = tuple(
            (other if index else first)._replace(key=next(self.keys), seed=child_seed(first.seed, index))
            for index in range(params.n)
        )
        return Resolved(text, tokens, params, requests)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a prompt. Raises RequestError if the text cannot fit the context."""
        longest = self._info.max_model_len * self.tokenizer.max_token_bytes
        if len(text) * 4 > longest and (size := len(text.encode(errors="replace"))) > longest:
            least = -(-size // self.tokenizer.max_token_bytes)
            raise _too_long(self._info.max_model_len, f"your prompt has at least {least} tokens")
        try:
            return self.tokenizer.encode(text, add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:  # it is a str, so only its characters can be wrong
            raise RequestError("the prompt holds half a surrogate pair, which is not text", "prompt") from error

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of bad words, at the beginning of the output and after a space."""
        found: list[tuple[int, ...]] = []
        for word in params.bad_words or ():
            alone, spaced = (tuple(self._word(space + word.lstrip())) for space in ("", " "))
            found.append(alone)
            if spaced[0] != alone[0] and len(spaced) == len(alone):
                found.append(spaced)
        count = sum(map(len, found))
        if count > MAX_BAD_TOKENS:
            raise RequestError(f"bad_words have {count} tokens, at most {MAX_BAD_TOKENS} are allowed", "bad_words")
        # A tokenizer may have ids beyond the model's logits.
        return tuple([tokens for tokens in found if max(tokens) < self._info.vocab_size])

    def _word(self, text: str) -> list[int]:
        try:
            ids = self.tokenizer.encode(text, False)
        except (TypeError, UnicodeEncodeError) as error:  # it is a str, so only its characters can be wrong
            raise RequestError("bad_words hold half a surrogate pair, which is not text", "bad_words") from error
        if not ids:
            raise RequestError(f"bad_words hold {text.strip()[:40]!r}, which has no tokens", "bad_words")
        return ids

    def _seed_of(self, params: SamplingParams) -> int:
        # Without a seed, a request gets the engine's next one: the same calls give the same tokens.
        return params.seed & (2**63 - 1) if params.seed is not None else mix(self._seed, next(self._draws))


def check_adapter(adapter: str, known: Sequence[str]) -> None:
    """Raises RequestError for an unknown adapter."""
    if adapter and adapter not in known:
        names = ", ".join(known) or "none"
        raise RequestError(
            f"there is no adapter {adapter!r}; those of this engine: {names}", "adapter", "model_not_found"
        )


def mix(seed: int, number: int) -> int:
    """Return a seed in [0, 2**63), different for every number (splitmix64)."""
    z = (seed * 0x9E3779B97F4A7C15 + number * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) >> 1


def child_seed(seed: int, index: int) -> int:
    """Return the seed of completion `index`; the first keeps the request's, independent of n."""
    return seed if index == 0 else mix(seed, index)


def stop_ids(params: SamplingParams, vocab: int, eos_ids: Sequence[int]) -> tuple[int, ...]:
    """Return the ids that end a sequence, with the end-of-sequence ids unless they are ignored.

    With a form of output they are never ignored: they are allowed only after a complete output.
    """
    ignored = params.ignore_eos and params.structured_outputs is None
    # A tokenizer may have ids beyond the model's logits.
    ends = () if ignored else [token for token in eos_ids if token < vocab]
    ids = tuple(dict.fromkeys((*params.stop_ids, *ends)))
    if len(ids) > MAX_STOP_IDS:
        raise RequestError(
            f"stop_token_ids and the model's own end tokens are {len(ids)} ids, at most {MAX_STOP_IDS} are allowed",
            "stop_token_ids",
        )
    return ids


def _check_ids(params: SamplingParams, stops: Sequence[int], vocab: int) -> None:
    """Check the token ids in the parameters."""
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        for token in getattr(params, name) or ():
            if token >= vocab:
                raise RequestError(f"{name} holds {token}, but the vocabulary ends at {vocab - 1}", name)
    if params.allowed_token_ids and params.min_tokens and set(params.allowed_token_ids) <= set(stops):
        raise RequestError(
            "allowed_token_ids are all end tokens, which min_tokens forbids at first", "allowed_token_ids"
        )


def check_request_id(request_id: str) -> None:
    """Check a request id: a short, printable label of the client's. It never indexes the engine."""
    if not isinstance(request_id, str) or not 0 < len(request_id) <= MAX_ID_CHARS or not request_id.isprintable():
        raise RequestError(f"request_id must be 1 to {MAX_ID_CHARS} printable characters", "request_id")


def _check_kinds(params: object, priority: object, salt: object) -> None:
    """Check types that a caller of the Python API may get wrong: later they would harm the whole engine."""
    if not isinstance(params, SamplingParams):
        raise RequestError(f"sampling_params must be SamplingParams, got {type(params).__name__}", "sampling_params")
    if type(priority) is not int or not -(2**31) <= priority < 2**31:
        raise RequestError("priority must be a whole number that fits in 32 bits", "priority")
    if not isinstance(salt, str):
        raise RequestError(f"salt must be a string, got {type(salt).__name__}", "salt")


def _split(prompt: PromptInput) -> tuple[str | None, Any]:
    """Return (text, token ids) of a prompt, one of them given."""
    if isinstance(prompt, str):
        return prompt, None
    if not isinstance(prompt, Mapping):
        return None, prompt
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise RequestError("prompt must be a string or a list of token ids", "prompt")
    if text is None and ids is None:
        raise RequestError('a prompt object needs "prompt" or "prompt_token_ids"', "prompt")
    return text, ids


def _token_ids(ids: Any, vocab_size: int) -> Int32s:
    """Return the ids as int32: at least one, all whole numbers inside the vocabulary."""
    if isinstance(ids, np.ndarray) and ids.ndim == 1 and ids.dtype.kind in "iu":
        ids = ids.tolist()
    if not isinstance(ids, (list, tuple)) or not set(map(type, ids)) <= {int}:
        raise RequestError("prompt must be a string or a list of token ids (whole numbers)", "prompt")
    if not ids:
        raise RequestError("the prompt is empty: it must have at least one token", "prompt")
    if not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        shown = wrong if abs(wrong) < 10**12 else "a far larger number"
        raise RequestError(f"the prompt holds token id {shown}, but ids go from 0 to {vocab_size - 1}", "prompt")
    return np.array(ids, dtype=np.int32)


def _check_budget(params: SamplingParams) -> None:
    """Raise RequestError for a budget outside a form: only chats have reasoning."""
    form = params.structured_outputs
    if params.thinking_token_budget is not None and not (form and form.thinking and form.thinking.budget is not None):
        name = "thinking_token_budget"
        raise RequestError(f"{name} needs a chat, whose template has the form of reasoning", name)


def _truncated(tokens: Int32s, params: SamplingParams, context: int, asked: int | None) -> Int32s:
    """Return the kept part of a prompt. Raises RequestError if more is requested than the context holds."""
    most = params.truncate_prompt_tokens
    assert most is not None
    if most > context:
        raise RequestError(
            f"truncate_prompt_tokens must be at most {context}, the context's length, got {most}",
            "truncate_prompt_tokens",
        )
    if most == -1:
        most = max(1, context - (0 if asked == 0 else max(asked or 1, params.min_tokens)))
    return tokens[:most] if params.truncation_side == "right" else tokens[-most:]


def _check_context(length: int, least: int, asked: int | None, context: int) -> None:
    """Raise RequestError unless the prompt of `length` tokens and its output fit into the context together.

    The output has at least `least` tokens. `asked` is the requested length: 0 if only the prompt is wanted, None if the
    output may end with the context.
    """
    if length >= context + (asked == 0):
        more = "" if asked == 0 else ", and at least one must be left for the completion"
        raise _too_long(context, f"your prompt has {length} tokens{more}")
    if asked and length + asked > context:
        raise _too_long(
            context, f"you requested {length + asked} tokens ({length} in the prompt, {asked} in the completion)"
        )
    if length + least > context:
        raise _too_long(context, f"you requested {length} tokens in the prompt and at least {least} in the completion")


def _too_long(context: int, what: str) -> RequestError:
    return RequestError(
        f"This model's maximum context length is {context} tokens. However, {what}. "
        "Please reduce the length of the prompt or completion.",
        "prompt",
        "context_length_exceeded",
    )
