"""A workload as one record: which data set, how long, how many; and the prompts that it stands for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from gapless.base.errors import ConfigError
from gapless.lab.dataset_files import Sampling, custom_prompts, sharegpt_prompts, trace_prompts
from gapless.lab.datasets import IdSource, Lengths, Prompt, Source, WordSource, multi_turn_prompts, prefix_prompts
from gapless.lab.datasets import random_prompts as make_random
from gapless.lab.http import Client
from gapless.lab.target import Target
from gapless.lab.words import PromptSource, exact, id_source, word_source

MADE_UP = ("random", "shared_prefix", "multi_turn")
FROM_FILES = ("custom", "sharegpt", "timed_trace")
DATASETS = (*MADE_UP, *FROM_FILES)
WARM_UP_SEED = 1 << 40
"""Warm-up prompts share nothing with those that are measured, or the prefix cache would know them."""


@dataclass(frozen=True)
class Workload:
    """Lengths are in tokens. A seed fixes everything."""

    dataset: str = "random"
    num_prompts: int = 128
    seed: int = 0
    path: str = ""
    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0
    """Tokens that prompts begin with in common, on top of the input length."""
    prefixes: int = 10
    """How many beginnings shared_prefix has."""
    zipf: float = 1.0
    """The k-th of them is used with weight 1 / k^zipf."""
    turns: int = 4
    pause: float = 0.0
    """Seconds between an answer and the next turn."""
    block: int = 512
    """Tokens that one hash id of a trace stands for."""
    seconds_per_tick: float = 0.001
    self_timed: bool = True
    """A trace is replayed at its own times."""
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.dataset not in DATASETS:
            raise ConfigError(f"dataset-name must be one of {', '.join(DATASETS)}, got {self.dataset!r}")
        if self.dataset in FROM_FILES and not self.path:
            raise ConfigError(f"the data set {self.dataset} needs a file: --dataset-path FILE")
        if self.dataset in MADE_UP and self.path:
            raise ConfigError(f"the data set {self.dataset} is made up; a file goes with {', '.join(FROM_FILES)}")
        lowest = _LOWEST | (_LOWEST_OF_FILES if self.dataset in FROM_FILES else {})
        for name, low in lowest.items():
            if not low <= getattr(self, name) < 1 << 31:
                raise ConfigError(f"{name.replace('_', '-')} must be at least {low}, got {getattr(self, name)}")
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(f"range-ratio must be from 0 to below 1, got {self.range_ratio}")

    @property
    def own_times(self) -> bool:
        """The data set itself says when requests are sent."""
        return self.dataset == "timed_trace" and self.self_timed

    @property
    def inputs(self) -> Lengths:
        return Lengths(self.input_len, self.range_ratio)

    @property
    def outputs(self) -> Lengths:
        return Lengths(self.output_len, self.range_ratio)


_LOWEST = {
    **{"num_prompts": 1, "input_len": 1, "output_len": 1, "prefix_len": 0, "prefixes": 1},
    **{"zipf": 0, "turns": 1, "pause": 0, "block": 1, "seconds_per_tick": 0},
}
_LOWEST_OF_FILES = {"num_prompts": 0, "output_len": 0}
"""0 prompts: each line once. 0 output tokens: as the file says."""


class Prepared(NamedTuple):
    """Prompts to measure with, prompts to warm up with, and what the lengths rest on."""

    prompts: list[Prompt]
    warm_up: list[Prompt]
    note: str = ""


async def prepare(work: Workload, client: Client, *, tokenizer: str | None = None, warm_ups: int = 1) -> Prepared:
    """The prompts, as ids for completions and as text for chat and for conversations.

    Raises ConfigError for a file that is wrong, ServerError where the server has to be asked and does not answer.
    """
    target = client.target
    found = PromptSource(IdSource(()))
    if work.dataset == "multi_turn" or target.chat:
        # What a file holds may be text of its own; what is made up and warm-ups are words.
        found = await word_source(client, tokenizer)
    else:
        found = await id_source(client, tokenizer)
    prompts = build(work, found.source)
    if found.codec and work.dataset not in ("custom", "sharegpt"):
        prompts = await exact(found.codec, prompts)
    _check(prompts, target)
    return Prepared(prompts, warm_up_prompts(prompts, found.source, warm_ups), found.note)


def build(work: Workload, source: Source) -> list[Prompt]:
    """The prompts of a workload. Raises ConfigError for a file that is wrong."""
    how = Sampling(work.num_prompts, work.seed, work.shuffle)
    path = Path(work.path)
    if work.dataset == "custom":
        return custom_prompts(path, work.output_len, how)
    if work.dataset == "sharegpt":
        return sharegpt_prompts(path, work.output_len, how)
    if work.dataset == "timed_trace":
        return trace_prompts(
            path,
            source,
            work.num_prompts,
            block=work.block,
            scale=work.seconds_per_tick,
            timed=work.self_timed,
            seed=work.seed,
        )
    if work.dataset == "multi_turn":
        assert isinstance(source, WordSource), "turns are text"
        return multi_turn_prompts(
            source, work.num_prompts, work.turns, work.inputs, work.outputs, pause=work.pause, seed=work.seed
        )
    if work.dataset == "shared_prefix":
        return prefix_prompts(
            source,
            work.num_prompts,
            prefixes=work.prefixes,
            prefix_len=work.prefix_len,
            suffix_len=work.input_len,
            output_len=work.output_len,
            zipf=work.zipf,
            seed=work.seed,
        )
    return make_random(source, work.num_prompts, work.inputs, work.outputs, prefix_len=work.prefix_len, seed=work.seed)


def warm_up_prompts(prompts: list[Prompt], source: Source, count: int) -> list[Prompt]:
    """Warm-up prompts: as long as the measured ones, with other tokens."""
    known = sorted(p.input_len for p in prompts if p.input_len) or [64]
    outputs = sorted(p.output_len for p in prompts)
    middle, output = known[len(known) // 2], outputs[len(outputs) // 2]
    return make_random(source, count, Lengths(middle), Lengths(output), seed=WARM_UP_SEED)


def _check(prompts: list[Prompt], target: Target) -> None:
    for prompt in prompts:
        ids = isinstance(prompt.content, tuple) and bool(prompt.content) and isinstance(prompt.content[0], int)
        messages = isinstance(prompt.content, tuple) and not ids
        if ids and target.chat:
            raise ConfigError("a prompt of token ids cannot be sent to chat: use --backend openai")
        if messages and not target.chat:
            raise ConfigError("messages need the chat API: use --backend openai-chat")
