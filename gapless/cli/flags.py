"""Command lines made of config records: the command line beats the environment, which beats the config file."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

from gapless.base.addresses import hide_password
from gapless.cli.errors import UsageError, nearest
from gapless.cli.output import say
from gapless.cli.spec import ENV_PREFIX, Spec, convert, specs
from gapless.cli.spellings import MEANS, NO_OPS, NOT_YET, REFUSED

T = TypeVar("T")
KEY_VARIABLES = ("GAPLESS_API_KEY", "OPENAI_API_KEY")


class Settings(NamedTuple):
    """What a command line asked for: `options` are the command's own, `values` belong to config records."""

    options: argparse.Namespace
    values: dict[type, dict[str, Any]]
    typed: frozenset[str]
    """Config fields that stood on the command line itself."""
    notes: list[str]
    """What the user should hear about flags that changed nothing."""

    @property
    def api_key(self) -> str:
        """What was typed, else the first variable that is set, else nothing."""
        return self.options.api_key or next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), "")

    def refuse(self, config: type, except_for: Collection[str], why: str) -> None:
        """Raise UsageError for a typed flag of `config` that is not one of `except_for`."""
        wrong = sorted((self.typed & self.values[config].keys()) - set(except_for))
        if wrong:
            raise UsageError(f"--{wrong[0].replace('_', '-')} {why}")

    def show_notes(self) -> None:
        for note in self.notes:
            say(f"gapless: {note}")

    def given(self, config: type) -> dict[str, Any]:
        """The fields of `config` that were set anywhere, as keyword arguments."""
        return dict(self.values[config])

    def build(self, config: type[T]) -> T:
        """The record itself. Raises ConfigError when the values do not fit."""
        return config(**self.values[config])


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
            self.add_argument("--config", metavar="FILE", help="JSON or TOML file of flags (weaker than all others)")
            text = (
                f"{ENV_PREFIX}<FLAG> in the environment sets any flag of the groups above; the command line beats it."
            )
            self.epilog = f"{epilog}\n\n{text}" if epilog else text
            self._add_specs()

    def _add_specs(self) -> None:
        groups: dict[str, argparse._ArgumentGroup] = {}
        for spec in self.specs.values():
            if spec.group not in groups:
                groups[spec.group] = self.add_argument_group(spec.group)
            _add_spec(groups[spec.group], spec, self._greedy)
        if "depth" not in self.specs:
            return
        other = self.add_argument_group("Other spellings")
        for spelling, (field, value) in MEANS.items():
            if field in self.specs:
                flag = self.specs[field].flag
                alone: dict[object, str] = {True: flag, False: f"--no-{flag[2:]}"}
                same = f"the same as {alone.get(value, f'{flag} {value}')}"
                other.add_argument(
                    spelling, dest=field, action="store_const", const=value, default=argparse.SUPPRESS, help=same
                )
        for spelling, note in NO_OPS.items():
            other.add_argument(spelling, action="append_const", const=spelling, dest="no_ops", help=f"nothing: {note}")

    def add_api_key(self, of: str = "of the server") -> None:
        """Add `--api-key KEY`, which `Settings.api_key` reads."""
        self.add_argument("--api-key", metavar="KEY", help=f"key {of}; also ${' and $'.join(KEY_VARIABLES)}")

    def add_insecure(self) -> None:
        self.add_argument("--insecure", action="store_true", help="do not check the server's certificate")

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")

    def read(self, argv: Sequence[str], env: Mapping[str, str] = os.environ) -> Settings:
        """Parse `argv` over `env` over --config. Prints and exits for --help.

        Raises UsageError naming the flag, variable or file, and the nearest known spelling.
        """
        at = argv.index("--") if "--" in argv else len(argv)
        words = [self.dashed(word) for word in argv[:at]]
        self._answer_help_about(words)
        self._refuse(words)
        options, extra = self.parse_known_args([*words, *argv[at:]])
        if extra:
            raise UsageError(self._unknown(extra[0]))
        typed = self._typed(options)
        from_env = {
            name: convert(spec, env[spec.env], spec.env) for name, spec in self.specs.items() if env.get(spec.env)
        }
        fields = self._from_file(getattr(options, "config", None)) | from_env | typed
        notes = [f"{flag} changes nothing: {NO_OPS[flag]}" for flag in getattr(options, "no_ops", None) or ()]
        values: dict[type, dict[str, Any]] = {config: {} for config in self.configs}
        for name, value in fields.items():
            values[self.specs[name].owner][name] = value
        return Settings(options, values, frozenset(typed), notes)

    def spellings(self) -> list[str]:
        """Every spelling that this command takes, --no- forms included."""
        return list(self._option_string_actions)

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
        dashed = name.replace("_", "-")
        known = dashed in self._option_string_actions or dashed in NOT_YET | REFUSED.keys()
        return dashed + equals + value if name.startswith("--") and known else word

    def _refuse(self, words: Sequence[str]) -> None:
        names = (word.partition("=")[0] for word in words)
        for name in (name for name in names if name not in self._option_string_actions):
            if name in REFUSED:
                raise UsageError(f"{name} is not accepted: {REFUSED[name]}")
            if name in NOT_YET:
                raise UsageError(f"{name} is not available in gapless yet")

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"unexpected argument {hide_password(word)!r}; see {self.prog} --help"
        name = word.partition("=")[0]
        near = nearest(name.replace("_", "-") if name.startswith("--") else name, self.spellings())
        return f"unknown flag {name}" + (f"; did you mean {near}?" if near else f"; see {self.prog} --help")

    def _from_file(self, path: str | None) -> dict[str, Any]:
        if path is None:
            return {}
        known = {s.lstrip("-").replace("-", "_"): spec for spec in self.specs.values() for s in spec.spellings}
        fields: dict[str, Any] = {}
        for key, value in _read_config_file(path).items():
            spec = known.get(key.replace("-", "_"))
            if spec is None:
                near = nearest(key.replace("-", "_"), known)
                raise UsageError(f"{path}: unknown key {key!r}" + (f"; did you mean {near!r}?" if near else ""))
            if spec.field in fields:
                raise UsageError(f"{path}: {key!r} says {spec.field} a second time")
            fields[spec.field] = convert(spec, value, f"{path}: {key}")
        return fields

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
        text = formatter.format_help()
        if not text:
            raise UsageError(f"no flag of {self.prog} mentions {word!r}; see {self.prog} --help")
        return text.rstrip("\n")


def _read_config_file(path: str) -> dict[str, Any]:
    """The table of flags in `path`. Raises UsageError, naming the file and the line where there is one."""
    suffix = Path(path).suffix.lower()
    if suffix not in (".json", ".toml"):
        more = " YAML is not read: write the same keys as JSON or TOML." if suffix in (".yaml", ".yml") else ""
        raise UsageError(f"{path}: a config file must end in .json or .toml.{more}")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot read the config file: {error}") from error
    try:
        table = json.loads(text) if suffix == ".json" else tomllib.loads(text)
    except ValueError as error:  # both libraries' own errors derive from it, and carry the line
        raise UsageError(f"{path}: {error}") from error
    if not isinstance(table, dict):
        raise UsageError(f"{path}: expected one table of flags, got {type(table).__name__}")
    return table


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


def _mentions(action: argparse.Action, word: str) -> bool:
    return any(word in text.lower() for text in (*action.option_strings, action.help or ""))


def _add_spec(group: argparse._ArgumentGroup, spec: Spec, greedy: bool) -> None:
    help = spec.help.replace("%", "%%") + _default_text(spec)
    if spec.kind is bool and not spec.many:
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
    """`--model, -m MODEL` and `--[no-]x` instead of every spelling with every value."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=min(shutil.get_terminal_size().columns, 120))

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        if isinstance(action, argparse.BooleanOptionalAction):
            return ", ".join(f"--[no-]{s[2:]}" for s in action.option_strings if not s.startswith("--no-"))
        value = "" if action.nargs == 0 else " " + self._format_args(action, action.dest.upper())
        return ", ".join(action.option_strings) + value


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
