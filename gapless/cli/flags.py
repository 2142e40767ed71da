"""Command lines made of config records: the command line beats the environment, which beats the config file."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import sys
import textwrap
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

from gapless.base.addresses import hide_password
from gapless.base.errors import ConfigError
from gapless.base.spellings import TABLE, did_you_mean, foreign_names, nearest, rows_of
from gapless.base.variables import PREFIX
from gapless.cli.errors import UsageError
from gapless.cli.output import say
from gapless.cli.spec import Spec, convert, specs
from gapless.cli.spellings import JSON_FIELDS, Rewritten, rewrite
from gapless.cli.variables import mistyped
from gapless.lab.target import DEFAULT_URL

T = TypeVar("T")
KEY_VARIABLES = ("GAPLESS_API_KEY", "OPENAI_API_KEY")


class Settings(NamedTuple):
    """A parsed command line: `options` are the command's own, `values` belong to config records."""

    options: argparse.Namespace
    values: dict[type, dict[str, Any]]
    typed: frozenset[str]
    """Config fields that stood on the command line itself."""
    notes: list[str]
    """Warnings about flags that changed nothing."""
    said: Mapping[str, str]
    """The flag, variable or key as it was typed, by field."""

    @property
    def api_key(self) -> str:
        """The typed value, else the first variable that is set, else nothing."""
        return self.options.api_key or next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), "")

    def refuse(self, config: type, except_for: Collection[str], why: str) -> None:
        """Raise UsageError for a typed flag of `config` that is not one of `except_for`."""
        wrong = sorted((self.typed & self.values[config].keys()) - set(except_for))
        if wrong:
            raise UsageError(f"{self.said.get(wrong[0]) or flag_of(wrong[0])} {why}")

    def show_notes(self) -> None:
        for note in self.notes:
            say(f"gapless: {note}")

    def given(self, config: type) -> dict[str, Any]:
        """The fields of `config` that were set anywhere, as keyword arguments."""
        return dict(self.values[config])

    def build(self, config: type[T]) -> T:
        """The record itself. Raises ConfigError, which names the flag as it was typed, when the values do not fit."""
        try:
            return config(**self.values[config])
        except ConfigError as error:
            name, text = re.match(r"(\w*)(.*)", str(error), re.DOTALL).groups()  # type: ignore[union-attr]
            if name not in config.__dataclass_fields__:  # type: ignore[attr-defined]
                raise
            raise UsageError(f"{self.said.get(name) or flag_of(name)}{text}") from error


class Command(argparse.ArgumentParser):
    """One command's parser: the flags of `configs`, and what the caller adds.

    With `model_word` the model may be given as a bare word. With `greedy` a list flag takes several words at once,
    which suits commands without other bare words. Fields in `without` have no flag here and keep their defaults.
    """

    def __init__(
        self,
        name: str,
        description: str,
        configs: Sequence[type] = (),
        *,
        model_word: bool = False,
        greedy: bool = False,
        words: str = "",
        epilog: str = "",
        without: Collection[str] = (),
    ) -> None:
        super().__init__(
            prog=f"gapless {name}",
            usage=" ".join(part for part in ("gapless", name, "[MODEL]" if model_word else words, "[flags]") if part),
            description=description,
            epilog=epilog or None,
            allow_abbrev=False,
            add_help=False,
            formatter_class=HelpText,
        )
        self.add_argument("-h", "--help", action="help", help="show this text; --help=WORD shows what mentions WORD")
        if model_word:
            self.add_argument("MODEL", nargs="?", help="the same as --model MODEL")
        self.configs = tuple(configs)
        self._greedy = greedy
        self.specs = {spec.field: spec for config in configs for spec in specs(config) if spec.field not in without}
        if self.specs:
            self.add_argument("--config", metavar="FILE", help="YAML, TOML or JSON file of flags; all others beat it")
            text = (
                f"{PREFIX}<FLAG> in the environment sets any flag of the groups above; the command line beats it.\n"
                "Flags of vLLM, SGLang and llama.cpp are taken if we have what they ask for: see --help=FLAG."
            )
            self.epilog = f"{epilog}\n\n{text}" if epilog else text
            self._add_specs()

    def _add_specs(self) -> None:
        groups: dict[str, argparse._ArgumentGroup] = {}
        for spec in self.specs.values():
            if spec.group not in groups:
                groups[spec.group] = self.add_argument_group(spec.group)
            _add_spec(groups[spec.group], spec, self._greedy)

    def add_api_key(self, of: str = "of the server") -> None:
        """Add `--api-key KEY`, which `Settings.api_key` reads."""
        self.add_argument("--api-key", metavar="KEY", help=f"key {of}; also ${' and $'.join(KEY_VARIABLES)}")

    def add_insecure(self) -> None:
        self.add_argument("--insecure", action="store_true", help="do not check the server's certificate")

    def add_server(self) -> None:
        """Add the address of a server, as a bare word or with --url; `Settings.options.URL` holds it."""
        self.add_argument("URL", nargs="?", help=f"the server (default: {DEFAULT_URL})")
        self.add_argument("--url", "--base-url", dest="base_url", metavar="URL", help="the same")

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")

    def read(self, argv: Sequence[str], env: Mapping[str, str] = os.environ) -> Settings:
        """Parse `argv` over `env` over --config. Prints and exits for --help.

        Raises UsageError naming the flag, variable or file, and the nearest known spelling.
        """
        at = argv.index("--") if "--" in argv else len(argv)
        words = [self.dashed(word) for word in argv[:at]]
        self._answer_help_about(words)
        done = rewrite(words, self._option_string_actions, self.specs)
        self._refuse_glued(done.words)
        options, extra = self.parse_known_args([*done.words, *argv[at:]])
        if extra:
            raise UsageError(self._unknown(extra[0]))
        self._place_server(options)
        typed = self._typed(options)
        set_by = {name: spec.env for name, spec in self.specs.items() if env.get(spec.env)}
        from_env = {name: convert(self.specs[name], env[variable], variable) for name, variable in set_by.items()}
        from_file, notes = self._from_file(getattr(options, "config", None))
        fields = from_file | from_env | typed
        notes += [*done.notes, *_in_place(done, fields), *(mistyped(env, self.specs.values()) if self.specs else ())]
        values: dict[type, dict[str, Any]] = {config: {} for config in self.configs}
        for name, value in fields.items():
            values[self.specs[name].owner][name] = value
        return Settings(options, values, frozenset(typed), notes, set_by | done.said)

    def spellings(self) -> list[str]:
        """Every spelling that this command takes, --no- forms included."""
        return list(self._option_string_actions)

    def _place_server(self, options: argparse.Namespace) -> None:
        """Take a bare word that is the address of a server for --url."""
        field = "url" if hasattr(options, "url") else "base_url"
        slot = "URL" if hasattr(options, "URL") else "MODEL"
        word, typed = getattr(options, slot, None), getattr(options, field, None)
        is_address = slot == "URL" or (word or "").startswith(("http://", "https://"))
        if not is_address or not (hasattr(options, field) or field in self.specs):
            return
        if word and typed not in (None, word):
            raise UsageError(f"two servers are named: {word} and {typed}")
        if word:
            setattr(options, field, word)
        setattr(options, slot, None if slot == "MODEL" else word or typed or DEFAULT_URL)

    def _typed(self, options: argparse.Namespace) -> dict[str, Any]:
        given = {name: value for name, value in vars(options).items() if name in self.specs}
        typed = {name: tuple(value) if self.specs[name].many else value for name, value in given.items()}
        word = getattr(options, "MODEL", None)
        if word is not None and typed.setdefault("model", word) != word:
            raise UsageError(f"two models are named: {hide_password(word)} and --model {typed['model']}")
        return typed

    def dashed(self, word: str) -> str:
        """`--max_num_seqs` as `--max-num-seqs`."""
        name, equals, value = word.partition("=")
        name, dot, part = name.partition(".")
        dashed = name.replace("_", "-")
        known = name.startswith("--") and (dashed in self._option_string_actions or rows_of(dashed))
        return f"{dashed}{dot}{part}{equals}{value}" if known else word

    def _refuse_glued(self, words: Sequence[str]) -> None:
        """Refuse -hx, which argparse takes for -h with a value."""
        for word in words:
            short = self._option_string_actions.get(word[:2])
            if short is not None and short.nargs == 0 and len(word) > 2 and word not in self._option_string_actions:
                raise UsageError(self._unknown(word))

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"unexpected argument {hide_password(word)!r}; see {self.prog} --help"
        name = word.partition("=")[0]
        dashed = name.replace("_", "-") if name.startswith("--") else name
        others = (other for other in foreign_names() if other != dashed)  # which another command may take
        near = did_you_mean(dashed, self.spellings()) or did_you_mean(dashed, others)
        return f"unknown flag {name}" + (near or f"; see {self.prog} --help")

    def _from_file(self, path: str | None) -> tuple[dict[str, Any], list[str]]:
        """The fields that the file sets, and warnings about keys of other engines."""
        if path is None:
            return {}, []
        known = {s.lstrip("-").replace("-", "_"): spec for spec in self.specs.values() for s in spec.spellings}
        fields: dict[str, Any] = {}
        others: list[str] = []
        for key, value in _read_config_file(path).items():
            spec = known.get(key.replace("-", "_"))
            if spec is None and (rows := rows_of(flag := self.dashed(f"--{key}"))):
                if isinstance(value, list) and any(row.at == "+" for row in rows):
                    others += [flag, *map(str, value)]
                elif value is not None:
                    others.append(f"{flag}={value if isinstance(value, str) else json.dumps(value)}")
                continue
            if spec is None:
                near = nearest(key.replace("-", "_"), known)
                raise UsageError(f"{path}: unknown key {key!r}" + (f"; did you mean {near!r}?" if near else ""))
            if spec.field in fields:
                raise UsageError(f"{path}: {key!r} says {spec.field} a second time")
            given = json.dumps(value) if isinstance(value, dict) and spec.field.endswith(JSON_FIELDS) else value
            fields[spec.field] = convert(spec, given, f"{path}: {key}")
        done = rewrite(others, {}, self.specs)
        return self._typed(self.parse_known_args(done.words)[0]) | fields, [*done.notes, *_in_place(done, fields)]

    def _answer_help_about(self, words: Sequence[str]) -> None:
        about = next((word.partition("=")[2] for word in words if word.startswith("--help=")), None)
        if about is None:
            return
        print(self.format_help() if about == "all" else self._help_about(about))
        sys.exit(0)

    def _help_about(self, word: str) -> str:
        """The flags whose group, spelling or help text mentions `word`."""
        formatter = self._get_formatter()
        for group in self._action_groups:
            whole = word.lower() == (group.title or "").lower()
            shown = [a for a in group._group_actions if whole or _mentions(a, word.lower())]
            if shown:
                formatter.start_section(group.title)
                formatter.add_arguments(shown)
                formatter.end_section()
        others = [row for row in TABLE if any(word.lower() in text for text in (*row.names, row.text))]
        if others:
            formatter.start_section("Flags of other engines")
            formatter.add_text("\n".join(map(str, others)))
            formatter.end_section()
        text = formatter.format_help()
        if not text:
            raise UsageError(f"no flag of {self.prog} mentions {word!r}; see {self.prog} --help")
        return text.rstrip("\n")


def _read_config_file(path: str) -> dict[str, Any]:
    """The table of flags in `path`. Raises UsageError, naming the file and the line where there is one."""
    suffix = Path(path).suffix.lower()
    if suffix not in (".json", ".toml", ".yaml", ".yml"):
        raise UsageError(f"{path}: a config file must end in .yaml, .yml, .toml or .json")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot read the config file: {error}") from error
    try:
        table = {".json": json.loads, ".toml": tomllib.loads}.get(suffix, _read_yaml)(text)
    except (ValueError, RecursionError) as error:  # the libraries' own errors derive from it, and carry the line
        raise UsageError(f"{path}: {error}") from error
    if not isinstance(table, dict):
        raise UsageError(f"{path}: expected one table of flags, got {type(table).__name__}")
    return {str(key): value for key, value in table.items()}


def _read_yaml(text: str) -> Any:
    try:
        import yaml  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise ValueError("YAML needs PyYAML, which is not installed; write the same keys as TOML or JSON") from None
    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


def number(low: float, high: float, kind: type[int] | type[float]) -> Callable[[str], float]:
    """The `type` of an argument from low to high; an error names both ends."""

    def read(text: str) -> float:
        what = "a whole number" if kind is int else "a number"
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be {what} from {low} to {high}, got {text!r}")
        return value

    return read


def _in_place(done: Rewritten, fields: Mapping[str, Any]) -> list[str]:
    """Notes on flags of other engines that need one of ours. Raises UsageError where that is not given."""
    for name, row in done.needs:
        if not fields.get(row.field):
            raise UsageError(f"{name} is not accepted alone: {row.text}")
    return [f"{name} changes nothing beside {flag_of(row.field)}" for name, row in done.needs]


def flag_of(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def _mentions(action: argparse.Action, word: str) -> bool:
    return any(word in text.lower() for text in (*action.option_strings, action.help or ""))


def _add_spec(group: argparse._ArgumentGroup, spec: Spec, greedy: bool) -> None:
    help = spec.help.replace("%", "%%") + _default_text(spec)
    switch = spec.kind is bool and not spec.many
    if also := [f"--[no-]{name[2:]}" if switch else name for name in spec.spellings[1:] if len(name) > 2]:
        help += f"; also {', '.join(also)}"
    if switch:
        long = [s for s in spec.spellings if s.startswith("--")]
        group.add_argument(
            *long, dest=spec.field, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=help
        )
        return
    metavar = "{" + ",".join(spec.choices) + "}" if spec.choices else spec.field.upper().split("_")[-1]
    group.add_argument(
        *spec.spellings,
        dest=spec.field,
        type=_reader(spec),
        nargs="+" if spec.many and greedy else None,
        action=("extend" if greedy else "append") if spec.many else "store",
        default=argparse.SUPPRESS,
        metavar=metavar,
        help=help,
    )


class HelpText(argparse.RawDescriptionHelpFormatter):
    """`--model, -m MODEL` and `--[no-]x`; further spellings stand at the end of the text."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=min(shutil.get_terminal_size().columns, 120))

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)  # flags stay whole

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        first = next((name for name in action.option_strings if name.startswith("--")), action.option_strings[0])
        shown = [name for name in action.option_strings if name == first or len(name) == 2]
        if isinstance(action, argparse.BooleanOptionalAction):
            return f"--[no-]{first[2:]}"
        value = "" if action.nargs == 0 else " " + self._format_args(action, action.dest.upper())
        return ", ".join(shown) + value


def _default_text(spec: Spec) -> str:
    # The help text itself explains a default of None.
    if spec.default in (None, "", ()):
        return ""
    shown = ("on" if spec.default else "off") if spec.kind is bool else str(spec.default)
    return f" (default: {shown})".replace("%", "%%")


def _reader(spec: Spec) -> Any:
    one = spec._replace(many=False)

    def read(text: str) -> Any:
        try:
            return convert(one, text, "")
        except UsageError as error:
            # argparse puts the flag's name in front.
            raise argparse.ArgumentTypeError(str(error).removeprefix(": ")) from error

    return cast(Any, read)
