"""POST /v1/responses: a conversation answered in items. Nothing is stored, so each request brings all of it."""

from __future__ import annotations

from starlette.types import ASGIApp

from gapless.server.auth import Access
from gapless.server.conversation import chat_prompt, rendered_job
from gapless.server.dialects.responses.answer import ResponseAnswer
from gapless.server.dialects.responses.request import ResponsesRequest, own_names
from gapless.server.endpoint import Dialect, HttpCall, RouteEntry
from gapless.server.errors import ApiError
from gapless.text.replies import ReplyForms
from gapless.text.tools import ToolUse, check_tools


async def responses(call: HttpCall) -> ASGIApp:
    """Answer a conversation in items: reasoning, messages and calls of tools. Nothing is stored."""
    request = await call.parsed(ResponsesRequest)
    request.check()
    state = call.state
    call.model = state.admit(request.model)
    with own_names():
        use = _tool_use(request, state.replies)
        params = request.params(state.llm.front.defaults)
        messages = await state.text_work(state.llm.in_pool(request.messages))
        prompt = await chat_prompt(state, messages, tools=use.tools or None, variables=request.variables())
        return ResponseAnswer(await rendered_job(call, request, use, params, prompt), request)


async def stored_responses(call: HttpCall) -> ASGIApp:
    """Refuse with 404: responses are not stored."""
    if call.request.method == "POST" and not call.request.url.path.endswith("/cancel"):
        raise ApiError(404, "there is no such route; POST goes to /v1/responses alone", code="not_found")
    text = "responses are not stored here: keep the answer, and send its items in the next request's input"
    raise ApiError(404, text, code="not_found")


def _tool_use(request: ResponsesRequest, replies: ReplyForms) -> ToolUse:
    # Functions are strict by default, if the model's way of writing calls lets them be.
    strict = replies.tools is not None and replies.tools.form is not None
    tools = request.chat_tools(strict)
    use = check_tools(list(tools.values()), request.chat_choice(), request.parallel_tool_calls, list(tools))
    custom = request.custom_names()
    own = {name: "format.definition" if name in custom else "parameters" for name in use.fields}
    return use._replace(fields={name: use.fields[name].replace("function.parameters", own[name]) for name in own})


RESPONSES = Dialect(
    (
        RouteEntry("/v1/responses", ("POST",), responses, Access.USER, ResponsesRequest, generates=True),
        RouteEntry("/v1/responses/{id:path}", ("GET", "DELETE", "POST"), stored_responses, Access.USER, listed=False),
    )
)
