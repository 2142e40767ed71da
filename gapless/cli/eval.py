"""`gapless eval`: how many questions a model answers right, on a server or in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gapless
from gapless.base.config import EngineConfig
from gapless.base.progress import starting
from gapless.cli.errors import FAILED, INTERRUPTED_CODE, UsageError
from gapless.cli.flags import Command, Settings
from gapless.cli.output import check_writable, say, write_text
from gapless.engine.progress import progress
from gapless.lab.eval_questions import Question, demo_questions, demo_shots, load_questions, split_shots
from gapless.lab.eval_report import Comparison, EvalResult, read_result
from gapless.lab.eval_run import DEMO_DATA, EvalFlags, ask_engine, ask_server
from gapless.lab.http import with_client
from gapless.lab.records import Sample
from gapless.lab.target import PromptContent

if TYPE_CHECKING:
    from gapless.engine.async_llm import AsyncLLM

DEMO_COUNT = 300
ANSWER_SECONDS = 600.0
EVAL_EPILOG = """examples:
  gapless eval                                             the demo model on problems that it has not seen
  gapless eval --base-url http://localhost:8000 --data gsm8k.jsonl --shots 5 --shots-file gsm8k_train.jsonl
  gapless eval --base-url http://localhost:8000 --backend openai-chat --data mmlu_pro.jsonl --out a.json
  gapless eval --compare a.json b.json                     which answers flipped, and McNemar's exact p-value

A line of a file is {"question": ..., "answer": "... #### 42"} or {"question": ..., "options": [...], "answer": "C"}."""


def main(argv: Sequence[str]) -> int:
    purpose = "Exact match on questions with one right answer."
    command = Command("eval", purpose, (EvalFlags, EngineConfig), model_word=True, epilog=EVAL_EPILOG)
    command.add_api_key("for --base-url")
    command.add_argument("--compare", nargs=2, metavar=("A", "B"), help="compare two files that --out wrote")
    settings = command.read(argv)
    settings.show_notes()
    flags = settings.build(EvalFlags)
    if flags.out:
        check_writable(flags.out, "--out")
    if settings.options.compare:
        a, b = settings.options.compare
        return _compare(a, b, flags.out)
    questions, pool = gather(flags)
    contents = [flags.content(question, pool) for question in questions]
    about, answers = _ask(settings, flags, contents)
    if interrupted := len(answers) < len(questions):
        say(f"gapless: interrupted: {len(answers)} of {len(questions)} questions were answered, and no others count")
        if not answers:
            return INTERRUPTED_CODE
        about["interrupted"] = True
        questions = [questions[answer.place] for answer in answers]
        contents = [contents[answer.place] for answer in answers]
    report = EvalResult(flags, questions, contents, answers)
    print("\n".join([*_heading(about, flags), *report.lines()]))
    if flags.out:
        _save(flags.out, {"target": about, "data": _data(flags), **report.json()})
    return INTERRUPTED_CODE if interrupted else _code(report, flags)


def gather(flags: EvalFlags) -> tuple[list[Question], list[Question]]:
    """The questions, and the pool of examples. Raises ConfigError naming file and line."""
    given = load_questions(Path(flags.shots_file)) if flags.shots_file else []
    seed = demo_seed(flags.data)
    if seed is not None:
        questions = demo_questions(flags.num_questions or DEMO_COUNT, seed)
        return questions, given or demo_shots(flags.shots, questions)
    questions = load_questions(Path(flags.data))
    if not given and flags.shots:
        given, questions = split_shots(questions, flags.shots)
    return questions[: flags.num_questions], given


def demo_seed(data: str) -> int | None:
    """The seed in `demo` (0) or `demo:7`; None for a file. Raises UsageError."""
    name, colon, seed = data.partition(":")
    if name != DEMO_DATA:
        return None
    if colon and not seed.isdecimal():
        raise UsageError(f"--data {data}: the seed must be a whole number, as in demo:7")
    return int(seed or 0)


def _ask(
    settings: Settings, flags: EvalFlags, contents: Sequence[PromptContent]
) -> tuple[dict[str, Any], Sequence[Sample]]:
    """The questions, and the answers."""
    engine = settings.given(EngineConfig)
    bar = progress("questions", len(contents), wanted=not flags.disable_tqdm)
    if flags.base_url is not None:
        settings.refuse(EngineConfig, {"model"}, "is a matter of the server, not of --base-url")
        model = engine["model"] if "model" in settings.typed else ""
        target = flags.target(flags.base_url, model, settings.api_key, {}, timeout=ANSWER_SECONDS)
        with bar as advance:
            asking = partial(ask_server, flags=flags, contents=contents, advance=advance)
            target, answers = asyncio.run(with_client(target, asking))
        return {"server": target.base_url, "model": target.model, "not_sent": list(target.omit)}, answers
    only_there = {"header", "extra_body", "insecure"}
    settings.refuse(EvalFlags, settings.given(EvalFlags).keys() - only_there, "goes with --base-url")
    config = settings.build(EngineConfig)  # reports a wrong flag before torch is loaded
    llm = gapless.AsyncLLM.from_engine_args(engine)  # may fetch the model, with a bar of its own
    answers = asyncio.run(_in_process(llm, flags, contents, bar))
    return {"server": None, "model": config.model, "engine": engine}, answers


async def _in_process(
    llm: AsyncLLM, flags: EvalFlags, contents: Sequence[PromptContent], bar: AbstractContextManager[Any]
) -> Sequence[Sample]:
    """The answers; `bar` shows the questions once the engine runs."""
    async with AsyncExitStack() as stack:
        with starting(not flags.disable_tqdm):
            await stack.enter_async_context(llm)
        with bar as advance:
            return await ask_engine(llm, flags, contents, advance)


def _heading(about: dict[str, Any], flags: EvalFlags) -> list[str]:
    where = f"at {about['server']}" if about["server"] else "in this process"
    how = "chat" if flags.chat else "completions"
    shots = f"{flags.shots} shot" if flags.shots == 1 else f"{flags.shots} shots"
    return [f"{about['model']} {where}, {how}, {shots}, {flags.data}, at most {flags.concurrency} at a time"]


def _data(flags: EvalFlags) -> dict[str, Any]:
    seed = demo_seed(flags.data)
    made = {"name": flags.data} if seed is None else {"name": DEMO_DATA, "seed": seed}
    return {**made, "shots_file": flags.shots_file}


def _save(path: str, result: dict[str, Any]) -> None:
    header = {"date": datetime.now().strftime("%Y%m%d-%H%M%S"), "gapless_version": gapless.__version__}
    write_text(path, json.dumps({**header, **result}, indent=1, ensure_ascii=False) + "\n", "--out")
    say(f"wrote {path}")


def _code(report: EvalResult, flags: EvalFlags) -> int:
    """1 below --min-accuracy, or when no question was answered at all."""
    low = flags.min_accuracy is not None and report.total.accuracy < flags.min_accuracy
    if low:
        say(f"gapless: {report.total.accuracy:.4f} is below --min-accuracy {flags.min_accuracy}")
    return FAILED if low or len(report.errors) == len(report.records) else 0


def _compare(a: str, b: str, output: str | None) -> int:
    found = Comparison(read_result(Path(a)), read_result(Path(b)))
    print("\n".join(found.lines(a, b)))
    if output:
        _save(output, {"a": a, "b": b, **found.json()})
    return 0
