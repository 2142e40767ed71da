"""The routes that do not generate: health, metrics, models, tokens."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, ProcessCollector, generate_latest
from starlette.responses import Response
from starlette.types import ASGIApp

import gapless
from gapless.base.errors import RequestError
from gapless.engine.seam import AdapterChange
from gapless.server.conversation import chat_prompt
from gapless.server.dialects.messages.errors import in_messages_api
from gapless.server.endpoint import HttpCall, json_response
from gapless.server.errors import ApiError, model_not_found
from gapless.server.metrics import EngineNumbers
from gapless.server.protocol import (
    AbortRequests,
    DetokenizeRequest,
    LoadAdapterRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
    UpdateWeightsRequest,
    parse_plain,
)
from gapless.server.state import ServerState
from gapless.text.incremental import whole_text

_STARTED = int(time.time())
_PROCESS = ProcessCollector(registry=None)
"""Memory, processor time and open files of this process, which is the first front's"""


async def health(call: HttpCall) -> ASGIApp:
    """Answer 200 while the engine works, also while the last requests drain; 503 while it loads or is down."""
    if not (call.state.stopping and call.state.llm.started and call.state.llm.is_ready):
        call.state.check_open(explains=True)
    engines = call.state.llm.backend.engines
    if len(engines) == 1:
        return Response()
    return json_response({"engines": len(engines), "ready": sum([one.ready() for one in engines])})


async def ready(call: HttpCall) -> ASGIApp:
    """Answer 200 while new requests are accepted."""
    call.state.check_open(explains=True)
    return Response()


async def metrics_page(call: HttpCall) -> ASGIApp:
    """Answer with the metrics in Prometheus' text format."""
    state = call.state
    info = state.llm.info if state.llm.started else None
    up = state.llm.is_ready and not state.stopping
    detok_seconds = state.llm.detok_seconds + state.others.detok_ns / 1e9
    backend = state.llm.backend
    engines = [
        EngineNumbers(one.stats(), one.info, one.ready() and not state.stopping, backend.placed_by(number))
        for number, one in enumerate(backend.engines if info and len(backend.engines) > 1 else ())
    ]
    page = state.metrics.render(state.llm.stats(), info, up, detok_seconds, engines)
    return Response(page + generate_latest(_PROCESS), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})


async def version(call: HttpCall) -> ASGIApp:
    """Answer with the version of gapless."""
    return json_response({"version": gapless.__version__})


async def load(call: HttpCall) -> ASGIApp:
    """Answer with the number of open generation requests."""
    return json_response({"server_load": call.state.open + call.state.others.open})


async def models(call: HttpCall) -> ASGIApp:
    """List the served names of the model."""
    state = call.state
    if in_messages_api(call.request.scope):
        cards = [_anthropic_card(name) for name in state.names]
        ends = {"has_more": False, "first_id": state.names[0], "last_id": state.names[-1]}
        return json_response({"data": cards, **ends})
    return json_response({"object": "list", "data": [_card(state, name) for name in state.names]})


async def model(call: HttpCall) -> ASGIApp:
    """Describe one of the served models."""
    name = call.request.path_params["name"]
    if name not in call.state.names:
        raise model_not_found(call.state.names)
    return json_response(_anthropic_card(name) if in_messages_api(call.request.scope) else _card(call.state, name))


async def other_kinds(call: HttpCall) -> ASGIApp:
    """Refuse with 404: models here generate text."""
    text = (
        f"{call.state.model_names[0]} generates text: this server has no model for {call.request.url.path}, which "
        "embeds, ranks, hears or draws; POST /v1/chat/completions or /v1/completions"
    )
    raise ApiError(404, text, code="not_found")


async def load_adapter(call: HttpCall) -> ASGIApp:
    """Load an adapter from below --lora-dir, and answer when requests may name it."""
    request = parse_plain(await call.json(), LoadAdapterRequest)
    name, path = request.lora_name, request.lora_path
    if not name.strip() or not name.isprintable() or name in call.state.model_names:
        raise RequestError("lora_name must be printable, and no name of the model itself", "lora_name")
    if not path:
        raise RequestError("lora_path must be a directory below that of --lora-dir", "lora_path")
    return await _changed(call.state, AdapterChange(name, path, request.load_inplace), "added")


async def unload_adapter(call: HttpCall) -> ASGIApp:
    """Unload an adapter; requests that are open keep it until they end."""
    request = parse_plain(await call.json(), UnloadAdapterRequest)
    return await _changed(call.state, AdapterChange(request.lora_name), "removed")


async def _changed(state: ServerState, change: AdapterChange, what: str) -> ASGIApp:
    state.check_open()
    await state.llm.change_adapter(change)
    return Response(f"Success: LoRA adapter '{change.name}' {what} successfully.", media_type="text/plain")


async def update_weights(call: HttpCall) -> ASGIApp:
    """Load the weights of a directory below --weights-dir, and answer when they are in use."""
    request = parse_plain(await call.json(), UpdateWeightsRequest)
    state, config = call.state, call.state.llm.config
    if config is None or config.weights_dir is None:
        raise RequestError("the weights of this engine are those of its start: start it with --weights-dir")
    state.check_open()
    root, directory = _below(config.weights_dir, request.model_path)
    try:
        await state.llm.update_weights(str(directory))
    except RequestError as error:
        raise RequestError(str(error).replace(f"{root}/", ""), error.param) from error
    state.weight_version = request.weight_version or request.model_path
    state.others.name_weights(state.weight_version)
    return json_response({"success": True, "message": f"the weights of {request.model_path} are in use"})


def _below(weights_dir: str, path: str) -> tuple[Path, Path]:
    """Return the directory of all weights, and that of these. Raises RequestError."""
    root = Path(weights_dir).expanduser().resolve()
    try:
        directory = (root / path).resolve()
    except (OSError, ValueError) as error:
        raise RequestError("model_path is no path", "model_path") from error
    if not directory.is_relative_to(root):
        raise RequestError("model_path must lie below the directory of --weights-dir", "model_path")
    return root, directory


async def pause(call: HttpCall) -> ASGIApp:
    """Hold requests until `/resume`: `mode` abort ends open ones, wait lets them end, keep stops them."""
    asked = call.request.query_params
    mode = "wait" if _flag(call, "wait_for_inflight_requests", False) else asked.get("mode", "abort")
    await call.state.llm.pause_generation(mode=mode, clear_cache=_flag(call, "clear_cache", True))
    return json_response({"status": "paused"})


async def resume(call: HttpCall) -> ASGIApp:
    """Resume the requests that `/pause` holds."""
    await call.state.llm.resume_generation()
    return json_response({"status": "resumed"})


async def is_paused(call: HttpCall) -> ASGIApp:
    """Answer whether `/pause` holds requests."""
    return json_response({"is_paused": await call.state.llm.is_paused()})


async def abort_requests(call: HttpCall) -> ASGIApp:
    """End the open requests that `request_ids` names, or all, with the finish reason abort."""
    wanted, state = parse_plain(await call.json(), AbortRequests).request_ids, call.state
    if wanted:
        count = await state.abort_named(wanted) + await state.others.abort(wanted)
    else:
        count = await state.llm.abort_all()
    return json_response({"status": "aborted", "aborted": count})


async def reset_prefix_cache(call: HttpCall) -> ASGIApp:
    """Empty the prefix cache on the device and in the host tier; requests that run keep their pages."""
    if _flag(call, "reset_external", False) and call.state.llm.info.tiers:
        raise RequestError("reset_external: tiers below the host tier and peers keep their pages", "reset_external")
    await call.state.llm.reset_prefix_cache()
    return json_response({"success": True, "message": "the prefix cache is empty"})


def _flag(call: HttpCall, name: str, default: bool) -> bool:
    """Return a field of the query. Raises RequestError where it is neither true nor false."""
    text = call.request.query_params.get(name, str(default)).lower()
    if text not in ("true", "false", "1", "0"):
        raise RequestError(f"{name} must be true or false, got {text[:40]!r}", name)
    return text in ("true", "1")


async def tokenize(call: HttpCall) -> ASGIApp:
    """Answer with the token ids of a prompt or of a conversation."""
    request = parse_plain(await call.json(), TokenizeRequest)
    state = call.state
    state.admit(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("give either prompt or messages", "prompt")
    if request.prompt is not None:
        tokens = await state.text_work(state.llm.encode(request.prompt, request.add_special_tokens))
    else:
        assert request.messages is not None
        prompt = await chat_prompt(
            state,
            request.messages,
            tools=request.tools,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            variables=request.chat_template_kwargs,
        )
        tokens = prompt["prompt_token_ids"]
    strings = [state.llm.tokenizer.token_str(token) for token in tokens] if request.return_token_strs else None
    limit = state.llm.info.max_model_len
    return json_response({"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": strings})


async def detokenize(call: HttpCall) -> ASGIApp:
    """Answer with the text of token ids."""
    request = parse_plain(await call.json(), DetokenizeRequest)
    state = call.state
    state.admit(request.model)
    limit = state.llm.info.vocab_size
    for token in request.tokens:
        if not 0 <= token < limit:
            raise RequestError(f"tokens must be from 0 to {limit - 1}", "tokens")
    whole = partial(whole_text, state.llm.tokenizer, request.tokens, skip_special_tokens=False)
    text = await state.text_work(state.llm.in_pool(whole))
    return json_response({"prompt": text})


async def tokenizer_info(call: HttpCall) -> ASGIApp:
    """Answer with the tokenizer's settings, special tokens and chat template."""
    return json_response(call.state.llm.tokenizer.info())


def _anthropic_card(name: str) -> dict[str, Any]:
    began = datetime.fromtimestamp(_STARTED, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": name, "display_name": name, "created_at": began}


def _card(state: ServerState, name: str) -> dict[str, Any]:
    limit = state.llm.info.max_model_len if state.llm.started else None
    root, adapter = state.model_names[0], state.adapter_of(name)  # never the path of a directory
    return {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "gapless",
        "root": name if adapter else root,
        "parent": root if adapter else None,
        "max_model_len": limit,
    }
