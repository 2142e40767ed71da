"""What all handlers share: the engine, its tokenizer, the settings, the numbers, and whether work is welcome."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Any, TypeVar

from gapless.base.errors import QueueFullError, RequestError
from gapless.engine.async_llm import AsyncLLM
from gapless.server.config import ServerConfig
from gapless.server.errors import ApiError, draining, engine_down, loading
from gapless.server.metrics import Metrics

T = TypeVar("T")

TEXT_THREADS = 2
MAX_TEXT_JOBS = 512
"""Requests whose text is being made into tokens, or waits for that; more are refused."""
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p")


class Condition(Enum):
    """What the server can do now."""

    LOADING = "loading"
    SERVING = "serving"
    DOWN = "down"
    DRAINING = "draining"


class State:
    """One server. All methods run on the event loop's thread."""

    def __init__(
        self,
        llm: AsyncLLM,
        config: ServerConfig,
        *,
        model_names: tuple[str, ...] = (),
        generation_config: Mapping[str, Any] | None = None,
    ) -> None:
        self.llm = llm
        self.config = config
        self.model_names = model_names or ("model",)
        given = generation_config or {}
        self.sampling_defaults = {name: given[name] for name in _DEFAULTS if given.get(name) is not None}
        self.metrics = Metrics(self.model_names[0])
        self.loaded = False
        """True once the engine has come up for the first time."""
        self.stopping = False
        self.closing = asyncio.Event()
        """Set when the time to drain is over: open requests end with an error."""
        self.open = 0
        """Generation requests that have not ended."""
        self._pool = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="text")
        self._jobs = 0

    def condition(self) -> Condition:
        if self.stopping:
            return Condition.DRAINING
        if not self.loaded:
            return Condition.LOADING
        return Condition.SERVING if self.llm.is_ready else Condition.DOWN

    def refusal(self) -> ApiError | None:
        """Why new work is not taken now; None when it is."""
        makers: dict[Condition, Callable[[], ApiError]] = {
            Condition.DRAINING: draining,
            Condition.LOADING: loading,
            Condition.DOWN: engine_down,
        }
        maker = makers.get(self.condition())
        return maker() if maker else None

    def admit(self, model: str | None) -> str:
        """The name under which to answer. Raises ApiError when no work is taken or the model is not served here."""
        refusal = self.refusal()
        if refusal is not None:
            raise refusal
        if model is None or model in self.model_names:
            return model or self.model_names[0]
        served = ", ".join(self.model_names)
        raise ApiError(404, f"the model is not served here; served: {served}", param="model", code="model_not_found")

    def check_length(self, characters: int, param: str) -> None:
        """Refuse a text that cannot fit whatever its tokens are: before any work is spent on it."""
        limit = self.llm.info.max_model_len
        if characters > limit * self.llm.tokenizer.max_token_bytes:
            raise RequestError(
                f"{param} is longer than the model's context of {limit} tokens", param, "context_length_exceeded"
            )

    async def in_pool(self, work: Callable[[], T]) -> T:
        """Run text work off the event loop. Raises QueueFullError when too much of it waits."""
        if self._jobs >= MAX_TEXT_JOBS:
            raise QueueFullError("too much text waits to be tokenised")
        self._jobs += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._jobs -= 1

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"
