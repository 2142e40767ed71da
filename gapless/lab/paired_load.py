"""Gives both arms one load: prompts, arrival times and request fields from one seed, whichever server gets them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from gapless.base.errors import ServerError
from gapless.lab.arms import Arm, Live
from gapless.lab.bench import LoadPlan, check_lengths, fitted, raise_priority, schedule_name
from gapless.lab.block import remarks
from gapless.lab.datasets import Prompt
from gapless.lab.http import Client
from gapless.lab.load import run_load
from gapless.lab.probe import ServedModel, one_reply, pick_model, try_fields
from gapless.lab.records import LoadRun
from gapless.lab.summary import METRICS, LoadSummary, result_json, summarise
from gapless.lab.target import Target
from gapless.lab.words import PromptSource, exact, id_source, local_codec, server_codec, word_source
from gapless.lab.workload import build

TOKEN_IDS = "return_token_ids"
"""A field that makes servers send the ids of what they generate."""


class Played(NamedTuple):
    """One run. `notes` are what a reader must know of it."""

    load: LoadRun
    metrics: dict[str, float]
    notes: tuple[str, ...] = ()


class PairedLoad:
    """Knows how each arm's server wants to be asked, and plays one run after the other.

    A run is what `gapless bench serve` does with the same plan; its server is the arm's, and pair k has the plan's
    seed + k.
    """

    def __init__(self, plan: LoadPlan, arms: Sequence[Arm], priority: str = "none") -> None:
        self.plan = plan
        self._arms = arms
        self._priority = priority
        self._targets: list[Target] = []
        self._found: PromptSource | None = None
        self._made: tuple[int, list[Prompt]] | None = None
        """The latest pair, and its prompts."""

    def meet(self, servers: Sequence[Live]) -> None:
        """Ask both servers for their models and for the fields they refuse; a field that one refuses neither gets.

        Raises:
            ServerError: one cannot be reached, has no such model or refuses the first request.
            ConfigError: a request does not fit into a model.
        """
        asyncio.run(self._meet(servers))

    async def _meet(self, servers: Sequence[Live]) -> None:
        named = [replace(self.plan.target, base_url=server.url, api_key=server.api_key) for server in servers]
        models = [await self._model(target) for target in named]
        smallest = min(models, key=lambda model: model.max_len or 1 << 40)
        self.plan = fitted(self.plan, smallest, lambda text: None)
        named = [replace(target, model=model.name) for target, model in zip(named, models, strict=True)]
        if self._found is None:
            self._found = await self._find_source(named[0])
        check_lengths(self.plan, self.prompts(0), smallest)
        found = [await self._fields(target) for target in named]
        omit = {name for target in found for name in target.omit}
        body = min((target.extra_body for target in found), key=len)
        self._targets = [replace(target, omit=tuple(sorted(omit)), extra_body=body) for target in found]

    async def _model(self, target: Target) -> ServedModel:
        async with Client(target) as client:
            return await pick_model(client)

    async def _find_source(self, target: Target) -> PromptSource:
        plan = self.plan
        async with Client(target) as client:
            if plan.work.dataset == "multi_turn" or target.chat:
                return await word_source(client, plan.tokenizer)
            return await id_source(client, plan.tokenizer)

    async def _fields(self, target: Target) -> Target:
        """What the server takes; ids of the generated tokens are asked for where it can."""
        content = self.prompts(0)[0].content
        asking = replace(target, extra_body={**target.extra_body, TOKEN_IDS: True})
        async with Client(asking) as client:
            answer, _ = await one_reply(client, content, 1)
            client.target = target if answer.status in (400, 422) else asking
            return await try_fields(client, content, 1)

    def prompts(self, pair: int) -> list[Prompt]:
        """Those of both runs of a pair; texts are not cut to their lengths yet."""
        assert self._found is not None, "meet() comes first"
        return build(replace(self.plan.work, seed=self.seed(pair)), self._found.source)

    async def _cut(self, prompts: list[Prompt], target: Target) -> list[Prompt]:
        """Cut texts to their lengths with the codec, if there is one, as `prepare` does for one server."""
        assert self._found is not None, "meet() comes first"
        if self._found.codec is None or self.plan.work.dataset in ("custom", "sharegpt"):
            return prompts
        async with Client(target) as client:
            local = self.plan.tokenizer
            return await exact(local_codec(local) if local else server_codec(client), prompts)

    def seed(self, pair: int) -> int:
        return self.plan.work.seed + pair

    def play(self, arm: int, pair: int) -> Played:
        """One run of load on arm 0 or 1.

        Raises:
            ServerError: no request succeeded.
        """
        if self._made is None or self._made[0] != pair:
            # The arm that comes first is asked: with ABBA each arm is, equally often.
            self._made = pair, asyncio.run(self._cut(self.prompts(pair), self._targets[arm]))
        prompts = self._made[1]
        times = self.plan.arrivals.times(len(prompts), self.seed(pair))
        target = self._targets[arm]
        with raised_priority(self._priority):
            run = asyncio.run(run_load(target, prompts, times, concurrency=self.plan.concurrency))
        if all(sample.error for sample in run.samples):
            raise ServerError(f"arm {self._arms[arm].letter}: all requests failed: {run.samples[0].error}")
        exact = target.ignore_eos and "ignore_eos" not in target.omit
        summary = summarise(run, prompts)
        return Played(run, figures(summary, run), tuple(remarks(summary, run, prompts, exact_outputs=exact)))

    def described(self) -> dict[str, Any]:
        """What every run plays, for the report."""
        plan, work = self.plan, self.plan.work
        target = self._targets[0]
        lengths = {"input_len": work.input_len, "output_len": work.output_len, "range_ratio": work.range_ratio}
        return {
            "dataset": work.dataset,
            "num_prompts": work.num_prompts,
            **(lengths if work.dataset in ("random", "burst", "multi_turn") else {}),
            "arrivals": schedule_name(plan),
            "max_concurrency": plan.concurrency,
            "backend": target.backend,
            "ignore_eos": target.ignore_eos and "ignore_eos" not in target.omit,
            "extra_body": dict(target.extra_body),
            "not_sent": list(target.omit),
        }


def figures(summary: LoadSummary, run: LoadRun) -> dict[str, float]:
    """The figures of a run by their names in the benchmark's JSON; those without a sample are left out."""
    held = [name for name in METRICS if summary.spreads[name].n]
    values = result_json(summary, run, held)
    return {name: float(value) for name, value in values.items() if isinstance(value, (int, float))}


@contextmanager
def raised_priority(wish: str) -> Iterator[None]:
    """Raised for the run alone: servers that are started between runs must not inherit it."""
    before = os.getpriority(os.PRIO_PROCESS, 0) if hasattr(os, "getpriority") else 0
    got = raise_priority(wish)
    try:
        yield
    finally:
        if got == "rt":
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        elif got != "none":
            os.setpriority(os.PRIO_PROCESS, 0, before)
