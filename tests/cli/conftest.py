"""A fake engine behind `gapless.LLM` and `gapless.AsyncLLM`: it echoes, and remembers what it was asked."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

import gapless


def output(prompt: str, text: str, finish: str | None = "stop") -> Any:
    done = SimpleNamespace(text=text, token_ids=list(range(len(text.split()))), finish_reason=finish)
    return SimpleNamespace(prompt=prompt, prompt_token_ids=[0] * len(prompt), outputs=[done])


class Fake:
    """What the fakes were asked, and how they are to behave."""

    def __init__(self) -> None:
        self.engines: list[dict[str, Any]] = []
        self.calls: list[tuple[str, Any, Any]] = []
        self.bars: list[bool] = []
        self.closed = 0
        self.error: BaseException | None = None
        self.finish = "stop"

    def open(self, **engine: Any) -> None:
        self.engines.append(engine)
        if self.error:
            raise self.error


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    fake = Fake()

    class LLM:
        def __init__(self, **engine: Any) -> None:
            fake.open(**engine)

        def __enter__(self) -> LLM:
            return self

        def __exit__(self, *_: object) -> None:
            fake.closed += 1

        def generate(self, prompts: list[str], params: Any, *, use_tqdm: bool) -> list[Any]:
            fake.calls.append(("generate", prompts, params))
            fake.bars.append(use_tqdm)
            return [output(p, f"raw {p}", fake.finish) for p in prompts]

        def chat(self, conversations: list[Any], params: Any, *, use_tqdm: bool) -> list[Any]:
            fake.calls.append(("chat", conversations, params))
            fake.bars.append(use_tqdm)
            return [output("x", f"you said {c[-1]['content']}", fake.finish) for c in conversations]

    class AsyncLLM:
        def __init__(self, **engine: Any) -> None:
            fake.open(**engine)

        async def chat(self, messages: list[Any], params: Any) -> AsyncGenerator[Any]:
            fake.calls.append(("chat", [dict(m) for m in messages], params))
            async for item in self._words(f"you said {messages[-1]['content']}"):
                yield item

        async def generate(self, prompt: str, params: Any) -> AsyncGenerator[Any]:
            fake.calls.append(("generate", prompt, params))
            async for item in self._words(f"and so {prompt}"):
                yield item

        async def _words(self, text: str) -> AsyncGenerator[Any]:
            words = text.split()
            for i in range(1, len(words) + 1):
                yield output("", " ".join(words[:i]), "stop" if i == len(words) else None)

        async def close(self) -> None:
            fake.closed += 1

    # By the dictionary: reading the old attribute would load the engine.
    monkeypatch.setitem(gapless.__dict__, "LLM", LLM)
    monkeypatch.setitem(gapless.__dict__, "AsyncLLM", AsyncLLM)
    for name in ("GAPLESS_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return fake
