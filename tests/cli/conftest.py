"""A fake engine behind `gapless.LLM` and `gapless.AsyncLLM`: it echoes, and remembers what it was asked."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

import gapless
from gapless.base.params import SamplingParams


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
        self.given_up = 0
        self.error: BaseException | None = None
        self.start_error: Exception | None = None
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

        def get_default_sampling_params(self, **otherwise: Any) -> SamplingParams:
            return SamplingParams(**{**otherwise, "top_p": 0.75})

        def generate(self, prompts: list[str], params: Any, *, use_tqdm: bool) -> list[Any]:
            fake.calls.append(("generate", prompts, params))
            fake.bars.append(use_tqdm)
            return [output(p, f"raw {p}", fake.finish) for p in prompts]

        def chat(self, conversations: list[Any], params: Any, *, use_tqdm: bool) -> list[Any]:
            fake.calls.append(("chat", conversations, params))
            fake.bars.append(use_tqdm)
            return [output("x", f"you said {c[-1]['content']}", fake.finish) for c in conversations]

    class AsyncLLM:
        @classmethod
        def from_engine_args(cls, engine: dict[str, Any]) -> AsyncLLM:
            fake.open(**engine)
            return cls()

        async def start(self) -> None:
            if fake.start_error:
                raise fake.start_error

        def get_default_sampling_params(self, **otherwise: Any) -> SamplingParams:
            return SamplingParams(**{**otherwise, "top_p": 0.75})

        async def chat_prompt(self, messages: list[dict[str, str]]) -> dict[str, Any]:
            return {"messages": [dict(m) for m in messages]}

        async def stream(self, prompt: Any, params: SamplingParams) -> AsyncGenerator[Any]:
            fake.calls.append(("stream", prompt, params))
            text = f"and so {prompt}" if isinstance(prompt, str) else f"you said {prompt['messages'][-1]['content']}"
            words = text.split()
            try:
                for i, word in enumerate(words):
                    finish = "stop" if i == len(words) - 1 else None
                    yield SimpleNamespace(text=f"{' ' * bool(i)}{word}", token_ids=[i], finish_reason=finish)
            except GeneratorExit:
                fake.given_up += 1
                raise

        async def close(self) -> None:
            fake.closed += 1

    # By the dictionary: reading the old attribute would load the engine.
    monkeypatch.setitem(gapless.__dict__, "LLM", LLM)
    monkeypatch.setitem(gapless.__dict__, "AsyncLLM", AsyncLLM)
    for name in ("GAPLESS_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return fake
