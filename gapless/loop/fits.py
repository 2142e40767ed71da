"""Whether a request can run at all in an engine of these sizes."""

from __future__ import annotations

from gapless.base.errors import RequestError
from gapless.base.records import Request
from gapless.memory.pages import PagePool
from gapless.memory.rows import RowTable


def check_fits(request: Request, pool: PagePool, rows: RowTable) -> None:
    """Raise RequestError where the request has no prompt, leaves no room for a token, or exceeds pages or rows."""
    if not 0 < len(request.tokens) < request.max_len:
        raise RequestError(
            f"the prompt has {len(request.tokens)} tokens: at least one is needed, and fewer than the "
            f"{request.max_len} of prompt and output together", "prompt")  # fmt: skip
    pages = -(-(request.max_len - 1) // pool.page_size)
    if pages > pool.size or request.max_len > rows.tokens.shape[1]:
        room = min(pool.size * pool.page_size + 1, rows.tokens.shape[1])
        raise RequestError(
            f"prompt and output need {request.max_len} tokens of KV memory, the engine has {room}: "
            "shorten the prompt or max_tokens", "max_tokens")  # fmt: skip
