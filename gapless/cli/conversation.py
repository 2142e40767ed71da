"""The conversation of `gapless chat`, and the commands that change it: lines that begin with a slash."""

from __future__ import annotations

from typing import Any

from gapless.base.spellings import nearest
from gapless.cli.errors import UsageError
from gapless.cli.sampling import SamplingFlags, checked_fields
from gapless.cli.spec import convert, specs
from gapless.cli.talk import Answerer, Messages, show

CHAT_HELP = """/help                     this list
/exit                     leave; so does Ctrl-D
/clear                    forget what was said; the system message stays
/system TEXT              begin again with this system message, without TEXT with none
/temperature VALUE        likewise /top-p, /top-k, /max-tokens, /stop; without VALUE the default again
A space before the slash makes the line a question."""
LEAVE = ("exit", "quit", "bye")
CHAT_COMMANDS = ("help", *LEAVE, "clear", "system")
_SPECS = {spec.field: spec for spec in specs(SamplingFlags)}


class Conversation:
    """The messages so far, and how the next answer is sampled."""

    def __init__(self, system: str | None, fields: dict[str, Any]) -> None:
        self._fields = fields
        self._messages: Messages = []
        self._begin(system)

    def _begin(self, system: str | None) -> None:
        self._messages = [{"role": "system", "content": system}] if system else []

    async def ask(self, answer: Answerer, text: str) -> str:
        """Ask, show the answer and remember both; return how long it took in one line."""
        question = {"role": "user", "content": text}
        said, timing = await show(answer([*self._messages, question], self._fields))
        self._messages += [question, {"role": "assistant", "content": said}]
        return timing

    def command(self, line: str) -> str:
        """Carry out a line such as `/top-p 0.9`; return the text to print. Raises UsageError."""
        name, _, rest = line.removeprefix("/").partition(" ")
        field, rest = name.replace("-", "_"), rest.strip()
        if name == "help":
            return CHAT_HELP
        if name == "clear":
            self._messages = [message for message in self._messages if message["role"] == "system"]
            return "what was said is forgotten"
        if name == "system":
            self._begin(rest)
            return "a new conversation begins"
        if field not in _SPECS:
            near = nearest(name, [*CHAT_COMMANDS, *(one.replace("_", "-") for one in _SPECS)])
            raise UsageError(f"unknown command /{name}" + (f"; did you mean /{near}?" if near else "; see /help"))
        kept = {key: value for key, value in self._fields.items() if key != field}
        value = convert(_SPECS[field], rest, f"/{name}") if rest else None
        given = [*value] if isinstance(value, tuple) else value
        self._fields = checked_fields(kept if given is None else {**kept, field: given})
        return f"{name} is {rest or 'the default'}"
