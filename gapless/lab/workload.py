"""The prompts that a workload stands for, and what they are made of."""

from __future__ import annotations

from typing import NamedTuple

from gapless.base.errors import ConfigError
from gapless.lab.dataset_files import custom_prompts, sharegpt_prompts, trace_prompts
from gapless.lab.datasets import (
    Lengths,
    Prompt,
    Source,
    WordSource,
    Workload,
    multi_turn_prompts,
    prefix_prompts,
    random_prompts,
)
from gapless.lab.http import Client
from gapless.lab.target import Target
from gapless.lab.words import PromptSource, exact, id_source, word_source

WARM_UP_SEED = 1 << 40
"""Warm-up prompts share nothing with those that are measured, or the prefix cache would know them."""


class Prepared(NamedTuple):
    """Prompts to measure with, prompts to warm up with, and what the lengths rest on."""

    prompts: list[Prompt]
    warm_up: list[Prompt]
    note: str = ""


async def prepare(work: Workload, client: Client, *, tokenizer: str | None = None, warm_ups: int = 1) -> Prepared:
    """The prompts, as ids for completions and as text for chat and for conversations.

    Raises ConfigError for a file that is wrong, ServerError where the server has to be asked and does not answer.
    """
    found = await find_source(work, client, tokenizer)
    prompts = await cut(work, found, build(work, found.source), client)
    _check(prompts, client.target)
    return Prepared(prompts, warm_up_prompts(prompts, found.source, warm_ups), found.note)


async def find_source(work: Workload, client: Client, tokenizer: str | None) -> PromptSource:
    """Return where made-up prompts come from: token ids, or words where the API or the data set needs text."""
    wants_text = work.dataset == "multi_turn" or client.target.chat
    return await (word_source if wants_text else id_source)(client, tokenizer)


async def cut(work: Workload, found: PromptSource, prompts: list[Prompt], client: Client) -> list[Prompt]:
    """Cut made-up texts to their lengths, where tokens can be counted."""
    if found.codec is None or work.dataset in ("custom", "sharegpt"):
        return prompts
    return await exact(found.codec(client), prompts)


def build(work: Workload, source: Source) -> list[Prompt]:
    """The prompts of a workload. Raises ConfigError for a file that is wrong."""
    if work.dataset == "custom":
        return custom_prompts(work)
    if work.dataset == "sharegpt":
        return sharegpt_prompts(work)
    if work.dataset == "timed_trace":
        return trace_prompts(source, work)
    if work.dataset == "multi_turn":
        assert isinstance(source, WordSource), "turns are text"
        return multi_turn_prompts(source, work)
    if work.dataset == "shared_prefix":
        return prefix_prompts(source, work)
    return random_prompts(
        source, work.num_prompts, work.inputs, work.outputs, prefix_len=work.prefix_len, seed=work.seed
    )


def warm_up_prompts(prompts: list[Prompt], source: Source, count: int) -> list[Prompt]:
    """Warm-up prompts: as long as the measured ones, with other tokens."""
    known = sorted(p.input_len for p in prompts if p.input_len) or [64]
    outputs = sorted(p.output_len for p in prompts)
    middle, output = known[len(known) // 2], outputs[len(outputs) // 2]
    return random_prompts(source, count, Lengths(middle), Lengths(output), seed=WARM_UP_SEED)


def _check(prompts: list[Prompt], target: Target) -> None:
    for prompt in prompts:
        ids = isinstance(prompt.content, tuple) and bool(prompt.content) and isinstance(prompt.content[0], int)
        messages = isinstance(prompt.content, tuple) and not ids
        if ids and target.chat:
            raise ConfigError("a prompt of token ids cannot be sent to chat: use --backend openai")
        if messages and not target.chat:
            raise ConfigError("messages need the chat API: use --backend openai-chat")
