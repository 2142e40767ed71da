"""Asks the questions of a server, or of an engine in this process, many at once. What fails is an answer too."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from gapless.base.errors import ConfigError, QueueFullError, RequestError
from gapless.base.params import SamplingParams
from gapless.lab import probe
from gapless.lab.datasets import Prompt
from gapless.lab.eval_questions import Question, chat_messages, completion_prompt, examples_for
from gapless.lab.http import Client, Connect
from gapless.lab.load import Advance, run_load
from gapless.lab.target import Content, Target

if TYPE_CHECKING:
    from gapless.engine.async_llm import AsyncLLM

STOP = ("Question:",)
"""Ends a completion that goes on with a question of its own, as in lm-eval. A chat ends by itself."""


@dataclass(frozen=True)
class Task:
    """How every question is asked. `turns`: examples are turns of the chat."""

    chat: bool = False
    shots: int = 0
    turns: bool = True
    max_tokens: int = 512
    temperature: float = 0.0
    concurrency: int = 32

    def __post_init__(self) -> None:
        for name, low in (("shots", 0), ("max_tokens", 1), ("concurrency", 1)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name} must be at least {low}, got {getattr(self, name)}")

    def content(self, question: Question, pool: Sequence[Question]) -> Content:
        """What is sent for a question."""
        shots = examples_for(question, pool, self.shots)
        return chat_messages(question, shots, self.turns) if self.chat else completion_prompt(question, shots)

    @property
    def stop(self) -> tuple[str, ...]:
        return () if self.chat else STOP


class Answered(NamedTuple):
    """One answer. `error` says why there is none, or only a part of one."""

    text: str
    finish: str = ""
    output_tokens: int = 0
    error: str = ""


def prompt_hash(content: Content) -> str:
    """SHA-256 of the prompt's JSON, in hex: equal hashes were asked the same."""
    return hashlib.sha256(json.dumps(content, ensure_ascii=True).encode()).hexdigest()


async def ask_server(
    target: Target, task: Task, contents: Sequence[Content], advance: Advance, connect: Connect | None = None
) -> tuple[Target, list[Answered]]:
    """The target with its model's name, and an answer to each prompt in order. Nothing is asked twice.

    Raises ServerError when the server is not there, has no such model, or refuses a first question in any form.
    """
    async with Client(target, connect) as client:
        model = await probe.pick_model(client)
        client.target = target = _aimed(target, model.name, task)
        client.target = target = await probe.try_fields(client, "Hello", 1)
        prompts = [Prompt(place, content, 0, task.max_tokens) for place, content in enumerate(contents)]
        zeros = [0.0] * len(prompts)
        run = await run_load(target, prompts, zeros, concurrency=task.concurrency, advance=advance, client=client)
    return target, [Answered(s.text, s.finish, s.output_tokens, s.error) for s in run.samples]


def _aimed(target: Target, model: str, task: Task) -> Target:
    stop = {"stop": list(task.stop)} if task.stop else {}
    body = {"temperature": task.temperature, **stop, **target.extra_body}
    return replace(target, model=model, ignore_eos=False, extra_body=body)


async def ask_engine(llm: AsyncLLM, task: Task, contents: Sequence[Content], advance: Advance) -> list[Answered]:
    """An answer to each prompt in order, at most `task.concurrency` under way. Raises EngineError when it dies."""
    params = SamplingParams(temperature=task.temperature, max_tokens=task.max_tokens, stop=task.stop)
    gate, done = asyncio.Semaphore(task.concurrency), 0

    async def one(content: Content) -> Answered:
        nonlocal done
        async with gate:
            answered = await _answer(llm, content, params)
        done += 1
        advance(done)
        return answered

    return list(await asyncio.gather(*map(one, contents)))


async def _answer(llm: AsyncLLM, content: Content, params: SamplingParams) -> Answered:
    texts, tokens, finish = list[str](), 0, ""
    try:
        prompt = content if isinstance(content, str) else await llm.chat_prompt([dict(m) for m in content])  # type: ignore[arg-type]
        async for delta in llm.stream(prompt, params):
            texts.append(delta.text)
            tokens += len(delta.token_ids)
            finish = delta.finish_reason or finish
    except (RequestError, QueueFullError) as error:
        return Answered("".join(texts), finish, tokens, str(error))
    return Answered("".join(texts), finish, tokens, "the model's numbers were not finite" if finish == "error" else "")
