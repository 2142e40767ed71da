"""The shapes of requests, as msgspec structs; numbers are range-checked by SamplingParams, once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import msgspec
import numpy as np

from gapless.base.errors import RequestError
from gapless.base.params import PARAMS, SamplingParams
from gapless.server.errors import log, unsupported
from gapless.server.forms import FormRequest

QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]
"""The conversation of the examples"""
MAX_JSON_DEPTH = 64
MAX_SEQUENCES = 256
_STEP = np.zeros(256, np.int8)
_STEP[list(b"[{")] = 1
_STEP[list(b"]}")] = -1

R = TypeVar("R", bound=msgspec.Struct)


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


_SAMPLING = tuple(entry for entry in PARAMS if entry.wire)
_SamplingFields: Any = msgspec.defstruct(
    "_SamplingFields",
    [(entry.name, entry.kind | None, None) for entry in _SAMPLING],
    bases=(FormRequest,),
    kw_only=True,
)
"""The sampling parameters of the registry; None if the request leaves them out."""


class GenerationRequest(_SamplingFields, kw_only=True):  # type: ignore[misc, call-arg]
    """Fields of every dialect whose own requests ask for a generation."""

    LOGPROBS: ClassVar[str] = "top_logprobs"
    """The field with the number of most likely tokens"""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    timings_per_token: bool | None = None
    """Whether the answer, and each event of a stream, has `timings`; llama.cpp's field"""
    return_meta_info: bool | None = None
    """Whether each choice has `meta_info`; SGLang's field"""
    kv_transfer_params: dict[str, Any] | None = None
    best_of: int | None = None

    def wanted_logprobs(self) -> int | None:
        """Return how many alternatives each sampled token gets; None when not asked for. Raises RequestError."""
        raise NotImplementedError

    def wanted_prompt_logprobs(self) -> int | None:
        """Return how many alternatives each prompt token gets; None when not asked for. Raises RequestError."""
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("prompt_logprobs come in one piece: set stream to false", "prompt_logprobs")
        wanted: int | None = self.prompt_logprobs
        return wanted

    def sampling(self, defaults: Mapping[str, Any], max_tokens: int | None) -> SamplingParams:
        """The checked parameters: the request's, else `defaults`, else the neutral value."""
        if self.best_of not in (None, self.n or 1):
            raise RequestError("best_of must be equal to n: all completions are returned, none is chosen", "best_of")
        given = {entry.name: getattr(self, entry.name) for entry in _SAMPLING}
        asked = {name: value for name, value in given.items() if value is not None}
        asked |= {"logprobs": self.wanted_logprobs(), "prompt_logprobs": self.wanted_prompt_logprobs()}
        asked |= {"structured_outputs": self.form()} | ({} if max_tokens is None else {"max_tokens": max_tokens})
        if max_tokens == 1 and (self.kv_transfer_params or {}).get("do_remote_decode"):
            asked.pop("min_tokens", None)  # vllm-router adds it, also to forms, which exclude it
        if asked.get("min_tokens", 0) > defaults.get("max_tokens", 0):
            asked.setdefault("max_tokens", None)  # more than the model's own limit is asked for
        return SamplingParams.from_dict({"max_tokens": None, **defaults, **asked})

    def usage_wanted(self) -> tuple[bool, bool]:
        """(a usage chunk at the end, usage in every chunk) by the stream options. Raises RequestError."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is for streams: set stream to true, or leave it out", "stream_options")
        options = self.stream_options or StreamOptions()
        return bool(options.include_usage), bool(options.continuous_usage_stats)


def check_scored_only(params: SamplingParams) -> None:
    """Raise RequestError for a form of output where a prompt is only scored."""
    if params.structured_outputs is not None:
        field = params.structured_outputs.where
        raise RequestError(f"{field} has nothing to form where max_tokens is 0: leave one of them out", field)


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Either a prompt or messages."""

    EXAMPLE: ClassVar = {"prompt": "12 + 30 ="}
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    EXAMPLE: ClassVar = {"tokens": [1, 2, 3]}
    tokens: list[int]
    model: str | None = None


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    EXAMPLE: ClassVar = {"lora_name": "tone", "lora_path": "tone"}
    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    """Clients of other servers may give a `lora_int_id` too; it is ignored."""

    EXAMPLE: ClassVar = {"lora_name": "tone"}
    lora_name: str


class AbortRequests(msgspec.Struct, kw_only=True):
    """Ids are those of answers, the clients' X-Request-Id, or a request's request_id; none stands for all requests."""

    EXAMPLE: ClassVar = {"request_ids": ["chatcmpl-1"]}
    request_ids: list[str] | None = None


class UpdateWeightsRequest(msgspec.Struct, kw_only=True):
    """Clients of other servers may give more; it is ignored."""

    EXAMPLE: ClassVar = {"model_path": "step-100"}
    model_path: str
    weight_version: str | None = None
    """Name of these weights in answers; default: model_path"""


_IGNORED = {
    *("user", "metadata", "client_metadata", "safety_identifier", "service_tier", "inference_geo", "store"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "cache_control", "context_management"),
    *("session_id", "routed_experts_prompt_start", "media_io_kwargs", "mm_processor_kwargs"),
    *("verbosity", "max_tool_calls", "prediction", "spaces_between_special_tokens", "kv_transfer_params"),
}
"""Labels and hints that change no token: taken and left alone."""
_SWITCHES = ("use_beam_search", "return_tokens_as_token_ids", "echo", "watermarking", "return_hidden_states")
_LISTS = ("functions", "documents", "mcp_servers", "logprob_token_ids", "vllm_xargs", "stop_regex")
_OBJECTS = (
    *("suffix", "audio", "web_search_options", "chat_template", "prompt_embeds"),
    *("repetition_detection", "lora_request", "container"),
    *("grammar", "json_schema", "regex", "ebnf", "structural_tag"),  # of routes that have another field for forms
)
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_SWITCHES, (None, False)),
    **dict.fromkeys(_LISTS, (None, [], {})),
    **dict.fromkeys(_OBJECTS, (None,)),
    **dict.fromkeys(("length_penalty", "typical_p", "tfs_z"), (None, 1)),
    **dict.fromkeys(
        ("mirostat", "dry_multiplier", "xtc_probability", "dynatemp_range", "no_repeat_ngram_size"), (None, 0)
    ),
    "top_n_sigma": (None, -1, 0),
    "top_logprobs": (None, 0),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
}
"""Fields known to the API, not to this engine: only these values, which ask for nothing, are taken."""

_warned: set[str] = set()
_MAX_WARNED = 200
_TOP = msgspec.json.Decoder(dict[str, msgspec.Raw])
"""Made once: a decoder of a dict, unlike that of a Struct, is not cached by msgspec."""


def parse(body: bytes, kind: type[R]) -> R:
    """A request of `kind`. Raises msgspec's errors for a wrong shape and RequestError for an unsupported wish."""
    request = parse_plain(body, kind)
    _check_extras(_TOP.decode(body), kind)
    return request


def parse_plain(body: bytes, kind: type[R]) -> R:
    """A small request without generation fields."""
    check_depth(body)
    return msgspec.json.decode(body, type=kind)


def check_depth(body: bytes) -> None:
    """Refuse JSON nested deeper than 64 levels: without recursion, in time proportional to its length."""
    if body.count(b"[") + body.count(b"{") <= MAX_JSON_DEPTH:
        return
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # now every quote begins or ends a string
    codes = np.frombuffer(plain, np.uint8)
    inside = np.cumsum(codes == ord('"'), dtype=np.uint8) & 1
    depth = np.cumsum(np.where(inside, 0, _STEP[codes]), dtype=np.int32)
    if depth.max() > MAX_JSON_DEPTH:
        raise RequestError(f"the body is nested deeper than {MAX_JSON_DEPTH} levels", code="too_deep")


def _check_extras(fields: dict[str, msgspec.Raw], kind: type[Any]) -> None:
    for name in fields.keys() - set(kind.__struct_fields__):
        if name in UNSUPPORTED:
            value = msgspec.json.decode(fields[name])
            if not any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in UNSUPPORTED[name]):
                raise unsupported(name)
        elif name not in _IGNORED and name not in _warned and len(_warned) < _MAX_WARNED:
            _warned.add(name)
            log.warning("unknown request field %r is ignored (said once)", name[:80])
