"""Gives both arms one load: prompts, arrival times and request fields from one seed, whichever server gets them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from gapless.base.errors import ServerError
from gapless.lab.arms import Arm, Live
from gapless.lab.bench import LoadPlan, check_prompts, fitted, raised_priority, schedule_name
from gapless.lab.datasets import Prompt, Source
from gapless.lab.http import Client, with_client
from gapless.lab.load import run_load
from gapless.lab.probe import one_reply, pick_model, try_fields
from gapless.lab.records import LoadRun
from gapless.lab.summary import METRICS, LoadSummary, remarks, result_json, summarise
from gapless.lab.target import Target
from gapless.lab.workload import build, cut, find_source

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
        self._found: Source | None = None
        self._made: tuple[int, list[Prompt]] | None = None
        """The latest pair, and its prompts."""

    async def meet(self, servers: Sequence[Live]) -> None:
        """Ask both servers for their models and for the fields they refuse; a field that one refuses neither gets.

        Raises ServerError and ConfigError as bench_serve does.
        """
        named = [replace(self.plan.target, base_url=server.url, api_key=server.api_key) for server in servers]
        models = [await with_client(target, pick_model) for target in named]
        smallest = min(models, key=lambda model: model.max_len or 1 << 40)
        self.plan = fitted(self.plan, smallest, lambda text: None)
        named = [replace(target, model=model.name) for target, model in zip(named, models, strict=True)]
        if self._found is None:
            self._found = await with_client(
                named[0], partial(find_source, self.plan.work, tokenizer=self.plan.tokenizer)
            )
        check_prompts(self.plan, self.prompts(0), smallest)
        found = [await with_client(target, self._fields) for target in named]
        omit = {name for target in found for name in target.omit}
        body = min((target.extra_body for target in found), key=len)
        self._targets = [replace(target, omit=tuple(sorted(omit)), extra_body=body) for target in found]

    async def _fields(self, client: Client) -> Target:
        """What the server takes; ids of the generated tokens are asked for where it can."""
        target, content = client.target, self.prompts(0)[0].content
        client.target = asking = replace(target, extra_body={**target.extra_body, TOKEN_IDS: True})
        answer, _ = await one_reply(client, content, 1)
        client.target = target if answer.status in (400, 422) else asking
        return await try_fields(client, content, 1)

    def prompts(self, pair: int) -> list[Prompt]:
        """Return the prompts of both runs of a pair; texts are not cut to their lengths yet."""
        assert self._found is not None, "meet() comes first"
        return build(replace(self.plan.work, seed=self.seed(pair)), self._found)

    def seed(self, pair: int) -> int:
        return self.plan.work.seed + pair

    def play(self, arm: int, pair: int) -> Played:
        """One run of load on arm 0 or 1. Raises ServerError when no request succeeded."""
        if self._made is None or self._made[0] != pair:
            # The arm that comes first is asked: with ABBA each arm is, equally often.
            assert self._found is not None, "meet() comes first"
            cutting = partial(cut, self.plan.work, self._found, self.prompts(pair))
            self._made = pair, asyncio.run(with_client(self._targets[arm], cutting))
        prompts = self._made[1]
        times = self.plan.arrivals.times(len(prompts), self.seed(pair))
        target = self._targets[arm]
        with raised_priority(self._priority):
            load = partial(run_load, prompts=prompts, times=times, concurrency=self.plan.concurrency)
            run = asyncio.run(with_client(target, load))
        if all(sample.error for sample in run.samples):
            raise ServerError(f"arm {self._arms[arm].letter}: all requests failed: {run.samples[0].error}")
        summary = summarise(run, prompts)
        notes = remarks(summary, run, prompts, exact_outputs=target.full_answers)
        return Played(run, figures(summary), tuple(notes))

    def described(self) -> dict[str, Any]:
        """What every run plays, for the report."""
        plan, work = self.plan, self.plan.work
        target = self._targets[0]
        lengths = {"input_len": work.input_len, "output_len": work.output_len, "range_ratio": work.range_ratio}
        return {
            "dataset": work.dataset,
            "num_prompts": work.num_prompts,
            **(lengths if work.dataset in ("random", "multi_turn") else {}),
            "arrivals": schedule_name(plan),
            "max_concurrency": plan.concurrency,
            "backend": target.backend,
            "ignore_eos": target.full_answers,
            "extra_body": dict(target.extra_body),
            "not_sent": list(target.omit),
        }


def figures(summary: LoadSummary) -> dict[str, float]:
    """The figures of a run by their names in the benchmark's JSON; those without a sample are left out."""
    held = [name for name in METRICS if summary.spreads[name].n]
    values = result_json(summary, held)
    return {name: float(value) for name, value in values.items() if isinstance(value, (int, float))}
