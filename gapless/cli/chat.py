"""`gapless chat` and `gapless complete`: answer one question given by -q, or each one that is typed."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gapless
from gapless.base.config import EngineConfig
from gapless.base.errors import RequestError, ServerError
from gapless.base.progress import starting
from gapless.cli.conversation import LEAVE, Conversation
from gapless.cli.errors import UsageError
from gapless.cli.flags import Command, Settings
from gapless.cli.output import say
from gapless.cli.sampling import SamplingFlags, sampling_fields
from gapless.cli.talk import Answerer, answer_here, answer_there, show
from gapless.lab.http import Client
from gapless.lab.target import Target

COMPLETE_TOKENS = 128
"""The default limit: few models end a bare continuation by themselves."""
Ask = Callable[[Answerer, str], Coroutine[Any, Any, str]]
"""Asks, shows the answer, and returns how long it took in one line."""
HINT = "/help lists commands; Ctrl-C ends an answer, Ctrl-D or /exit the conversation"
_EPILOG = "Without --url the model runs in this process. Ctrl-C ends an answer, Ctrl-D the conversation."


def _command(name: str, description: str, words: str = "") -> Command:
    command = Command(
        name, description, (SamplingFlags, EngineConfig), model_word=not words, words=words, epilog=_EPILOG
    )
    command.add_argument("-q", "--quick", metavar="TEXT", help="ask this once, print the answer, and end")
    command.add_argument(
        "--url", "--base-url", metavar="URL", help="a server that speaks the OpenAI API, such as http://localhost:8000"
    )
    command.add_api_key("for --url")
    command.add_insecure()
    command.add_argument("--stats", action="store_true", help="time to first token and tokens a second, on stderr")
    return command


def main_chat(argv: Sequence[str]) -> int:
    command = _command("chat", "Talk to a model.")
    command.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    settings = command.read(argv)
    if (word := settings.options.MODEL) and " " in word and not Path(word).exists():
        raise UsageError(f"{word!r} is no model; ask one with -q: gapless chat -q {shlex.quote(word)}")
    conversation = Conversation(settings.options.system, sampling_fields(settings))
    return _converse(settings, conversation.ask, conversation)


def main_complete(argv: Sequence[str]) -> int:
    description = f"Continue a text, by {COMPLETE_TOKENS} tokens at most unless --max-tokens says otherwise."
    command = _command("complete", description, "[TEXT ...]")
    command.add_argument("TEXT", nargs="*", help="the same as -q TEXT")
    settings = command.read(argv)
    if settings.options.TEXT and settings.options.quick is not None:
        raise UsageError("give a text or -q, not both")
    if settings.options.TEXT:
        settings.options.quick = " ".join(settings.options.TEXT)
    fields = {"max_tokens": COMPLETE_TOKENS, **sampling_fields(settings)}

    async def ask(answer: Answerer, text: str) -> str:
        return (await show(answer(text, fields)))[1]

    return _converse(settings, ask)


def _converse(settings: Settings, ask: Ask, commands: Conversation | None = None) -> int:
    """Answer typed lines. At a keyboard, lines that begin with a slash are `commands`, if there are any."""
    options = settings.options
    settings.show_notes()
    patient = options.quick is None and sys.stdin.isatty()
    with asyncio.Runner() as runner, _answerer(settings, runner) as answer:
        if patient:
            print(HINT if commands else "Ctrl-D leaves")
        for text in [options.quick] if options.quick is not None else _typed():
            with _carrying_on() if patient else contextlib.nullcontext():
                if patient and commands and text.startswith("/"):
                    if text[1:].strip() in LEAVE:
                        break
                    print(commands.command(text.strip()))
                    continue
                timing = runner.run(ask(answer, text))
                if options.stats:
                    say(timing)
    return 0


@contextlib.contextmanager
def _carrying_on() -> Iterator[None]:
    """Print the error of a question, and let Ctrl-C stop its answer only, so that the conversation continues."""
    try:
        yield
    except KeyboardInterrupt:
        print()
    except (RequestError, ServerError, UsageError) as error:
        say(f"gapless: error: {error}")


def _typed() -> Iterator[str]:
    """Yield lines from the keyboard or a pipe, until its end."""
    keyboard = sys.stdin.isatty()
    if keyboard:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (history and line editing in input())
    while True:
        try:
            text = input("> " if keyboard else "")
        except EOFError:
            if keyboard:
                print()
            break
        except KeyboardInterrupt:
            if not keyboard:
                raise
            print("\nCtrl-D leaves")
            continue
        if text.strip():
            yield text


@contextlib.contextmanager
def _answerer(settings: Settings, runner: asyncio.Runner) -> Iterator[Answerer]:
    """Return a client of the server at --url, or of an engine here. Raises UsageError for engine flags with a URL."""
    engine, url, insecure = settings.given(EngineConfig), settings.options.url, settings.options.insecure
    if url is not None:
        settings.refuse(EngineConfig, {"model", "seed"}, "is a matter of the server, not of a client with --url")
        model = engine["model"] if "model" in settings.typed else ""
        with contextlib.closing(Client(Target(url, model, settings.api_key, insecure=insecure))) as client:
            yield partial(answer_there, client)
        return
    settings.build(EngineConfig)  # report a wrong flag before torch is loaded
    llm = gapless.AsyncLLM.from_engine_args(engine)
    try:
        with starting():
            runner.run(llm.start())
        yield partial(answer_here, llm)
    finally:
        runner.run(llm.close())
