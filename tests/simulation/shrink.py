"""Making a failing scenario small: drop and simplify parts for as long as it still fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from simulation.scenario import Job, Scenario

from gapless.base.records import NO_TRANSFER
from gapless.testing.world import Faults


def shrink(scenario: Scenario, fails: Callable[[Scenario], bool], most_runs: int = 400) -> Scenario:
    """The smallest failing scenario found; `fails` runs one."""
    runs = 0
    smaller = True
    while smaller:
        smaller = False
        for candidate in _simpler(scenario):
            if runs >= most_runs:
                return scenario
            runs += 1
            if fails(candidate):
                scenario, smaller = candidate, True
                break
    return scenario


def _simpler(scenario: Scenario) -> Iterator[Scenario]:
    """Scenarios that are a little simpler, the boldest first."""
    for name in ("jobs", "faults", "given", "given_faults"):
        items = getattr(scenario, name)
        for index in range(len(items)):
            yield scenario._replace(**{name: items[:index] + items[index + 1 :]})
    for name in ("jobs", "given"):
        jobs = getattr(scenario, name)
        for index, job in enumerate(jobs):
            for simple in _simpler_jobs(job):
                yield scenario._replace(**{name: (*jobs[:index], simple, *jobs[index + 1 :])})
    if scenario.depth != 1:
        yield scenario._replace(depth=1)
    if scenario.depth is None or scenario.depth > 2:
        yield scenario._replace(depth=2)
    for name in ("maps_host", "prefix_caching", "by_priority", "grouped", "tier", "pair", "mutual"):
        if getattr(scenario, name) and not (name == "prefix_caching" and scenario.pair is not None):
            yield scenario._replace(**{name: False})
    if scenario.step != "one":
        yield scenario._replace(step="one")
    if scenario.drafts is not None:
        yield scenario._replace(drafts=None)
    if scenario.lower:
        yield scenario._replace(lower=False)
    if scenario.host and scenario.pair is None:
        yield scenario._replace(host=0, lower=False)
    if scenario.followers:
        yield scenario._replace(followers=scenario.followers - 1)
    if scenario.ranks != Faults():
        yield scenario._replace(ranks=Faults())


def _simpler_jobs(job: Job) -> Iterator[Job]:
    if job.asks != (None, None):
        yield job._replace(asks=(None, None))
    if job.filters:
        yield job._replace(filters=0)
    if job.adapter:
        yield job._replace(adapter="")
    if job.transfer != NO_TRANSFER:
        yield job._replace(transfer=NO_TRANSFER)
    if job.leaves is not None:
        yield job._replace(leaves=None)
    if job.stop_ids:
        yield job._replace(stop_ids=())
    if job.priority or job.salt:
        yield job._replace(priority=0, salt="")
    if len(job.prompt) > 1:
        half = len(job.prompt) // 2
        yield job._replace(prompt=job.prompt[:half], max_len=job.max_len - len(job.prompt) + half)
    if job.max_len - len(job.prompt) > 1:
        yield job._replace(max_len=len(job.prompt) + (job.max_len - len(job.prompt)) // 2)
    if job.arrives:
        yield job._replace(arrives=job.arrives // 2)
