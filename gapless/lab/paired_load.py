"""The same load for both arms: prompts, arrival times and request fields from one seed, whichever server gets them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from gapless.base.errors import ServerError
from gapless.lab.arms import Arm, Live
from gapless.lab.arrivals import Arrivals
from gapless.lab.datasets import Prompt, Source
from gapless.lab.http import Client
from gapless.lab.load import run_load
from gapless.lab.probe import one_reply, pick_model, try_fields
from gapless.lab.records import LoadRun
from gapless.lab.summary import METRICS, result_json, summarise
from gapless.lab.target import Target
from gapless.lab.words import id_source, word_source
from gapless.lab.workload import Workload, build

TOKEN_IDS = "return_token_ids"
"""A field that makes servers send the ids of what they generate."""


@dataclass(frozen=True)
class Load:
    """What every run plays. The workload's seed is the first pair's; pair k has seed + k."""

    work: Workload
    arrivals: Arrivals
    concurrency: int | None = 8
    backend: str = "openai"
    model: str = ""
    ignore_eos: bool = True
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None
    vocab_size: int | None = None
    timeout: float = 600.0

    def described(self) -> dict[str, Any]:
        """For the report."""
        work = self.work
        return {
            "dataset": work.dataset,
            "num_prompts": work.num_prompts,
            "input_len": work.input_len,
            "output_len": work.output_len,
            "range_ratio": work.range_ratio,
            "arrivals": self.arrivals.name,
            "max_concurrency": self.concurrency,
            "backend": self.backend,
            "ignore_eos": self.ignore_eos,
            "extra_body": dict(self.extra_body),
        }


class Played(NamedTuple):
    """One run."""

    load: LoadRun
    metrics: dict[str, float]


class PairedLoad:
    """Knows how each arm's server wants to be asked, and plays one run after the other."""

    def __init__(self, load: Load, arms: Sequence[Arm]) -> None:
        self._load = load
        self._arms = arms
        self._targets: list[Target] = []
        self._source: Source | None = None

    def meet(self, servers: Sequence[Live]) -> None:
        """Ask both servers for their model and for the fields they refuse; a field that one refuses neither gets.

        Raises:
            ServerError: one cannot be reached or has no such model.
        """
        found = asyncio.run(self._meet(servers))
        omit = tuple(sorted({name for target in found for name in target.omit}))
        self._targets = [replace(target, omit=omit) for target in found]

    async def _meet(self, servers: Sequence[Live]) -> list[Target]:
        return [await self._ask(arm, server) for arm, server in zip(self._arms, servers, strict=True)]

    async def _ask(self, arm: Arm, server: Live) -> Target:
        load = self._load
        target = Target(
            base_url=server.url, model=load.model, api_key=server.api_key, backend=load.backend, timeout=load.timeout,
            ignore_eos=load.ignore_eos, extra_body={TOKEN_IDS: True, **load.extra_body},
        )  # fmt: skip
        async with Client(target) as client:
            client.target = target = replace(target, model=(await pick_model(client)).name)
            if self._source is None:
                words = load.work.dataset == "multi_turn" or target.chat
                found = await (
                    word_source(client, load.tokenizer) if words else id_source(client, load.vocab_size, load.tokenizer)
                )
                self._source = found.source
            content = self.prompts(0)[0].content
            answer, _ = await one_reply(client, content, 1)
            if answer.status in (400, 422):
                client.target = replace(target, extra_body=load.extra_body)
            return await try_fields(client, content, 1)

    def prompts(self, pair: int) -> list[Prompt]:
        """Those of both runs of a pair."""
        assert self._source is not None, "meet() comes first"
        return build(replace(self._load.work, seed=self.seed(pair)), self._source)

    def seed(self, pair: int) -> int:
        return self._load.work.seed + pair

    def play(self, arm: int, pair: int) -> Played:
        """One run of load on arm 0 or 1.

        Raises:
            ServerError: no request succeeded.
        """
        prompts = self.prompts(pair)
        times = self._load.arrivals.times(len(prompts), self.seed(pair))
        target = self._targets[arm]
        run = asyncio.run(run_load(target, prompts, times, concurrency=self._load.concurrency))
        if all(sample.error for sample in run.samples):
            raise ServerError(f"arm {self._arms[arm].letter}: all requests failed: {run.samples[0].error}")
        return Played(run, figures(run, prompts))


def figures(run: LoadRun, prompts: Sequence[Prompt]) -> dict[str, float]:
    """The figures of a run by their names in the benchmark's JSON; those that nothing stands behind are left out."""
    summary = summarise(run, prompts)
    empty = {name for name in METRICS if summary.spreads[name].n == 0}
    values = result_json(summary, run, [name for name in METRICS if name not in empty])
    return {name: float(value) for name, value in values.items() if isinstance(value, (int, float))}
