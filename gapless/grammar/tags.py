"""Writes structural tags, free text with parts of a form, as a grammar in Lark's syntax.

They are trees of formats, {"format": {"type": "sequence", "elements": [...]}}, which vLLM takes too, in XGrammar's
names: https://xgrammar.mlc.ai/docs/structural_tag/structural_tag.html. vLLM's older form, {"triggers": [text],
"structures": [{"begin": text, "schema": schema, "end": text}]}, is the format triggered_tags in other words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, permutations
from typing import Any, NamedTuple, TypeGuard

from gapless.grammar.lark import from_grammar, from_regex
from gapless.text.call_grammar import quoted
from gapless.text.schema_words import plain_schema

ANY = "/(?s:.*)/"
"""The terminal of free text. Special tokens are no part of it."""
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
MOST_TEXTS = 64
"""Texts that may end one part, and triggers"""
_TIMES = {"optional": "?", "plus": "+", "star": "*"}
Format = Mapping[str, Any]


class Ends(NamedTuple):
    """The end of a part: one of these texts."""

    rule: str
    """The rule that matches them"""
    texts: tuple[str, ...]
    plain: str
    """The terminal that matches the ends without a special token; empty if there are none"""
    others: tuple[tuple[str, str], ...]
    """The others: the text up to the first special token, and what stands for the rest"""


class Item(NamedTuple):
    """A part of a sequence: a terminal, a rule's text, or a format with its own ends, if it has some."""

    terminal: str | None
    text: str = ""
    tree: Any = None
    ends: Ends | None = None


def tag_grammar(value: Any, special: Mapping[str, int], options: Mapping[str, Any]) -> str:
    """Return the grammar of a structural tag. `special` are the special tokens of the model, which may be in its texts,
    and `options` the options of JSON. Raises ValueError if it cannot be honoured."""
    if not isinstance(value, Mapping):
        raise ValueError("it must be an object")
    is_tree = value.get("format") is not None
    _only(value, ("type", "format") if is_tree else ("type", "triggers", "structures"), "it")
    written = json.dumps(value)
    known = {text: token for text, token in special.items() if json.dumps(text)[1:-1] in written}
    return TagGrammar(known, options).whole(value["format"] if is_tree else _triggered(value))


def _triggered(value: Format) -> Format:
    """Return vLLM's older form as a format."""
    triggers, structures = value.get("triggers"), value.get("structures")
    if not _are_texts(triggers) or not isinstance(structures, list) or not structures:
        raise ValueError("it must have a format, or triggers, a list of texts, and structures, a list of objects")
    tags = []
    for one in structures:
        if not isinstance(one, Mapping) or not _are_texts([one.get("begin"), one.get("end")]):
            raise ValueError("a structure must be an object with begin, schema and end; begin and end are texts")
        _only(one, ("begin", "schema", "end"), "a structure")
        content = {"type": "json_schema", "json_schema": one.get("schema")}
        tags.append({"type": "tag", "begin": one["begin"], "content": content, "end": one["end"]})
    used = [text for text in triggers if any(tag["begin"].startswith(text) for tag in tags)]
    return {"type": "triggered_tags", "triggers": used or triggers, "tags": tags}


class TagGrammar:
    """Makes the rules of a tree of formats.

    The lexer takes the longest match and never backtracks. Adjacent regular parts therefore share one terminal, and the
    terminal of free text includes its end. Every format has one rule for each of its ends, so that a grammar is about
    as long as its tree.
    """

    def __init__(self, special: Mapping[str, int], options: Mapping[str, Any]) -> None:
        self._special = special
        self._split = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")
        self._options = options
        self._lines: list[str] = []
        self._grammars: list[dict[str, str]] = []
        """Rules of formats of type `grammar`, each under a name"""
        self._terminals: dict[int, str | None] = {}
        """The terminal of each format that is regular, by id; None for others"""
        self._rules: dict[tuple[int, str, bool], str] = {}
        """The rule of each format with its ends"""
        self._ends: dict[tuple[str, ...], Ends] = {}
        self._apart: set[tuple[str, ...]] = set()
        """Texts that end free text; none is in another"""

    def whole(self, tree: Any) -> str:
        start = self._rule(tree, None, True)
        text = "\n".join([f"start: {start}", *self._lines])
        if not self._grammars:
            return text
        return json.dumps({"grammars": [{"name": "tags", "lark_grammar": text}, *self._grammars]})

    def _rule(self, tree: Any, ends: Ends | None, last: bool) -> str:
        """Return the name of the rule that matches `tree`, then one of `ends`. `last`: nothing comes after these."""
        key = id(tree), ends.rule if ends else "", last
        if key not in self._rules:
            body = " ".join(self._bodies(tree, ends, last))
            self._rules[key] = self._line("rule", body)
        return self._rules[key]

    def _line(self, kind: str, body: str, flags: str = "") -> str:
        """Add a rule, or a terminal where `kind` is upper-case, and return its name."""
        name = f"{kind}{len(self._lines)}"
        self._lines.append(f"{name}{flags}: {body}")
        return name

    def _bodies(self, tree: Any, ends: Ends | None, last: bool) -> Iterator[str]:
        """Yield the rules for the items of a format; adjacent regular ones are one."""
        items = [*_joined(self._items(tree))]
        for number, item in enumerate(items, 1):
            after = ends if number == len(items) else None
            if item.terminal is not None:
                yield self._terminal(item.terminal, after)
            elif item.tree is not None and item.ends is None:
                make = getattr(self, f"_{_kind(item.tree)}")
                yield make(item.tree, after, last and number == len(items))
            else:
                part = item.text if item.tree is None else self._rule(item.tree, item.ends, False)
                yield _then(part, after)

    def _items(self, tree: Any) -> Iterator[Item]:
        """Yield the parts of a format; the parts of sequences and tags each by itself."""
        if (regular := self._regular(tree)) is not None:
            yield Item(regular)
        elif (kind := _kind(tree)) == "const_string":
            yield from self._pieces(tree["value"])
        elif kind == "sequence":
            for one in tree["elements"]:
                yield from self._items(one)
        elif kind == "tag":
            yield from self._tag_items(tree)
        else:
            yield Item(None, tree=tree)

    def _tag_items(self, tag: Format) -> Iterator[Item]:
        yield from self._pieces(tag["begin"])
        if (texts := _ends_of(tag)) == ("",):
            yield from self._items(tag["content"])
        else:
            yield Item(None, tree=tag["content"], ends=self._ends_at(texts))

    def _pieces(self, text: str) -> Iterator[Item]:
        """Yield a text's special tokens and the texts between them."""
        at = 0
        for found in self._split.finditer(text):
            if found.start() > at:
                yield Item(quoted(text[at : found.start()]))
            yield Item(None, f"<[{self._special[found[0]]}]>")
            at = found.end()
        if at < len(text) or not text:
            yield Item(quoted(text[at:]))

    def _exactly(self, text: str) -> str:
        return " ".join(item.text or str(item.terminal) for item in self._pieces(text))

    def _ends_at(self, texts: tuple[str, ...]) -> Ends:
        if texts not in self._ends:
            plain = [text for text in texts if not self._split.search(text)]
            terminal = self._line("END", " | ".join(map(quoted, plain))) if plain else ""
            others = []
            for text in texts:
                first, *rest = self._pieces(text)
                if text not in plain:
                    rest = rest if first.terminal else [first, *rest]
                    others.append((first.terminal or "", " ".join(item.text or str(item.terminal) for item in rest)))
            rule = self._line("end", " | ".join([terminal] * bool(plain) + [" ".join(other) for other in others]))
            self._ends[texts] = Ends(rule, texts, terminal, tuple(others))
        return self._ends[texts]

    # Terminals.

    def _regular(self, tree: Any) -> str | None:
        """Return the terminal of a format that is regular, None for others. Checks the fields of both."""
        if id(tree) not in self._terminals:
            found = self._made_regular(_kind(tree), tree)
            # Under a name it is as short in all that it is a part of.
            self._terminals[id(tree)] = found if found is None else self._line("PART", found)
        return self._terminals[id(tree)]

    def _made_regular(self, kind: str, tree: Format) -> str | None:
        match kind:
            case "const_string":
                return self._plain([_text(tree, "value")])
            case "regex":
                return from_regex(_text(tree, "pattern"))
            case "sequence" | "or":
                return _all([self._regular(one) for one in _several(tree)], " " if kind == "sequence" else " | ")
            case "optional" | "plus" | "star" | "repeat":
                part, times = self._regular(tree.get("content")), _times(tree)
                return part and (f"({part}){times}" if times else '""')
            case "tag":
                content, ends = self._regular(tree.get("content")), self._plain(_ends_of(tree))
                return _all([self._plain([_text(tree, "begin")]), content, ends], " ")
            case "tags_with_separator":
                one = _all([self._regular(tag) for tag in _tags(tree)], " | ")
                separator = self._plain([_text(tree, "separator")])
                return _listed(tree, one, separator) if one and separator else None
        return None

    def _plain(self, texts: Sequence[str]) -> str | None:
        """Return the terminal of any of these texts; None where a special token is in one."""
        return None if any(map(self._split.search, texts)) else " | ".join(map(quoted, texts))

    def _terminal(self, regular: str, ends: Ends | None, lazy: bool = False) -> str:
        """Return what stands for a terminal, then one of `ends`; `lazy`: the first that comes."""
        if ends is None:
            return self._line("part", self._line("PART", regular))
        found = []
        if ends.plain:
            found.append(self._line("part", self._line("PART", f"({regular}) {ends.plain}"), "[lazy]" * lazy))
        for before, rest in ends.others:
            found.append(f"{self._line('part', self._line('PART', f'({regular}) {before}'))} {rest}")
        return f"({' | '.join(found)})"

    def _free(self, tree: Format, ends: Ends | None, last: bool, stops: Sequence[str] = ()) -> str:
        """Return what stands for free text, up to one of `ends` or, elsewhere, of `stops`."""
        if ends is None and not last:
            raise ValueError(f"{tree['type']} must come last, or be followed by the end of its tag")
        texts = (*dict.fromkeys(stops), *(ends.texts if ends else ()))
        for one, other in permutations(texts, 2) if texts not in self._apart else ():
            if one == other or one in other[:-1]:
                raise ValueError(f"{tree['type']}: {other[:40]!r} cannot come, as {one[:40]!r} does before it")
        self._apart.add(texts)
        return self._terminal(ANY, ends, lazy=True)

    # Formats that are not regular. Each matches `tree`, then one of `ends`.

    def _json_schema(self, tree: Format, ends: Ends | None, last: bool) -> str:
        schema = tree.get("json_schema")
        if not isinstance(schema, Mapping):
            raise ValueError("json_schema: the schema must be an object")
        if tree.get("style") not in (None, "json"):
            raise ValueError("json_schema: style must be json")
        return _then(f"%json {json.dumps({**plain_schema(schema), 'x-guidance': self._options})}", ends)

    def _grammar(self, tree: Format, ends: Ends | None, last: bool) -> str:
        name = f"grammar{len(self._grammars)}"
        self._grammars.append({"name": name, "lark_grammar": from_grammar(_text(tree, "grammar"))})
        return _then(f"@{name}", ends)

    def _any_text(self, tree: Format, ends: Ends | None, last: bool) -> str:
        return self._free(tree, ends, last)

    def _or(self, tree: Format, ends: Ends | None, last: bool) -> str:
        return _one_of([self._rule(one, ends, last) for one in tree["elements"]])

    def _optional(self, tree: Format, ends: Ends | None, last: bool) -> str:
        return _one_of([self._rule(tree["content"], ends, last), ends.rule if ends else '""'])

    def _repeat(self, tree: Format, ends: Ends | None, last: bool) -> str:
        times = _times(tree)
        return _then(f"{self._rule(tree['content'], None, False)}{times}" if times else '""', ends)

    _star = _plus = _repeat

    def _triggered_tags(self, tree: Format, ends: Ends | None, last: bool) -> str:
        tags, triggers = _tags(tree), tree.get("triggers")
        if not _are_texts(triggers) or "" in triggers:
            raise ValueError(f"triggered_tags: triggers must be a list of up to {MOST_TEXTS} texts")
        for tag in tags:
            self._regular(tag)  # checks its fields
        direct = _one_of([self._rule(tag, None, False) for tag in tags]) if _flag(tree, "at_least_one") else ""
        if direct and _flag(tree, "stop_after_first"):
            return _then(direct, ends)
        heads = {trigger: self._terminal(ANY, self._ends_at((trigger,)), lazy=True) for trigger in triggers}
        found = [f"{head} {_one_of(self._rests(tags, trigger, triggers))}" for trigger, head in heads.items()]
        one, rest = _one_of(found), self._free(tree, ends, last, triggers)
        if _flag(tree, "stop_after_first"):
            return f"({_then(one, ends)} | {rest})"
        return f"{direct} {one}* {rest}"

    def _rests(self, tags: Sequence[Format], trigger: str, triggers: Sequence[str]) -> list[str]:
        """Return what follows a trigger in each of the tags that begin with it."""
        found = []
        for tag in tags:
            begin = tag["begin"]
            if not begin.startswith(tuple(triggers)):
                raise ValueError(f"triggered_tags: {begin[:40]!r} begins with none of the triggers: add one")
            if not begin.startswith(trigger):
                continue
            rest = begin.removeprefix(trigger)
            if self._split.findall(begin) != self._split.findall(trigger) + self._split.findall(rest):
                raise ValueError(f"triggered_tags: {trigger[:40]!r} ends inside of a special token")
            ends = None if (texts := _ends_of(tag)) == ("",) else self._ends_at(texts)
            found.append(f"{self._exactly(rest)} {self._rule(tag['content'], ends, False)}")
        if not found:
            raise ValueError(f"triggered_tags: no tag begins with the trigger {trigger[:40]!r}: leave it out")
        return found

    def _tags_with_separator(self, tree: Format, ends: Ends | None, last: bool) -> str:
        one = _one_of([self._rule(tag, None, False) for tag in _tags(tree)])
        return _then(_listed(tree, one, self._exactly(tree["separator"])), ends)


def _listed(tree: Format, one: str, separator: str) -> str:
    """Return the rule for tags: `one`, and another after each separator."""
    several = f"({one})" if _flag(tree, "stop_after_first") else f"({one}) (({separator}) ({one}))*"
    return several if _flag(tree, "at_least_one") else f"({several})?"


def _joined(items: Iterator[Item]) -> Iterator[Item]:
    """Yield the items, terminals that stand together as one."""
    for regular, some in groupby(items, lambda item: item.terminal is not None):
        if regular:
            yield Item(" ".join([f"({item.terminal})" for item in some]))
        else:
            yield from some


def _one_of(parts: Sequence[str]) -> str:
    """Return what stands for any one of these parts."""
    return f"({' | '.join(parts)})"


def _then(rule: str, ends: Ends | None) -> str:
    """Return what stands for `rule`, then one of `ends`."""
    return f"({rule}) {ends.rule}" if ends else f"({rule})"


def _all(parts: Sequence[str | None], between: str) -> str | None:
    """Return all of these terminals together; None where one is missing."""
    known = [f"({part})" for part in parts if part is not None]
    return between.join(known) if len(known) == len(parts) else None


def _kind(tree: Any) -> str:
    """Return the type of a format, which has the fields of this type and no others."""
    kind = tree.get("type") if isinstance(tree, Mapping) else None
    if not isinstance(kind, str) or kind not in FORMATS:
        raise ValueError(f"a format must be an object with a type of {', '.join(FORMATS)}; found {str(tree)[:40]!r}")
    _only(tree, ("type", *FORMATS[kind]), kind)
    return kind


def _only(value: Format, known: Sequence[str], what: str) -> None:
    if unknown := [name for name in value if name not in known and value[name] not in (None, False, [])]:
        raise ValueError(f"{what}: {unknown[0][:40]!r} is not supported: leave it out")


def _text(tree: Format, name: str) -> str:
    if not isinstance(found := tree.get(name), str):
        raise ValueError(f"{tree['type']}: {name} must be a text")
    return found


def _several(tree: Format, name: str = "elements") -> list[Any]:
    if not isinstance(found := tree.get(name), list) or not found:
        raise ValueError(f"{tree['type']}: {name} must be a list of formats")
    return found


def _flag(tree: Format, name: str) -> bool:
    if not isinstance(found := tree.get(name), bool | None):
        raise ValueError(f"{tree['type']}: {name} must be true or false")
    return bool(found)


def _times(tree: Format) -> str:
    """Return how often the content of a format comes; empty where it never does."""
    if tree["type"] in _TIMES:
        return _TIMES[tree["type"]]
    least, most = tree.get("min"), tree.get("max")
    if type(least) is not int or type(most) is not int or least < 0 or not (most == -1 or least <= most):
        raise ValueError("repeat: min and max must be whole numbers, min up to max, where max may be -1")
    return f"{{{least},{most if most > 0 else ''}}}" if most else ""


def _ends_of(tag: Format) -> tuple[str, ...]:
    found = [tag["end"]] if isinstance(tag.get("end"), str) else tag.get("end")
    if not _are_texts(found) or ("" in found and found != [""]):
        raise ValueError(f"tag: end must be a text, or a list of up to {MOST_TEXTS} texts that are not empty")
    return tuple(dict.fromkeys(found))


def _tags(tree: Format) -> list[Format]:
    tags = _several(tree, "tags")
    for tag in tags:
        if not isinstance(tag, Mapping) or tag.get("type") != "tag" or not isinstance(tag.get("begin"), str):
            raise ValueError(f"{tree['type']}: tags must be formats of type tag, whose begin is a text")
    return tags


def _are_texts(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and 0 < len(value) <= MOST_TEXTS and all(isinstance(text, str) for text in value)
