"""An engine over the demo model on a thread, whose core a test can see."""

from __future__ import annotations

from typing import Any

from gapless.base.config import EngineConfig
from gapless.engine.async_llm import AsyncLLM
from gapless.engine.core import EngineCore
from gapless.engine.outputs import CompletionOutput
from gapless.engine.stream import OutputStream
from gapless.engine.thread_backend import ThreadBackend
from gapless.engine.wiring import build_core


class SeenEngine:
    """`core` is there once the engine has started."""

    core: EngineCore

    def __init__(self, **options: Any) -> None:
        config = EngineConfig("demo", **options)

        def build() -> EngineCore:
            self.core = build_core(config)
            return self.core

        self.llm = AsyncLLM.from_config(config, ThreadBackend(build))


async def whole(stream: OutputStream) -> tuple[CompletionOutput, int]:
    """Read a stream to its end; return its only completion, and how many prompt tokens were cached."""
    while not stream.finished:
        await stream.next()
    output = stream.snapshot()
    return output.outputs[0], output.num_cached_tokens
