"""The model card of one run: what it is, how it was made, and what it answers. Pure Python."""

import platform
import textwrap
from dataclasses import dataclass
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
TEMPLATE = Path(__file__).with_name("card.md")


@dataclass(frozen=True, slots=True)
class Run:
    """One training: padding is part of `tokens`, `loss` is a running mean, in nats per learned token."""

    seed: int
    steps: int
    tokens: int
    loss: float
    seconds: float
    threads: int
    device: str
    machine: str
    """What it ran on."""


@dataclass(frozen=True, slots=True)
class Score:
    """How many of the problems of a suite were answered right."""

    suite: str
    right: int
    asked: int


def processor() -> str:
    """The name of the machine's processor, or its architecture where the system does not name it."""
    lines = CPUINFO.read_text(encoding="utf-8").splitlines() if CPUINFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def card(run: Run, scores: list[Score]) -> str:
    """The text of MODEL_CARD.md."""
    rows = [f"| {s.suite} | {s.right / s.asked:.1%} ({s.right} of {s.asked}) |" for s in scores]
    command = (
        f"python -m examples.demo_model.train --out DIR --steps {run.steps} --seed {run.seed} "
        f"--threads {run.threads} --device {run.device}"
    )
    about = (
        f"`{command}`: {run.tokens / 1e6:.2f} million tokens, padding included, in {run.seconds:.0f} s on "
        f"{run.machine}; loss {run.loss:.3f} nats per learned token at the end."
    )
    return TEMPLATE.read_text(encoding="utf-8").format(
        scores="\n".join(rows), asked=max(score.asked for score in scores), run=textwrap.fill(about, 120)
    )
