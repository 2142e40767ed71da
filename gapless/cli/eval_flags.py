"""The flags of `gapless eval`; the engine's own stand beside them."""

from __future__ import annotations

from dataclasses import dataclass

from gapless.base.config import check_fields, flag
from gapless.cli.bench_flags import BACKENDS
from gapless.lab.eval_report import MATCHES

DEMO_DATA = "demo"
_SERVER, _DATA, _BODY, _OUT = "Server", "Questions", "Answers", "Results"


@dataclass(frozen=True)
class EvalFlags:
    """Without base_url the model runs in this process."""

    base_url: str | None = flag(None, "ask this server, such as http://localhost:8000", group=_SERVER)
    backend: str = flag("openai", "completions, or chat with the chat template", group=_SERVER, choices=tuple(BACKENDS))
    concurrency: int = flag(
        32, "questions under way at most", group=_SERVER, aliases=("--max-concurrency",), low=1, high=2**31
    )
    header: tuple[str, ...] = flag((), "KEY=VALUE, sent with each request", group=_SERVER)
    extra_body: str | None = flag(None, "JSON object merged into each request", group=_SERVER)
    insecure: bool = flag(False, "do not check the server's certificate", group=_SERVER)
    answer_timeout: float = flag(600.0, "seconds for one answer of a server", group=_SERVER, low=1, high=10**6)

    data: str = flag(
        DEMO_DATA,
        "JSON lines of questions; demo: the demo model's held-out problems",
        group=_DATA,
        aliases=("--dataset-path",),
    )
    num_questions: int | None = flag(
        None, "the first so many; default: all, 300 of demo", group=_DATA, aliases=("--limit",), low=1, high=10**6
    )
    data_seed: int = flag(
        0, "which held-out problems demo asks; 0: the first of the file", group=_DATA, low=0, high=2**31
    )
    shots: int = flag(0, "worked examples in front", group=_DATA, aliases=("--num-fewshot",), low=0, high=1000)
    shots_file: str | None = flag(
        None, "JSON lines of examples; default: the first lines of --data, which are not asked then", group=_DATA
    )
    shots_as_turns: bool = flag(
        True, "in a chat, examples are turns of it", group=_DATA, aliases=("--fewshot-as-multiturn",)
    )

    max_tokens: int = flag(
        512, "of an answer", group=_BODY, aliases=("--max-new-tokens", "--max-gen-toks"), low=1, high=2**31
    )
    temperature: float = flag(0.0, "0 is greedy", group=_BODY, aliases=("--temp",), low=0, high=100)

    match: str = flag("flexible", "the rule that decides who is right", group=_OUT, choices=MATCHES)
    output: str | None = flag(None, "write the result and every answer there, as JSON", group=_OUT, aliases=("-o",))
    show_wrong: int = flag(0, "print so many wrong answers", group=_OUT, low=0, high=10**6)
    min_accuracy: float | None = flag(None, "exit with 1 below this, from 0 to 1", group=_OUT, low=0, high=1)
    disable_tqdm: bool = flag(False, "no progress", group=_OUT)

    def __post_init__(self) -> None:
        check_fields(self)
