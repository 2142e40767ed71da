"""`bench serve` as one function: look at the server, prepare, warm up, measure."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from gapless.base.errors import ConfigError
from gapless.engine.progress import Advance
from gapless.lab import probe
from gapless.lab.arrivals import Arrivals, burstiness_of
from gapless.lab.datasets import MADE_UP, Prompt, Workload, build
from gapless.lab.http import Client
from gapless.lab.load import SideLoad, run_load
from gapless.lab.records import LoadRun
from gapless.lab.summary import SUMMARY_METRICS, LoadSummary, block, remarks, result_json, summarise
from gapless.lab.target import Target
from gapless.lab.workload import cut, find_source, warm_up_prompts

Say = Callable[[str], None]
Bar = Callable[[str, int], AbstractContextManager[Advance]]


@dataclass(frozen=True)
class LoadPlan:
    """One measurement. `fit_lengths`: the lengths are defaults and may shrink to what the model holds."""

    target: Target = field(default_factory=Target)
    work: Workload = field(default_factory=Workload)
    arrivals: Arrivals = field(default_factory=Arrivals)
    concurrency: int | None = None
    num_warmups: int = 0
    ready_seconds: float = 0.0
    fit_lengths: bool = False
    tokenizer: str | None = None
    """A directory or a file."""
    tokenizer_id: str | None = None
    """How the user named it."""
    metrics: tuple[str, ...] = SUMMARY_METRICS
    percents: tuple[float, ...] = (99.0,)
    goodput: Mapping[str, float] = field(default_factory=dict)
    probe_rate: float = 0.0
    """Single-token requests a second beside the load; 0: none."""


class BenchResult(NamedTuple):
    """The results. `plan` has the model's name and the actual lengths."""

    plan: LoadPlan
    run: LoadRun
    prompts: Sequence[Prompt]
    summary: LoadSummary
    notes: tuple[str, ...]
    side: Mapping[str, float] = {}
    """Latencies of single-token requests beside the load, by the keys of the result's JSON."""

    def block(self) -> str:
        plan = self.plan
        lines = block(self.summary, plan.metrics, concurrency=plan.concurrency, rate=plan.arrivals.rate, side=self.side)
        return "\n".join(lines)

    def json(self) -> dict[str, Any]:
        """The result's JSON; the caller adds the date."""
        plan, ramp = self.plan, self.plan.arrivals.ramp
        rate = plan.arrivals.rate
        times = [s.scheduled for s in self.run.samples]
        result: dict[str, Any] = {
            "endpoint_type": plan.target.backend,
            "backend": plan.target.backend,
            "model_id": plan.target.model,
            "tokenizer_id": plan.tokenizer_id or plan.target.model,
            "num_prompts": len(self.prompts),
            "request_rate": "inf" if math.isinf(rate) else rate,
            "burstiness": "inf" if math.isinf(plan.arrivals.burstiness) else plan.arrivals.burstiness,
            "max_concurrency": plan.concurrency,
        }
        if ramp is not None:
            result |= {"ramp_up_strategy": ramp.strategy, "ramp_up_start_rps": ramp.start, "ramp_up_end_rps": ramp.end}
        result |= {**result_json(self.summary, plan.metrics), **self.side}
        result["dataset"] = plan.work.dataset
        result["seed"] = plan.work.seed
        result["schedule"] = {"name": schedule_name(plan), "gap_cv": burstiness_of(sorted(times))}
        result["not_sent"] = list(plan.target.omit)
        result["notes"] = list(self.notes)
        if self.run.interrupted:
            result["interrupted"] = True
        return result


async def bench_serve(client: Client, plan: LoadPlan, say: Say, bar: Bar) -> BenchResult:
    """Measure the server of the plan, with a client of its target.

    Raises ServerError when it is not there, refuses the key, has no such model or refuses the first request;
    ConfigError for a workload that does not fit the model, or whose file is wrong.
    """
    if plan.ready_seconds > 0:
        await probe.wait_ready(client, plan.ready_seconds)
    model = await probe.pick_model(client)
    plan = fitted(replace(plan, target=replace(plan.target, model=model.name)), model, say)
    client.target = plan.target
    found = await find_source(plan.work, client, plan.tokenizer)
    prompts = await cut(plan.work, found, build(plan.work, found), client)
    check_prompts(plan, prompts, model)
    warm_up = warm_up_prompts(prompts, found, max(1, plan.num_warmups))
    first = warm_up[0]
    plan = replace(plan, target=await probe.try_fields(client, first.content, min(2, first.output_len)))
    limit = f", at most {plan.concurrency} at a time" if plan.concurrency else ""
    asked = f"{len(prompts)} requests of {plan.work.dataset} to {plan.target.model} at {plan.target.base_url}"
    say(f"{asked}: {schedule_name(plan)}{limit}")
    if plan.num_warmups:
        with bar("warm-up", plan.num_warmups) as advance:
            zeros = [0.0] * len(warm_up)
            await run_load(client, warm_up, zeros, concurrency=plan.concurrency, advance=advance)
    notes = [found.note] if found.note else []
    if plan.target.omit:
        notes.append(f"the server refuses {', '.join(plan.target.omit)}: not sent")
    return await measure(plan, prompts, notes, bar, client, keep=True)


async def measure(
    plan: LoadPlan, prompts: list[Prompt], notes: list[str], bar: Bar, client: Client, keep: bool = False
) -> BenchResult:
    """Send the prompts by the plan. `notes` come before the run's own. With `keep` a
    cancellation leaves the measurements so far."""
    times = plan.arrivals.times(len(prompts), plan.work.seed)
    beside = SideLoad(client, plan.probe_rate) if plan.probe_rate else None
    with bar("requests", len(prompts)) as advance:
        run = await run_load(client, prompts, times, concurrency=plan.concurrency, advance=advance, keep=keep)
    if run.interrupted:
        notes = [*notes, f"interrupted: {len(run.samples)} of {len(prompts)} requests had ended, and no others count"]
    side = await beside.stop() if beside else {}
    summary = summarise(run, prompts, percents=plan.percents, goodput=plan.goodput)
    remarked = remarks(summary, run, prompts, exact_outputs=plan.target.full_answers)
    return BenchResult(plan, run, prompts, summary, (*notes, *remarked), side)


def schedule_name(plan: LoadPlan) -> str:
    """When requests are sent, in words."""
    return "at the data set's times" if plan.work.own_times else plan.arrivals.name


def fitted(plan: LoadPlan, model: probe.ServedModel, say: Say) -> LoadPlan:
    """Default lengths, shrunk for a small model."""
    work = plan.work
    wanted = work.prefix_len + work.input_len + work.output_len
    if not plan.fit_lengths or not work.output_len or not model.max_len or wanted <= model.max_len:
        return plan
    output = max(1, min(work.output_len, model.max_len // 4))
    room = model.max_len - output - work.prefix_len
    if room < 1:
        raise ConfigError(f"the model holds {model.max_len} tokens: give --input-len and --output-len")
    say(f"{model.name} holds {model.max_len} tokens: prompts of {room}, answers of {output}")
    return replace(plan, work=replace(work, input_len=room, output_len=output))


def check_prompts(plan: LoadPlan, prompts: Sequence[Prompt], model: probe.ServedModel) -> None:
    """Raises ConfigError for prompts that the API does not take, and for lengths that the model does not hold."""
    for content in (prompt.content for prompt in prompts):
        ids = isinstance(content, tuple) and bool(content) and isinstance(content[0], int)
        if ids and plan.target.chat:
            raise ConfigError("a prompt of token ids cannot be sent to chat: use --backend openai")
        if isinstance(content, tuple) and not ids and not plan.target.chat:
            raise ConfigError("messages need the chat API: use --backend openai-chat")
    longest = max(p.input_len + p.output_len for p in prompts)
    if plan.work.dataset in MADE_UP and model.max_len and longest > model.max_len:
        raise ConfigError(
            f"a request of {longest} tokens (prompt and answer) does not fit into the {model.max_len} that "
            f"{model.name} holds: ask for shorter ones"
        )


@contextmanager
def raised_priority(wish: str) -> Iterator[str]:
    """Put this thread before others inside, so that a busy server does not delay the readings; yields the priority.

    Servers that are started outside must not inherit it.
    """
    before = os.getpriority(os.PRIO_PROCESS, 0) if hasattr(os, "getpriority") else 0
    got = _raise_priority(wish)
    try:
        yield got
    finally:
        if got == "rt":
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        elif got != "none":
            os.setpriority(os.PRIO_PROCESS, 0, before)


def _raise_priority(wish: str) -> str:
    if wish == "rt" and hasattr(os, "sched_setscheduler"):
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
            return "rt"
    for level in (-20, -10, -5) if wish != "none" and hasattr(os, "setpriority") else ():
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, level)
            return f"nice {level}"
    return "none"
