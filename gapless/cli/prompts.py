"""The prompts of `gapless run`: words, standard input, a file of lines, or a file of JSON lines."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gapless.cli.errors import UsageError
from gapless.lab.datasets import json_objects


class RunPrompt(NamedTuple):
    """A text or a conversation, and the other fields of its JSON line, which come back with the answer."""

    content: str | list[dict[str, Any]]
    extra: Mapping[str, Any] = {}


def gather(words: list[str], path: str | None) -> list[RunPrompt]:
    """The prompts asked for. Raises ConfigError, naming file and line."""
    if words and path is not None:
        raise UsageError("give a prompt or --file, not both")
    if words:
        return [RunPrompt(" ".join(words))]
    if path is None and sys.stdin.isatty():
        raise UsageError("no prompt: gapless run 'What is 2 + 2?', or --file FILE, or a prompt on standard input")
    if path is not None and path.endswith((".jsonl", ".ndjson")):
        return [_json_prompt(value, where) for where, value in json_objects(path, "--file")]
    text = _read(path)
    texts = [text.strip()] if path is None else text.split("\n")
    prompts = [RunPrompt(text) for text in texts if text.strip()]
    if not prompts:
        raise UsageError(f"{path or 'standard input'} holds no prompt")
    return prompts


def _read(path: str | None) -> str:
    try:
        return sys.stdin.read() if path is None or path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path or 'standard input'}: {error}") from error


def _json_prompt(value: dict[str, Any], where: str) -> RunPrompt:
    if ("prompt" in value) == ("messages" in value):
        raise UsageError(f'{where}: expected {{"prompt": ...}} or {{"messages": [...]}}')
    if "prompt" in value:
        text = value.pop("prompt")
        if not isinstance(text, str):
            raise UsageError(f"{where}: prompt must be text")
        return RunPrompt(text, value)
    messages = value.pop("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise UsageError(f'{where}: messages must be a list of {{"role": ..., "content": ...}}')
    return RunPrompt(messages, value)
