"""Made-up runs for tests of what comes after them: samples with known times, arms, whole experiments."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from gapless.lab.ab_plan import AbFlags, Setup
from gapless.lab.arms import Live, arms_from_flags
from gapless.lab.bench import LoadPlan
from gapless.lab.compare import ArmRun
from gapless.lab.records import LoadRun, Sample
from gapless.lab.report import judge
from gapless.lab.summary import figures, summarise

TOKENS = 8


def sample(place: int, gap: float = 0.01, *, text: str = "", error: str = "", ids: Sequence[int] = ()) -> Sample:
    """Answers with TOKENS tokens, `gap` seconds apart, the first one after two gaps."""
    sent = 0.001 * place
    events = () if error else tuple(sent + gap * (k + 2) for k in range(TOKENS))
    ended = events[-1] if events else sent
    tokens = 0 if error else TOKENS
    return Sample(place, sent, sent, events, ended, 4, tokens, text or f"answer {place}", tuple(ids), error, sent)


def load_run(gap: float, requests: int = 16, rng: random.Random | None = None) -> LoadRun:
    rng = rng or random.Random(0)
    samples = tuple(sample(k, gap * rng.uniform(0.9, 1.1)) for k in range(requests))
    return LoadRun(samples, max(s.ended for s in samples))


def arm_run(letter: str, pair: int, first: bool, run: LoadRun) -> ArmRun:
    return ArmRun(letter, pair, first, pair, 2.0 * pair + (not first), 0.02, 0.5, (), run, figures(summarise(run, [])))


def made_runs(pairs: int = 6, effect: float = 0.0, noise: float = 0.01, seed: int = 1) -> list[ArmRun]:
    """Gaps of 10 ms, in B longer by `effect`; every run is off by `noise` or so."""
    rng = random.Random(seed)
    found = []
    for pair in range(pairs):
        letters = "AB" if pair % 2 == 0 else "BA"
        for k, letter in enumerate(letters):
            gap = 0.01 * (1 + rng.gauss(0, noise)) * (1 + effect * (letter == "B"))
            found.append(arm_run(letter, pair, k == 0, load_run(gap, rng=random.Random(pair))))
    return found


def made_report(runs: Sequence[ArmRun] | None = None, **setup: Any) -> dict[str, Any]:
    runs = made_runs() if runs is None else runs
    flags = AbFlags(runs=max(2, len(runs) // 4 * 2))
    arms = setup.pop("arms", None) or arms_from_flags(["--model", "demo"], ["--depth", "1"], ["--depth", "auto"])
    servers = (Live("http://a", {"id": "demo", "version": "1"}), Live("http://b", {"id": "demo", "version": "1"}))
    made = Setup(arms, LoadPlan(), flags, command=("gapless", "ab"), **setup)
    return judge(made, {"dataset": "random", "num_prompts": 16}, runs, servers, "2026-11-20T12:00:00+00:00")
