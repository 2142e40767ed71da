"""Command lines made of config records: the command line beats the environment, which beats the config file."""

from __future__ import annotations

import argparse
import difflib
import math
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, cast

from gapless.cli.config_file import read_config_file
from gapless.cli.errors import UsageError
from gapless.cli.spec import ENV_PREFIX, Spec, convert, specs
from gapless.cli.spellings import MEANS, NO_OPS, NOT_YET, REFUSED

T = TypeVar("T")


class Settings:
    """What a command line asked for: `options` are the command's own, the rest belongs to config records."""

    def __init__(
        self, options: argparse.Namespace, values: dict[type, dict[str, Any]], typed: frozenset[str], notes: list[str]
    ) -> None:
        self.options = options
        self.typed = typed
        """Config fields that stood on the command line itself."""
        self.notes = notes
        """What the user should hear about flags that changed nothing."""
        self._values = values

    def given(self, config: type) -> dict[str, Any]:
        """The fields of `config` that were set anywhere, as keyword arguments."""
        return dict(self._values[config])

    def build(self, config: type[T]) -> T:
        """The record itself. Raises ConfigError when the values do not fit."""
        return config(**self._values[config])


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
                what = alone.get(value, f"{flag} {value}")
                _add_constant(other, spelling, field, value, f"the same as {what}")
        for spelling, note in NO_OPS.items():
            other.add_argument(spelling, action="append_const", const=spelling, dest="no_ops", help=f"nothing: {note}")

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")

    def read(self, argv: Sequence[str], env: Mapping[str, str]) -> Settings:
        """Parse `argv` over `env` over --config. Prints and exits for --help.

        Raises:
            UsageError: names the flag, variable or file, and the nearest known spelling.
        """
        words = self._normalised(argv)
        self._answer_help_about(words)
        self._refuse(words)
        options, extra = self.parse_known_args(words)
        if extra:
            raise UsageError(self._unknown(extra[0]))
        typed = self._typed(options)
        fields = self._from_file(getattr(options, "config", None)) | self._from_env(env) | typed
        notes = [f"{flag} changes nothing: {NO_OPS[flag]}" for flag in getattr(options, "no_ops", None) or ()]
        return Settings(options, self._by_config(fields), frozenset(typed), notes)

    def spellings(self) -> list[str]:
        """Every spelling that this command takes, --no- forms included."""
        return list(self._option_string_actions)

    def _typed(self, options: argparse.Namespace) -> dict[str, Any]:
        typed = {name: value for name, value in vars(options).items() if name in self.specs}
        word = getattr(options, "MODEL", None)
        if word is not None and typed.setdefault("model", word) != word:
            raise UsageError(f"two models are named: {word} and --model {typed['model']}")
        return typed

    def _by_config(self, fields: dict[str, Any]) -> dict[type, dict[str, Any]]:
        return {
            config: {name: value for name, value in fields.items() if self.specs[name].owner is config}
            for config in self.configs
        }

    def _normalised(self, argv: Sequence[str]) -> list[str]:
        """`--max_num_seqs` as `--max-num-seqs`; what comes after `--` stays as it is."""
        words = list(argv)
        for i, word in enumerate(words):
            if word == "--":
                break
            name, equals, value = word.partition("=")
            dashed = name.replace("_", "-")
            if name.startswith("--") and (dashed in self._option_string_actions or dashed in NOT_YET | REFUSED.keys()):
                words[i] = dashed + equals + value
        return words

    def _refuse(self, words: Sequence[str]) -> None:
        for word in self._flags_of(words):
            if word in REFUSED and word not in self._option_string_actions:
                raise UsageError(f"{word} is not accepted: {REFUSED[word]}")
            if word in NOT_YET and word not in self._option_string_actions:
                raise UsageError(f"{word} is not available in gapless yet")

    @staticmethod
    def _flags_of(words: Sequence[str]) -> Iterable[str]:
        before = words[: words.index("--")] if "--" in words else words
        return (word.partition("=")[0] for word in before if word.startswith("-"))

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"unexpected argument {word!r}; see {self.prog} --help"
        name = word.partition("=")[0]
        near = nearest(name.replace("_", "-") if name.startswith("--") else name, self.spellings())
        return f"unknown flag {name}" + (f"; did you mean {near}?" if near else f"; see {self.prog} --help")

    def _from_env(self, env: Mapping[str, str]) -> dict[str, Any]:
        return {name: convert(spec, env[spec.env], spec.env) for name, spec in self.specs.items() if env.get(spec.env)}

    def _from_file(self, path: str | None) -> dict[str, Any]:
        if path is None:
            return {}
        known = {s.lstrip("-").replace("-", "_"): spec for spec in self.specs.values() for s in spec.spellings}
        fields: dict[str, Any] = {}
        for key, value in read_config_file(path).items():
            spec = known.get(key.replace("-", "_"))
            if spec is None:
                near = nearest(key.replace("-", "_"), known)
                raise UsageError(f"{path}: unknown key {key!r}" + (f"; did you mean {near!r}?" if near else ""))
            if spec.field in fields:
                raise UsageError(f"{path}: {key!r} says {spec.field} a second time")
            fields[spec.field] = convert(spec, value, f"{path}: {key}")
        return fields

    def _answer_help_about(self, words: Sequence[str]) -> None:
        about = next((word.partition("=")[2] for word in self._before_rest(words) if word.startswith("--help=")), None)
        if about is None:
            return
        print(self.format_help() if about == "all" else self._help_about(about))
        sys.exit(0)

    @staticmethod
    def _before_rest(words: Sequence[str]) -> Sequence[str]:
        return words[: words.index("--")] if "--" in words else words

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


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word most like `word`, if any is like it at all; leading dashes make nothing alike."""
    bare = {name.lstrip("-"): name for name in known}
    found = difflib.get_close_matches(word.lstrip("-"), bare, n=1, cutoff=0.6)
    return bare[found[0]] if found else None


def _mentions(action: argparse.Action, word: str) -> bool:
    return any(word in text.lower() for text in (*action.option_strings, action.help or ""))


def _add_constant(group: argparse._ArgumentGroup, spelling: str, field: str, value: object, help: str) -> None:
    group.add_argument(spelling, dest=field, action="store_const", const=value, default=argparse.SUPPRESS, help=help)


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
        action=_Collect if spec.many else "store",
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


class _Collect(argparse.Action):
    """`--name a b --name c` is (a, b, c)."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        more = values if isinstance(values, list) else [values]
        setattr(namespace, self.dest, (*getattr(namespace, self.dest, ()), *more))


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
