"""Puts a model's thinking before the grammar of a form: free text until the end of its thinking, then the form."""

from __future__ import annotations

import json
from collections.abc import Collection

from gapless.base.structured import Thinking
from gapless.grammar.vocabulary import Vocabulary
from gapless.text.call_grammar import as_terminals


def after_thinking(grammar: str, thinking: Thinking, vocabulary: Vocabulary, marks: Collection[str]) -> str:
    """Return a grammar of what `thinking` allows, followed by `grammar`.

    Text of thinking is any token but special ones, `marks` and ends of sequence. An end that is one token is only that
    token; an end that is text is found in the text, wherever tokens begin. There a BudgetMatcher keeps the budget.
    """
    if thinking.free:
        return json.dumps({"grammars": [{"lark_grammar": _free(thinking, vocabulary)}]})
    # A grammar in Lark's syntax is that text, any other is JSON.
    parts = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    begin, end, between, answer = (as_terminals(text, vocabulary.added) for text in thinking[:4])
    apart = vocabulary.kept_apart((*marks, thinking.begin, thinking.end)) | set(vocabulary.ends)
    free = _others(apart, thinking.budget)
    # White space after the end is not part of the form; models write one or two line breaks.
    lines = [f"start: thought{'?' * bool(begin)} {answer} @form", rf"thought: {begin} rest {between} /\n{{0,2}}/"]
    if thinking.end in vocabulary.added:
        lines.append(f"rest: {free} {end}")
    else:
        lines.append(f"rest[lazy]: /(?s:.*)/ {json.dumps(thinking.end)}")
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, {**parts[0], "name": "form"}, *parts[1:]]})


def is_counted(thinking: Thinking, vocabulary: Vocabulary) -> bool:
    """Return whether a grammar can count the tokens of thinking: its marks are tokens of their own."""
    marks = (thinking.begin, thinking.end) if thinking.free and thinking.begin else (thinking.end,)
    return all(mark in vocabulary.added for mark in marks)


def _others(tokens: Collection[int], most: int | None) -> str:
    """Return the part of a rule that is any tokens but these, `most` at most."""
    times = "*" if most is None else f"{{0,{most}}}"
    return '""' if most == 0 else f"<[^{','.join(map(str, sorted(tokens)))}]>{times}"


def _free(thinking: Thinking, vocabulary: Vocabulary) -> str:
    """Return a grammar of any tokens whose first thinking has its budget. An output may end anywhere but where
    the end of the thinking is due."""
    most = thinking.budget
    if most is None or not is_counted(thinking, vocabulary):
        return "start: <[*]>*"
    end = vocabulary.added[thinking.end]
    before, begin = "", ""
    lines = [f"thought: {_others([end], most)} <[{end}]>", "any: <[*]>*"]
    if thinking.begin:
        opening = vocabulary.added[thinking.begin]
        lines.append(f"out: {_others([opening], None)}")
        before, begin = "out | ", f"out <[{opening}]> "
    ways = f"{before}{begin}thought any" + (f" | {begin}{_others([end], most - 1)}" if most else "")
    return "\n".join([f"start: {ways}", *lines])
