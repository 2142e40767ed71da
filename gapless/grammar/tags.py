"""Writes structural tags, in which free text goes with parts of a form, as a grammar in Lark's syntax.

They are trees of formats, {"format": {"type": "sequence", "elements": [...]}}, which vLLM takes too, in XGrammar's
names: https://xgrammar.mlc.ai/docs/structural_tag/structural_tag.html. vLLM's older form, {"triggers": [text],
"structures": [{"begin": text, "schema": schema, "end": text}]}, is the format triggered_tags in other words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from gapless.grammar.lark import from_grammar, from_regex
from gapless.text.call_grammar import quoted

ANY = "/(?s:.*)/"
"""The terminal of free text. Special tokens are no part of it."""
Format = Mapping[str, Any]
Options = Mapping[str, Any]
_TIMES = {"optional": "?", "plus": "+", "star": "*"}


def tag_grammar(value: Any, special: Mapping[str, int], options: Options) -> str:
    """Return the grammar of a structural tag. `special` are the special tokens of the model, of which texts may be
    made, and `options` those of JSON. Raises ValueError where it cannot be honoured."""
    if not isinstance(value, Mapping):
        raise ValueError("it must be an object")
    tree = value["format"] if "format" in value else _triggered(value)
    return TagGrammar(special, options).whole(tree)


def _triggered(value: Format) -> Format:
    """Return vLLM's older form as a format."""
    triggers, structures = value.get("triggers"), value.get("structures")
    if not _are_texts(triggers) or not isinstance(structures, list) or not structures:
        raise ValueError("it must have a format, or triggers, a list of texts, and structures, a list of objects")
    tags = []
    for one in structures:
        if not isinstance(one, Mapping) or not _are_texts([one.get("begin"), one.get("end")]):
            raise ValueError("a structure must be an object with begin, schema and end; begin and end are texts")
        content = {"type": "json_schema", "json_schema": one.get("schema")}
        tags.append({"type": "tag", "begin": one["begin"], "content": content, "end": one["end"]})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


class TagGrammar:
    """Makes the rules of a tree of formats. The lexer takes the longest text and does not go back, so that what is
    regular and stands together becomes one terminal, and free text takes what ends it along."""

    def __init__(self, special: Mapping[str, int], options: Options) -> None:
        self._special = special
        self._options = options
        self._lines: list[str] = []
        self._grammars: list[dict[str, str]] = []
        """What `grammar` formats bring, each under a name"""

    def whole(self, tree: Any) -> str:
        start = f"start: {self._of(tree, (), True)}"
        text = "\n".join([start, *self._lines])
        if not self._grammars:
            return text
        return json.dumps({"grammars": [{"name": "tags", "lark_grammar": text}, *self._grammars]})

    def _of(self, tree: Any, ends: Sequence[str], last: bool) -> str:
        """Return what a format and, after it, one of `ends` stand for in a rule. `last`: nothing comes after these."""
        kind = _kind(tree)
        if (regular := self._regular(tree)) is not None:
            return self._terminal(regular, ends)
        return str(getattr(self, f"_{kind}")(tree, ends, last))

    # What is regular.

    def _regular(self, tree: Any) -> str | None:
        """Return the terminal of a format that is one, None for others."""
        kind = _kind(tree)
        if kind == "const_string":
            return self._plain([_text(tree, "value")])
        if kind == "regex":
            return from_regex(_text(tree, "pattern"))
        if kind in ("sequence", "or"):
            parts = [self._regular(one) for one in _several(tree, "elements")]
            known = [f"({part})" for part in parts if part is not None]
            return (" " if kind == "sequence" else " | ").join(known) if len(known) == len(parts) else None
        return None

    def _plain(self, texts: Sequence[str]) -> str | None:
        """Return the terminal of any of these texts; None where a special token is in one."""
        if any(one in text for text in texts for one in self._special):
            return None
        return " | ".join(map(quoted, texts))

    def _terminal(self, regular: str, ends: Sequence[str], lazy: bool = False) -> str:
        """Return the name of a new terminal, with its end if that is text; `lazy` ends at the first end."""
        end = self._plain(ends) if ends else '""'
        if end is None and lazy:
            regular, lazy = f"/(?s:.+)/ & {regular}", False  # a special token ends any text
        name = f"part{len(self._lines)}"
        self._lines.append(f"{name.upper()}: ({regular}) {f'({end})' if end is not None and ends else ''}")
        self._lines.append(f"{name}{'[lazy]' * lazy}: {name.upper()}")
        return name if end is not None else f"{name}? ({self._one_of(ends)})"

    def _one_of(self, texts: Sequence[str]) -> str:
        return " | ".join(map(self._exactly, texts))

    def _exactly(self, text: str) -> str:
        """Return a text, in which special tokens are those tokens."""
        known = sorted([one for one in self._special if one in text], key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, known))})", text) if known else [text]
        found = [f"<[{self._special[part]}]>" if part in known else quoted(part) for part in parts if part]
        return " ".join(found) or '""'

    def _then(self, rule: str, ends: Sequence[str]) -> str:
        return f"({rule}) ({self._one_of(ends)})" if ends else f"({rule})"

    # One method a format.

    def _const_string(self, tree: Format, ends: Sequence[str], last: bool) -> str:
        return self._then(self._one_of([tree["value"]]), ends)

    def _json_schema(self, tree: Format, ends: Sequence[str], last: bool) -> str:
        schema = tree.get("json_schema")
        if not isinstance(schema, Mapping):
            raise ValueError("the schema of a tag must be an object")
        if tree.get("style", "json") != "json":
            raise ValueError("json_schema: style must be json")
        return self._then(f"%json {json.dumps({**schema, 'x-guidance': self._options})}", ends)

    def _grammar(self, tree: Format, ends: Sequence[str], last: bool) -> str:
        name = f"grammar{len(self._grammars)}"
        self._grammars.append({"name": name, "lark_grammar": from_grammar(_text(tree, "grammar"))})
        return self._then(f"@{name}", ends)

    def _any_text(self, tree: Format, ends: Sequence[str], last: bool) -> str:
        if ends:
            return self._terminal(ANY, ends, lazy=True)
        if not last:
            raise ValueError("any_text must be the end of the output, or be followed by the end of its tag")
        return self._terminal(ANY, ())

    def _sequence(self, tree: Format, ends: Sequence[str], last: bool) -> str:
        *parts, final = _several(tree, "elements")
        return " ".join([*[self._of(one, (), False) for one in parts], self._of(final, ends, last)])

    def _or(self, tree: Format, ends: Sequence[str], last: bool) -> str:
        return f"({' | '.join(self._of(one, ends, last) for one in _several(tree, 'elements'))})"

    def _optional(self, tree: Format, ends: Sequence[str], last: bool) -> str:
        return self._then(f"({self._of(tree.get('content'), (), False)}){_TIMES[tree['type']]}", ends)

    _plus = _star = _optional

    def _repeat(self, tree: Format, ends: Sequence[str], last: bool) -> str:
        least, most = tree.get("min"), tree.get("max")
        if type(least) is not int or type(most) is not int or least < 0 or not (most == -1 or least <= most):
            raise ValueError("repeat: min and max must be whole numbers, min up to max, where max may be -1")
        times = f"{{{least},{most if most >= 0 else ''}}}"
        return self._then(f"({self._of(tree.get('content'), (), False)}){times}", ends)

    def _tag(self, tree: Format, ends: Sequence[str], last: bool) -> str:
        begin, end = _text(tree, "begin"), tree.get("end")
        closings = [end] if isinstance(end, str) else end
        if not _are_texts(closings):
            raise ValueError("tag: end must be a text, or a list of texts")
        content = self._of(tree.get("content"), () if closings == [""] else closings, last and closings == [""])
        return self._then(f"{self._exactly(begin)} {content}", ends)

    def _triggered_tags(self, tree: Format, ends: Sequence[str], last: bool) -> str:
        tags, triggers = _tags(tree), tree.get("triggers")
        if not _are_texts(triggers):
            raise ValueError("triggered_tags: triggers must be a list of texts")
        by_trigger: dict[str, list[Format]] = {}
        for tag in tags:
            trigger = next((text for text in triggers if text and tag["begin"].startswith(text)), None)
            if trigger is None:
                raise ValueError(f"no trigger is how {tag['begin'][:40]!r} begins")
            by_trigger.setdefault(trigger, []).append({**tag, "begin": tag["begin"].removeprefix(trigger)})
        found = [
            f"{self._terminal(ANY, [trigger], lazy=True)} ({' | '.join(self._of(tag, (), False) for tag in some)})"
            for trigger, some in by_trigger.items()
        ]
        one, rest = f"({' | '.join(found)})", self._any_text(tree, ends, last)
        first = f"({' | '.join(self._of(tag, (), False) for tag in tags)})" if tree.get("at_least_one") else ""
        if tree.get("stop_after_first"):
            return self._then(first, ends) if first else f"({self._then(one, ends)} | {rest})"
        return f"{first} {one}* {rest}"

    def _tags_with_separator(self, tree: Format, ends: Sequence[str], last: bool) -> str:
        one = f"({' | '.join(self._of(tag, (), False) for tag in _tags(tree))})"
        between = self._exactly(_text(tree, "separator"))
        several = one if tree.get("stop_after_first") else f"{one} ({between} {one})*"
        return self._then(f"({several})" + "?" * (not tree.get("at_least_one")), ends)


FORMATS: Mapping[str, tuple[str, ...]] = {
    "const_string": ("value",),
    "json_schema": ("json_schema", "style"),
    "regex": ("pattern",),
    "grammar": ("grammar",),
    "any_text": (),
    "sequence": ("elements",),
    "or": ("elements",),
    "optional": ("content",),
    "plus": ("content",),
    "star": ("content",),
    "repeat": ("min", "max", "content"),
    "tag": ("begin", "content", "end"),
    "triggered_tags": ("triggers", "tags", "at_least_one", "stop_after_first"),
    "tags_with_separator": ("tags", "separator", "at_least_one", "stop_after_first"),
}
"""The types of formats, each with its fields"""


def _kind(tree: Any) -> str:
    """Return the type of a format, which has the fields of this type and no others."""
    kind = tree.get("type") if isinstance(tree, Mapping) else None
    if not isinstance(kind, str) or kind not in FORMATS:
        raise ValueError(f"a format must be an object with a type of {', '.join(FORMATS)}; found {str(kind)[:40]!r}")
    known = ("type", *FORMATS[kind])
    if unknown := [name for name in tree if name not in known and tree[name] not in (None, False, [])]:
        raise ValueError(f"{kind}: {unknown[0][:40]!r} is not supported: leave it out")
    return kind


def _text(tree: Format, name: str) -> str:
    if not isinstance(found := tree.get(name), str):
        raise ValueError(f"{tree['type']}: {name} must be a text")
    return found


def _several(tree: Format, name: str) -> list[Any]:
    if not isinstance(found := tree.get(name), list) or not found:
        raise ValueError(f"{tree['type']}: {name} must be a list of formats")
    return found


def _tags(tree: Format) -> list[Format]:
    tags = _several(tree, "tags")
    for tag in tags:
        if not isinstance(tag, Mapping) or tag.get("type") != "tag" or not isinstance(tag.get("begin"), str):
            raise ValueError(f"{tree['type']}: tags must be formats of type tag, whose begin is a text")
    return tags


def _are_texts(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) for text in value)
