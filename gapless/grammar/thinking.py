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
    token; an end that is text is found in the text, wherever tokens begin.
    """
    # A grammar in Lark's syntax is that text, any other is JSON.
    parts = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    begin, end, between, answer = (as_terminals(text, vocabulary.added) for text in thinking)
    apart = vocabulary.kept_apart((*marks, thinking.begin, thinking.end)) | set(vocabulary.ends)
    free = f"<[^{','.join(map(str, sorted(apart)))}]>*"
    # White space after the end is not part of the form; models write one or two line breaks.
    lines = [f"start: thought{'?' * bool(begin)} {answer} @form", rf"thought: {begin} rest {between} /\n{{0,2}}/"]
    if thinking.end in vocabulary.added:
        lines.append(f"rest: {free} {end}")
    else:
        lines.append(f"rest[lazy]: /(?s:.*)/ {json.dumps(thinking.end)}")
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, {**parts[0], "name": "form"}, *parts[1:]]})
