"""Gives both arms one load: prompts, arrival times and request fields from one seed, whichever server gets them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gapless.base.errors import ServerError
from gapless.engine.progress import progress
from gapless.lab.arms import LETTERS, Live
from gapless.lab.bench import BenchResult, LoadPlan, check_prompts, fitted, measure, raised_priority, schedule_name
from gapless.lab.datasets import Prompt, Source, Workload, build
from gapless.lab.http import Client, with_client
from gapless.lab.probe import one_reply, pick_model, try_fields
from gapless.lab.target import Target
from gapless.lab.workload import cut, find_source

TOKEN_IDS = "return_token_ids"
"""A field that makes servers send the ids of generated tokens."""


class PairedLoad:
    """Knows how each arm's server wants to be asked, and plays one run after the other.

    A run is what `gapless bench serve` does with the same plan; its server is the arm's, and pair k has the plan's
    seed + k.
    """

    def __init__(self, plan: LoadPlan, priority: str = "none") -> None:
        self.plan = plan
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
        """The server's fields; ids of the generated tokens are asked for if it can send them."""
        target, content = client.target, self.prompts(0)[0].content
        client.target = asking = replace(target, extra_body={**target.extra_body, TOKEN_IDS: True})
        answer, _ = await one_reply(client, content, 1)
        client.target = target if answer.status in (400, 422) else asking
        return await try_fields(client, content, 1)

    def prompts(self, pair: int) -> list[Prompt]:
        """Return the prompts of both runs of a pair; texts are not cut to their lengths yet."""
        assert self._found is not None, "meet() comes first"
        return build(self._work(pair), self._found)

    def seed(self, pair: int) -> int:
        return self.plan.work.seed + pair

    def _work(self, pair: int) -> Workload:
        return replace(self.plan.work, seed=self.seed(pair))

    def play(self, arm: int, pair: int) -> BenchResult:
        """One run of load on arm 0 or 1. Raises ServerError when no request succeeded."""
        target = self._targets[arm]
        if self._made is None or self._made[0] != pair:
            # The arm that comes first is asked: with ABBA each arm is, equally often.
            assert self._found is not None, "meet() comes first"
            cutting = partial(cut, self.plan.work, self._found, self.prompts(pair))
            self._made = pair, asyncio.run(with_client(target, cutting))
        plan = replace(self.plan, target=target, work=self._work(pair))
        with raised_priority(self._priority):
            measuring = partial(measure, plan, self._made[1], [], partial(progress, wanted=False))
            result = asyncio.run(with_client(target, measuring))
        if not result.summary.totals["completed"]:
            raise ServerError(f"arm {LETTERS[arm]}: all requests failed: {result.run.samples[0].error}")
        return result

    def described(self) -> dict[str, Any]:
        """The load of every run, for the report."""
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
