"""The prompts of `gapless run`: words, standard input, a file of lines, or a file of JSON lines."""

from __future__ import annotations

import json
import sys
from typing import Any, NamedTuple

from gapless.cli.errors import UsageError


class RunPrompt(NamedTuple):
    """A text or a conversation, and what else its JSON line said: that comes back with the answer."""

    text: str | None
    messages: list[dict[str, Any]] | None
    extra: dict[str, Any]

    def as_messages(self) -> list[dict[str, Any]]:
        return self.messages if self.messages is not None else [{"role": "user", "content": self.text}]


def gather(words: list[str], path: str | None) -> list[RunPrompt]:
    """The prompts asked for. Raises UsageError, naming file and line."""
    if words and path is not None:
        raise UsageError("give a prompt or --file, not both")
    if words:
        return [RunPrompt(" ".join(words), None, {})]
    if path is None and sys.stdin.isatty():
        raise UsageError("no prompt: gapless run 'What is 2 + 2?', or --file FILE, or a prompt on standard input")
    text = _read(path)
    if path is None:
        return _some([RunPrompt(text.strip(), None, {})] if text.strip() else [], "standard input")
    lines = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]  # JSON text may hold U+2028
    if path.endswith((".jsonl", ".ndjson")):
        return _some([_json_prompt(line, f"{path}:{i}") for i, line in lines], path)
    return _some([RunPrompt(line, None, {}) for _, line in lines], path)


def _some(prompts: list[RunPrompt], source: str) -> list[RunPrompt]:
    if not prompts:
        raise UsageError(f"{source} holds no prompt")
    return prompts


def _read(path: str | None) -> str:
    try:
        if path in (None, "-"):
            return sys.stdin.read()
        assert path is not None
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path or 'standard input'}: {error}") from error


def _json_prompt(line: str, where: str) -> RunPrompt:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where}: not JSON: {error}") from error
    if not isinstance(value, dict) or ("prompt" in value) == ("messages" in value):
        raise UsageError(f'{where}: expected {{"prompt": ...}} or {{"messages": [...]}}')
    text, messages = value.pop("prompt", None), value.pop("messages", None)
    if messages is None and not isinstance(text, str):
        raise UsageError(f"{where}: prompt must be text")
    if text is None and not _are_messages(messages):
        raise UsageError(f'{where}: messages must be a list of {{"role": ..., "content": ...}}')
    return RunPrompt(text, messages, value)


def _are_messages(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and "role" in m for m in value)
