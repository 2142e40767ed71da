"""The flags of `gapless eval`; the engine's own stand beside them."""

from __future__ import annotations

from dataclasses import dataclass

from gapless.base.config import flag
from gapless.cli.bench_flags import RequestFlags
from gapless.lab.eval_report import MATCHES

DEMO_DATA = "demo"
_SERVER, _DATA, _BODY, _OUT = "Server", "Questions", "Answers", "Results"


@dataclass(frozen=True)
class EvalFlags(RequestFlags):
    """The questions, and how answers are judged. The model runs in this process unless base_url names a server."""

    concurrency: int = flag(
        32, "questions under way at most", group=_SERVER, aliases=("--max-concurrency",), low=1, high=2**31
    )

    data: str = flag(
        DEMO_DATA,
        "JSON lines of questions; demo or demo:SEED: held-out problems of the demo model, in order or shuffled",
        group=_DATA,
        aliases=("--dataset-path",),
    )
    num_questions: int | None = flag(
        None,
        "ask only the first N questions; default: all, 300 of demo",
        group=_DATA,
        aliases=("--limit",),
        low=1,
        high=10**6,
    )
    shots: int = flag(
        0, "worked examples before each question", group=_DATA, aliases=("--num-fewshot",), low=0, high=1000
    )
    shots_file: str | None = flag(
        None, "JSON lines of examples; default: the first lines of --data, which are not asked then", group=_DATA
    )
    shots_as_turns: bool = flag(
        True, "in a chat, examples are turns of it", group=_DATA, aliases=("--fewshot-as-multiturn",)
    )

    max_tokens: int = flag(
        512, "most tokens of an answer", group=_BODY, aliases=("--max-new-tokens", "--max-gen-toks"), low=1, high=2**31
    )

    match: str = flag("flexible", "the rule that decides who is right", group=_OUT, choices=MATCHES)
    min_accuracy: float | None = flag(None, "exit with 1 below this, from 0 to 1", group=_OUT, low=0, high=1)
