"""ReplyParser: splits a reply, token by token, into content, reasoning and tool calls.

One engine runs the tables of gapless.text.reply_tables. A terminal that the tokenizer has as an added token is found by
its id, and its text alone means nothing; any other is found in the text. Text is held back only while it may begin a
terminal, a call or the white space before one, so every split of a reply gives the same content, reasoning and calls.

Nothing a model writes raises an error. A section that begins no call is content, as it was written. A call that is
begun stays a call: when the reply ends inside it, its arguments are the text so far, and no complete JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gapless.base.structured import Thinking
from gapless.text.call_values import WHITE, ArgumentsReader, CallReader, EnvelopeReader, ParameterWriter, ValueScanner
from gapless.text.reply_tables import Move, ReplyState, ReplyTable


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A tool call, the `index`-th of the reply; `call_id` only if the model wrote one."""

    index: int
    name: str
    call_id: str | None


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A fragment of a call's arguments; the fragments of a call, joined, are its JSON."""

    index: int
    text: str


ReplyEvent = Content | Reasoning | CallBegun | CallArguments

_S = ReplyState
_PROSE = (_S.CONTENT, _S.REASONING)
_WORDS = (_S.HEADER, _S.NAME, _S.KEY)
_VALUES = (_S.VALUE, _S.STRING_VALUE, _S.JSON_VALUE, _S.PYTHON_VALUE)
_IN_CALL = (_S.ARGUMENTS, _S.PARAMETERS, _S.KEY, *_VALUES)
_TYPES = {_S.STRING_VALUE: frozenset(("string",)), _S.JSON_VALUE: frozenset[str]()}
_IDENTIFIER = re.compile(r"\s*([A-Za-z_][\w.-]*)?\s*")
_NO_TABLE = ReplyTable("none")
PIECE_CHARS = 1_000
"""Characters that are taken apart at a time: what follows a terminal is copied at each."""
MAX_WORD = 1_000
"""Characters of a name or a head that are kept; with more than these it names nothing."""


class Terminals:
    """The terminals that count as text in one state."""

    def __init__(self, moves: Iterable[Move]) -> None:
        self.moves = {move.terminal: move for move in moves}
        longest_first = sorted(self.moves, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._beginnings = {text[:n] for text in longest_first for n in range(1, len(text))}
        self._reach = max(map(len, self._beginnings), default=0)
        self._first_chars = re.compile("|".join({re.escape(text[0]) for text in longest_first}) or "(?!)")

    def find(self, text: str, last: bool) -> tuple[int, str]:
        """Return where the first terminal begins, and which; "" for the end of a text that may be its beginning.

        With `last` no text follows. Without a terminal, the index is that of the end.
        """
        if not self._first_chars.search(text):
            return len(text), ""
        found = self._pattern.search(text)
        end = found.start() if found else len(text)
        if not last:
            for at in range(max(0, len(text) - self._reach), min(end + 1, len(text))):
                if text[at:] in self._beginnings:
                    return at, ""
        return end, found[0] if found else ""


class ReplyFormat:
    """The tables of a model's tool calls and reasoning, joined for its tokenizer. Makes a parser for each reply."""

    def __init__(
        self,
        tools: ReplyTable | None = None,
        reasoning: ReplyTable | None = None,
        added: Mapping[str, int] | None = None,
    ) -> None:
        self.tools = tools or _NO_TABLE
        self.reasoning = reasoning or _NO_TABLE
        self.added = added = added or {}
        """Tokens that were added to the vocabulary whole, with their ids"""
        moves = (*self.reasoning.moves, *self.tools.moves)
        self.channels = (*self.tools.channels, *self.reasoning.channels)
        self.terminal_of = {added[move.terminal]: move.terminal for move in moves if move.terminal in added}
        """Terminal by token id."""
        self.by_token = {(move.state, move.terminal): move for move in moves if move.terminal in added}
        for move in self.tools.moves:  # a call may begin before the reasoning was closed
            if move.state is _S.CONTENT and move.to is not _S.CONTENT and move.terminal in added:
                self.by_token.setdefault((_S.REASONING, move.terminal), move)
        within = [one for one in added if len(one) > 1 and any(one in move.terminal for move in self.tools.moves)]
        self.in_text = re.compile("|".join(map(re.escape, sorted(self.terminal_of.values(), key=len)[::-1])) or "(?!)")
        """Finds terminals that are tokens in a text of the prompt's."""
        self.marks = tuple(sorted({*self.terminal_of.values(), *within}))
        """Added tokens that mean something in a reply, also as parts of a terminal of calls."""
        texts = [move for move in moves if move.terminal not in added]
        self.terminals = {
            (state, begun): Terminals(m for m in texts if m.state is state and not (begun and m.first))
            for state in _S
            for begun in (False, True)
        }
        """Terminals that are found in the text, by state and whether content has begun."""

    def thinking(self, begun: str = "", calls: bool = False) -> tuple[Thinking | None, str]:
        """Return what may come before a form of the answer, or of calls, and what of these has begun; None where no
        thinking may come. `begun` is what the prompt has of the reply."""
        form = self.reasoning.thinking
        if form is None:
            return None, begun
        form = form._replace(answer="") if calls else form
        if not begun.strip(WHITE):
            return form, ""
        if not self.reasoning.opening:  # messages, whose heads are in the grammar
            return form, begun
        _, closed, rest = begun.rpartition(form.end)
        if self.parser(begun=begun).in_reasoning:
            return form._replace(begin=""), ""
        return (None, rest.lstrip(WHITE)) if closed or rest.strip(WHITE) else (form, "")

    def begun_call(self, begun: str) -> str:
        """Return what this text has of calls, from the beginning of the first; empty without one."""
        trigger = self.tools.form.trigger if self.tools.form else ""
        if not trigger or trigger not in begun or (self.parser(begun=begun).in_prose and not self.tools.sure):
            return ""
        return begun[begun.find(trigger) :]

    def parser(self, functions: Mapping[str, Any] | None = None, begun: str = "") -> ReplyParser:
        """Return a parser for one reply.

        `functions` are the JSON schemas of the parameters by function name. `begun` is what the prompt has of the reply
        already: the parser continues it.
        """
        opening, end = self.reasoning.opening, begun.rstrip(WHITE)
        state = self.reasoning.start if self.tools is _NO_TABLE else self.tools.start
        if opening and end.endswith(opening):
            return ReplyParser(self, functions or {}, _S.REASONING)
        parser = ReplyParser(self, functions or {}, state)
        thinking = self.reasoning.thinking
        if end and not (thinking and opening and end.endswith(thinking.end)):
            # The text before the reasoning is the template's.
            parser.begin(begun[begun.find(opening) :] if opening in begun and opening not in self.added else begun)
        return parser


class ReplyParser:
    """Splits one reply. Feed it all text with `push`, then call `finish` once."""

    def __init__(self, form: ReplyFormat, functions: Mapping[str, Any], state: ReplyState) -> None:
        self._form = form
        self._tools = form.tools
        self._functions = functions
        self._state = state
        self._events: list[ReplyEvent] = []
        self._text = ""
        """Text that may begin a terminal."""
        self._space = ""
        """White space at the end of the content or reasoning; a call drops it."""
        self._fresh = state is _S.REASONING
        """The next text begins a stretch of content or reasoning: white space before it is dropped."""
        self._given: set[ReplyState] = set()
        """Which of content and reasoning have begun."""
        self._said: set[ReplyState] = set()
        """Which of them the reply has, without what the prompt has of it."""
        self._unsure: list[str] | None = [] if state is _S.HEADER else None
        """Text since the last content that is content again if no call comes of it."""
        self._word = ""
        self._reader: CallReader = ArgumentsReader()
        self._calls = 0
        self._parameters: ParameterWriter | None = None
        """Writer of the call that is open, if any."""
        self._written = False
        self._value = ValueScanner(python=True)
        self._key = ""
        self._theirs = 0
        """Characters at the beginning of `_text` that are the prompt's."""

    @property
    def in_reasoning(self) -> bool:
        """The model is reasoning now."""
        return self._state is _S.REASONING

    @property
    def in_prose(self) -> bool:
        """The text is content or reasoning now."""
        return self._state in _PROSE

    @property
    def open_call(self) -> int | None:
        """The index of the call that has begun and not ended."""
        return None if self._parameters is None else self._calls

    @property
    def held(self) -> int:
        """Characters at the end of the text that may still become content or reasoning, or be dropped."""
        return len(self._text) - self._theirs + len(self._space) + sum(map(len, self._unsure or ()))

    def begin(self, text: str) -> None:
        """Read what the prompt has of the reply. A call that it leaves open is whole in the events of the reply; all
        else was the prompt's, and is in none."""
        events, at = [], 0
        for found in self._form.in_text.finditer(text):
            events += self.push(text[at : found.start()], found[0])
            at = found.end()
        events += self.push(text[at:])
        calls = [event for event in events if isinstance(event, CallBegun)]
        if self._parameters is not None:
            said = "".join(e.text for e in events if isinstance(e, CallArguments) and e.index == self._calls)
            self._events = [replace(calls[-1], index=0), *[CallArguments(0, said)] * bool(said)]
        self._calls, self._space, self._theirs = 0, "", len(self._text)
        self._unsure = None if self._unsure is None else []
        self._said.clear()

    def push(self, text: str, terminal: str = "") -> list[ReplyEvent]:
        """Take text, and the terminal after it if that was a token."""
        for at in range(0, len(text), PIECE_CHARS):
            self._text += text[at : at + PIECE_CHARS]
            self._read()
        if terminal:
            self._read(last=True)
            self._terminal(terminal)
        return self._take()

    def finish(self) -> list[ReplyEvent]:
        """Return the held text; call it once, after the last token."""
        self._read(last=True)
        if self._parameters is not None and self._state is _S.ENVELOPE and self._reader.whole:
            self._end_call()
        elif self._parameters is not None and self._state in _VALUES:
            self._write(self._parameters.cut())
        elif self._parameters is None and self._unsure:
            self._give_up()
        if self._space and self._state in _PROSE:
            self._say(self._space)
        return self._take()

    def _take(self) -> list[ReplyEvent]:
        events, self._events = self._events, []
        return events

    def _read(self, last: bool = False) -> None:
        """Take apart the text at hand, as far as its meaning is certain."""
        while self._text:
            text, before = self._text, (self._state, _S.CONTENT in self._given)
            terminals = self._form.terminals[before]
            at, literal = terminals.find(text, last)
            used = _HANDLERS[self._state](self, text[:at]) if at else 0
            self._text, self._theirs = text[used:], max(0, self._theirs - used)
            if used < at or before != (self._state, _S.CONTENT in self._given) or at == len(text):
                continue
            if self._quoted:
                _HANDLERS[self._state](self, text[at])
                self._text, self._theirs = text[at + 1 :], 0
            elif literal:
                move = terminals.moves[literal]
                self._text, self._theirs = text[at + (0 if move.kept else len(literal)) :], 0
                self._move(move)
            else:
                return

    @property
    def _quoted(self) -> bool:
        """The text ends inside a string of JSON: no terminal counts there."""
        if self._state in (_S.ENVELOPE, _S.ARGUMENTS):
            return self._reader.quoted
        written = self._parameters
        return self._state in _VALUES and written is not None and written.is_json and self._value.quoted

    def _terminal(self, literal: str) -> None:
        """Take a terminal that came as a token; where it means nothing, it is text."""
        move = self._form.by_token.get((self._state, literal))
        if move is not None:
            self._move(move)
        else:
            self._text += literal
        self._read()

    def _move(self, move: Move) -> None:
        was = self._state
        if was in _PROSE:
            self._unsure, self._space = [self._space], ""
        elif was in _VALUES and self._parameters is not None:
            self._write(self._parameters.end_value())
        elif (was is _S.ENVELOPE and self._parameters is None) or (
            was is _S.NAME and move.to is not was and not self._begin_named(self._word)
        ):
            self._give_up()
            self._text = move.terminal * (not move.kept) + self._text
            return
        if self._parameters is not None and move.to not in _IN_CALL:
            self._end_call()
        if was is _S.KEY:
            self._key = self._word.strip()
        if move.to in (_S.NAME, _S.ENVELOPE) and self._unsure is None:
            self._unsure = []
        if not move.kept:
            self._note(move.terminal)
        if _S.HEADER in (was, move.to):
            self._unsure = None
        self._enter(self._channel() if move.to is _S.CHANNEL else move.to)

    def _enter(self, state: ReplyState) -> None:
        was, self._state = self._state, state
        if state in _PROSE:
            self._begin_prose(was)
        elif state in _WORDS:
            # Two words in one head stay apart without the terminal between them.
            self._word = self._word + " " if state is was else ""
        elif state in _VALUES and self._parameters is not None:
            python = state is _S.PYTHON_VALUE
            self._value = ValueScanner(python)
            self._write(self._parameters.begin_value(self._key, _TYPES.get(state), python))
        elif state is _S.ENVELOPE:
            self._reader = EnvelopeReader(self._tools.sure)
        elif state is _S.ARGUMENTS:
            self._reader = ArgumentsReader()

    def _begin_prose(self, was: ReplyState) -> None:
        if self._unsure is not None and was not in _PROSE:
            self._give_up()
        else:
            self._unsure = None
            self._fresh = True

    def _channel(self) -> ReplyState:
        """Return the state of a message's body by its head."""
        for mark, state in self._form.channels:
            if mark not in self._word:
                continue
            if state is not _S.ARGUMENTS:
                return state
            name = self._word.split(mark, 1)[1].split(maxsplit=1)[:1]
            if name and self._begin_named(name[0]):
                return state
        return _S.CONTENT

    def _give_up(self) -> None:
        """No call comes of the text since the last content: it is content."""
        text = "".join(self._unsure or ())
        self._unsure = None
        self._state = _S.CONTENT
        self._prose(text)

    def _note(self, text: str) -> None:
        if self._unsure is not None:
            self._unsure.append(text)

    # Handlers of text by state. Each returns the number of characters that it took; it may change the state.

    def _prose(self, text: str) -> int:
        """Give out content or reasoning, but for the white space at its end."""
        new = text[self._theirs :].lstrip(WHITE) if self._fresh else text[self._theirs :]
        if new and self._fresh:
            self._fresh = False
            self._space = "\n" if self._state in self._said else ""
        whole = self._space + new
        said = whole.rstrip(WHITE)
        self._space = whole[len(said) :]
        if said:
            self._say(said)
        return len(text)

    def _say(self, text: str) -> None:
        self._given.add(self._state)
        self._said.add(self._state)
        self._events.append(Content(text) if self._state is _S.CONTENT else Reasoning(text))

    def _drop(self, text: str) -> int:
        self._note(text)
        return len(text)

    def _add_to_word(self, text: str) -> int:
        used = len(text)
        if self._state is _S.NAME and not self._tools.sure:
            fits = _IDENTIFIER.match(self._word + text)
            used = fits.end() - len(self._word) if fits else 0
        self._word += text[: max(0, min(used, MAX_WORD + 1 - len(self._word)))]
        self._note(text[:used])
        if used < len(text):
            self._give_up()
        return used

    def _json(self, text: str) -> int:
        """Read a call's JSON, or its arguments'."""
        reader = self._reader
        used = reader.feed(text)
        self._note(text[:used])
        if self._parameters is None and reader.ready and not reader.failed:
            self._begin_call(reader.name or "", None)
        if self._parameters is not None:
            self._write(reader.take())
            if reader.done:
                self._end_call()
                self._enter(self._tools.after)
        elif reader.done or reader.failed:
            self._give_up()
        return used

    def _add_to_value(self, text: str) -> int:
        assert self._parameters is not None
        read = self._value.feed(text)
        used = read if self._state is _S.PYTHON_VALUE else len(text)
        self._write(self._parameters.write(text[:used]))
        if self._state is _S.PYTHON_VALUE and self._value.done:
            self._write(self._parameters.end_value())
            self._enter(_S.KEY)
        return used

    # Calls

    def _begin_named(self, text: str) -> bool:
        """Begin the call whose name is in the text; False when none is."""
        found = len(text) <= MAX_WORD and re.fullmatch(self._tools.name_pattern, text.strip(), re.DOTALL)
        if not found or not found["name"]:
            return False
        self._begin_call(found["name"], found.groupdict().get("id") or None)
        return True

    def _begin_call(self, name: str, call_id: str | None) -> None:
        self._unsure = None
        self._parameters = ParameterWriter(self._functions.get(name), self._tools.trims)
        self._written = False
        self._events.append(CallBegun(self._calls, name, call_id))

    def _write(self, text: str) -> None:
        if text:
            self._written = True
            self._events.append(CallArguments(self._calls, text))

    def _end_call(self) -> None:
        assert self._parameters is not None
        self._write(self._parameters.end() if self._written else "{}")
        self._parameters = None
        self._calls += 1


_HANDLERS: dict[ReplyState, Callable[[ReplyParser, str], int]] = {
    **dict.fromkeys(_PROSE, ReplyParser._prose),
    **dict.fromkeys((_S.BETWEEN, _S.PARAMETERS), ReplyParser._drop),
    **dict.fromkeys(_WORDS, ReplyParser._add_to_word),
    **dict.fromkeys((_S.ENVELOPE, _S.ARGUMENTS), ReplyParser._json),
    **dict.fromkeys(_VALUES, ReplyParser._add_to_value),
}
