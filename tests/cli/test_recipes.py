"""The command lines of recipes.txt: each starts as if written in our own flags, or is refused as said there."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from gapless.base.config import EngineConfig
from gapless.cli.errors import UsageError
from gapless.cli.flags import Command
from gapless.server.config import ServerConfig
from gapless.text.replies import form_name
from gapless.text.reply_tables import REASONING_NAMES, REASONING_TABLES, TOOL_NAMES, TOOL_TABLES

SERVE = Command("serve", "", (EngineConfig, ServerConfig), model_word=True, greedy=True)
TEXT = (Path(__file__).parent / "recipes.txt").read_text(encoding="utf-8")
STARTS = re.findall(r"^(\S.*)\n    is(.*)(?:\n    notes (.*))?", TEXT, re.MULTILINE)
REFUSED = re.findall(r"^(\S.*)\n    refused (.*)", TEXT, re.MULTILINE)


def flags_of(line: str) -> list[str]:
    words = shlex.split(line)
    return words[{"python": 3, "python3": 3, "vllm": 2}.get(words[0], 1) :]


def read(words: list[str]) -> tuple[dict[str, Any], list[str]]:
    settings = SERVE.read(words, {})
    settings.build(EngineConfig), settings.build(ServerConfig)
    fields = settings.given(EngineConfig) | settings.given(ServerConfig)
    for name in {"speculative_config", "override_generation_config"} & fields.keys():
        fields[name] = json.loads(fields[name])
    return fields, settings.notes


@pytest.mark.parametrize(("line", "ours", "noted"), STARTS, ids=[line[:60] for line, _, _ in STARTS])
def test_a_recipe_means_the_same_as_our_own_flags(line, ours, noted):
    found, notes = read(flags_of(line))
    assert found.pop("model")
    assert (found, []) == read(shlex.split(ours))
    assert sorted(note.split()[0] for note in notes) == sorted(noted.split())
    assert form_name(found.get("tool_call_parser", "auto"), TOOL_NAMES) in {"auto", *TOOL_TABLES}
    assert form_name(found.get("reasoning_parser", "auto"), REASONING_NAMES) in {"auto", "none", *REASONING_TABLES}


@pytest.mark.parametrize(("line", "answer"), REFUSED, ids=[line[:60] for line, _ in REFUSED])
def test_a_recipe_that_asks_for_something_else_is_answered_in_one_line(line, answer):
    with pytest.raises(UsageError) as caught:
        read(flags_of(line))
    assert str(caught.value).startswith(answer)


def test_the_table_of_recipes_has_sixty_lines():
    lines = [line for line, *_ in (*STARTS, *REFUSED)]
    assert len(set(lines)) == len(lines) >= 60
    assert TEXT.count("\n    is") == len(STARTS) and TEXT.count("\n    refused") == len(REFUSED)
