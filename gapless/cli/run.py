"""`gapless run`: answers prompts in this process, offline."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gapless
from gapless.base.config import EngineConfig
from gapless.base.progress import starting
from gapless.cli.errors import FAILED, UsageError
from gapless.cli.flags import Command
from gapless.cli.output import check_writable, say, write_text
from gapless.cli.prompts import RunPrompt, gather
from gapless.cli.sampling import SamplingFlags, sampling_fields

if TYPE_CHECKING:
    from gapless.engine.outputs import RequestOutput

_EPILOG = """One prompt is answered as plain text, several as JSON lines. Every line of a .jsonl file is
{"prompt": ...} or {"messages": [...]}; its other keys come back with the answer."""


def main(argv: Sequence[str]) -> int:
    command = Command(
        "run",
        "Answer one prompt, or a file of prompts.",
        (SamplingFlags, EngineConfig),
        words="[PROMPT ...]",
        epilog=_EPILOG,
    )
    command.add_argument("PROMPT", nargs="*", help="words of the prompt; without any: --file, else standard input")
    command.add_argument(
        "-f", "--file", help="a prompt a line, or JSON lines when it ends in .jsonl; - is standard input"
    )
    command.add_argument("-o", "--output", metavar="FILE", help="write the answers there, as JSON lines")
    command.add_argument(
        "--raw", action="store_true", help="give the prompt to the model as it is, without chat template"
    )
    command.add_argument(
        "--trace", metavar="FILE", help="write the timeline of the last steps there (see gapless trace --help)"
    )
    settings = command.read(argv)
    options = settings.options
    settings.show_notes()
    prompts = gather(options.PROMPT, options.file)
    if options.raw and not all(isinstance(p.content, str) for p in prompts):
        raise UsageError(f"{options.file}: messages need the chat template; leave out --raw")
    settings.build(EngineConfig)  # reports a wrong flag before torch is loaded
    fields = sampling_fields(settings)
    if options.output:
        check_writable(options.output, "--output")
    answers, seconds = _answer(settings.given(EngineConfig), prompts, fields, options.raw, options.trace)
    if options.output:
        write_text(options.output, _json_lines(prompts, answers), "--output")
    elif len(prompts) == 1:
        print(answers[0].outputs[0].text)
    else:
        print(_json_lines(prompts, answers), end="")
    _summary(answers, seconds)
    return FAILED if any(a.outputs[0].finish_reason == "error" for a in answers) else 0


def _answer(
    engine: dict[str, Any], prompts: list[RunPrompt], fields: dict[str, Any], raw: bool, trace: str | None
) -> tuple[list[RequestOutput], float]:
    """The answers and the seconds they took, loading not counted."""
    bar = sys.stderr.isatty() and len(prompts) > 1
    with starting():
        llm = gapless.LLM(**engine)
    with llm:
        params = llm.get_default_sampling_params(max_tokens=None).replace(**fields)
        start = time.perf_counter()
        contents = [p.content for p in prompts]
        if raw:
            answers = llm.generate([c for c in contents if isinstance(c, str)], params, use_tqdm=bar)
        else:
            chats = [[{"role": "user", "content": c}] if isinstance(c, str) else c for c in contents]
            answers = llm.chat(chats, params, use_tqdm=bar)
        seconds = time.perf_counter() - start
        if trace:
            from gapless.lab.trace import write

            write(Path(trace), llm.recording())
        return answers, seconds


def _json_lines(prompts: list[RunPrompt], answers: list[RequestOutput]) -> str:
    lines = []
    for prompt, answer in zip(prompts, answers, strict=True):
        done = answer.outputs[0]
        asked = {"prompt" if isinstance(prompt.content, str) else "messages": prompt.content}
        said = {
            "text": done.text,
            "finish_reason": done.finish_reason,
            "prompt_tokens": len(answer.prompt_token_ids),
            "completion_tokens": len(done.token_ids),
        }
        lines.append(json.dumps({**prompt.extra, **asked, **said}, ensure_ascii=False) + "\n")
    return "".join(lines)


def _summary(answers: list[RequestOutput], seconds: float) -> None:
    given = sum(len(a.prompt_token_ids) for a in answers)
    made = sum(len(a.outputs[0].token_ids) for a in answers)
    rate = f", {made / seconds:.1f} tokens/s" if seconds > 0 else ""
    plural = "s" if len(answers) != 1 else ""
    say(f"gapless: {len(answers)} answer{plural}, {given} tokens in, {made} out, {seconds:.2f} s{rate}")
