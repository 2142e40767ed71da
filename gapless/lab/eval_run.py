"""Asks the questions of a server, or of an engine in this process, many at once. What fails is an answer too."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from gapless.base.config import flag
from gapless.base.errors import QueueFullError, RequestError
from gapless.base.params import SamplingParams
from gapless.engine.progress import Advance
from gapless.lab import probe
from gapless.lab.datasets import Prompt
from gapless.lab.eval_questions import MATCHES, Question, chat_messages, completion_prompt, examples_for
from gapless.lab.http import Client
from gapless.lab.load import run_load
from gapless.lab.records import Sample
from gapless.lab.target import BACKENDS, PromptContent, RequestFlags, Target, result_flag, server_flag

if TYPE_CHECKING:
    from gapless.engine.async_llm import AsyncLLM

DEMO_DATA = "demo"
STOP = ("Question:",)
"""Ends a completion that adds a question of its own, as in lm-eval. A chat ends by itself."""
_data, _answer_flag = (partial(flag, group=group) for group in ("Questions", "Answers"))


@dataclass(frozen=True)
class EvalFlags(RequestFlags):
    """The questions, and how answers are judged. The model runs in this process unless base_url names a server."""

    concurrency: int = server_flag(32, "questions under way at most", aliases=("--max-concurrency",), low=1, high=2**31)

    data: str = _data(
        DEMO_DATA,
        "JSON lines of questions; demo or demo:SEED: held-out problems of the demo model, in order or shuffled",
        aliases=("--dataset-path",),
    )
    num_questions: int | None = _data(
        None, "ask only the first N questions; default: all, 300 of demo", aliases=("--limit",), low=1, high=10**6
    )
    shots: int = _data(0, "worked examples before each question", aliases=("--num-fewshot",), low=0, high=1000)
    shots_file: str | None = _data(
        None, "JSON lines of examples; default: the first lines of --data, which are not asked then"
    )
    shots_as_turns: bool = _data(True, "in a chat, examples are turns of it", aliases=("--fewshot-as-multiturn",))

    max_tokens: int = _answer_flag(
        512, "most tokens of an answer", aliases=("--max-new-tokens", "--max-gen-toks"), low=1, high=2**31
    )

    match: str = result_flag("flexible", "the rule that decides who is right", choices=MATCHES)
    min_accuracy: float | None = result_flag(None, "exit with 1 below this, from 0 to 1", low=0, high=1)

    @property
    def chat(self) -> bool:
        return BACKENDS[self.backend] == "openai-chat"

    @property
    def stop(self) -> tuple[str, ...]:
        return () if self.chat else STOP

    def content(self, question: Question, pool: Sequence[Question]) -> PromptContent:
        """The prompt of a question."""
        shots = examples_for(question, pool, self.shots)
        return chat_messages(question, shots, self.shots_as_turns) if self.chat else completion_prompt(question, shots)


def prompt_hash(content: PromptContent) -> str:
    """SHA-256 of the prompt's JSON, in hex: equal hashes were asked the same."""
    return hashlib.sha256(json.dumps(content, ensure_ascii=True).encode()).hexdigest()


async def ask_server(
    client: Client, flags: EvalFlags, contents: Sequence[PromptContent], advance: Advance
) -> tuple[Target, Sequence[Sample]]:
    """The target with its model's name, and an answer to each prompt in order, after a cancellation to prompts that had
    ended. Nothing is asked twice.

    Raises ServerError when the server is not there, has no such model, or refuses a first question in any form.
    """
    target, model = client.target, await probe.pick_model(client)
    stop = {"stop": list(flags.stop)} if flags.stop else {}
    body = {"temperature": flags.temperature, **stop, **target.extra_body}
    client.target = replace(target, model=model.name, ignore_eos=False, extra_body=body)
    client.target = target = await probe.try_fields(client, "Hello", 1)
    prompts = [Prompt(place, content, 0, flags.max_tokens) for place, content in enumerate(contents)]
    zeros = [0.0] * len(prompts)
    run = await run_load(client, prompts, zeros, concurrency=flags.concurrency, advance=advance, keep=True)
    return target, run.samples


async def ask_engine(
    llm: AsyncLLM, flags: EvalFlags, contents: Sequence[PromptContent], advance: Advance
) -> list[Sample]:
    """An answer to each prompt in order, at most `flags.concurrency` under way. Raises EngineError when it dies."""
    params = SamplingParams(temperature=flags.temperature, max_tokens=flags.max_tokens, stop=flags.stop)
    gate, done = asyncio.Semaphore(flags.concurrency), 0

    async def one(content: PromptContent) -> Sample:
        nonlocal done
        async with gate:
            answered = await _answer(llm, content, params)
        done += 1
        advance(done)
        return answered

    return list(await asyncio.gather(*map(one, contents)))


async def _answer(llm: AsyncLLM, content: PromptContent, params: SamplingParams) -> Sample:
    texts, tokens, finish = list[str](), 0, ""
    try:
        prompt = content if isinstance(content, str) else await llm.chat_prompt([dict(m) for m in content])  # type: ignore[arg-type]
        async for delta in llm.stream(prompt, params):
            texts.append(delta.text)
            tokens += len(delta.token_ids)
            finish = delta.finish_reason or finish
        failed = "the model's numbers were not finite" if finish == "error" else ""
    except (RequestError, QueueFullError) as error:
        failed = str(error)
    return Sample(text="".join(texts), finish=finish, output_tokens=tokens, error=failed)
