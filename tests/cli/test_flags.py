"""Flags are made of the config records: every spelling, every source, every mistake."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from gapless.base.config import EngineConfig, flag
from gapless.base.errors import ConfigError
from gapless.cli.errors import UsageError
from gapless.cli.flags import Command, Settings
from gapless.cli.spec import Spec, read_size, specs
from gapless.cli.spellings import MEANS, NO_OPS, NOT_YET, REFUSED


@dataclasses.dataclass(frozen=True)
class Door:
    """A stand-in with the kinds of fields that the server's record has."""

    host: str = flag("127.0.0.1", "where, at 100%", group="Door")
    port: int = flag(8000, "port", group="Door", aliases=("-p",))
    api_key: tuple[str, ...] = flag((), "keys", group="Door")
    quiet: bool = flag(False, "say less", group="Door", aliases=("--silent", "-s"))
    timeout: float | None = flag(None, "seconds", group="Door")


def command(**options: Any) -> Command:
    return Command("serve", "test", (EngineConfig, Door), model_word=True, **options)


def read(*argv: str, env: dict[str, str] | None = None, **options: Any) -> Settings:
    return command(**options).read(argv, env or {})


def engine(*argv: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    return read(*argv, env=env).given(EngineConfig)


def sample(spec: Spec) -> tuple[str, Any]:
    """A text that the flag takes, other than its default where that can be, and what it means."""
    if spec.choices:
        return spec.choices[-1], spec.choices[-1]
    if spec.field == "depth":
        return "3", "3"
    if spec.field == "kv_tiers":
        return "host:1GiB", ("host:1GiB",)
    if spec.field in ("kv_peers", "kv_peer_listen"):
        return "unix:/kv", ("unix:/kv",) if spec.many else "unix:/kv"
    if spec.many:
        return "name=module:word", ("name=module:word",)
    if spec.field == "speculative_config":
        return '{"method": "ngram"}', '{"method": "ngram"}'
    if spec.field == "max_itl":
        return "7.5", 7.5
    return {int: ("7", 7), float: ("0.5", 0.5), str: ("word", "word")}[spec.kind]


VALUED = [(s.field, word) for s in specs(EngineConfig) if s.kind is not bool for word in s.spellings]
SWITCHES = [(s.field, word) for s in specs(EngineConfig) if s.kind is bool for word in s.spellings]


def spec_of(field: str) -> Spec:
    return next(s for s in specs(EngineConfig) if s.field == field)


@pytest.mark.parametrize("field, spelling", VALUED, ids=lambda x: x)
def test_every_spelling_of_every_engine_flag_is_read(field: str, spelling: str) -> None:
    text, value = sample(spec_of(field))
    assert engine(spelling, text) == {field: value}
    if spelling.startswith("--"):
        assert engine(f"{spelling}={text}") == {field: value}
        assert engine(spelling.replace("-", "_").replace("__", "--", 1), text) == {field: value}
    assert getattr(read(spelling, text).build(EngineConfig), field) == value


@pytest.mark.parametrize("field, spelling", SWITCHES, ids=lambda x: x)
def test_every_spelling_of_every_switch_is_read(field: str, spelling: str) -> None:
    assert engine(spelling) == {field: True}
    assert engine("--no-" + spelling[2:]) == {field: False}
    assert engine("--no_" + spelling[2:].replace("-", "_")) == {field: False}


def test_nothing_given_is_the_record_s_own_defaults() -> None:
    settings = read()
    assert settings.build(EngineConfig) == EngineConfig()
    assert settings.build(Door) == Door()
    assert settings.given(EngineConfig) == settings.given(Door) == {}


def test_a_record_makes_the_round_trip() -> None:
    wanted = EngineConfig(model="m", depth="4", max_num_seqs=9, enable_prefix_caching=False, gpu_memory_utilization=0.5)
    argv: list[str] = []
    for field in dataclasses.fields(wanted):
        value, name = getattr(wanted, field.name), field.name.replace("_", "-")
        if isinstance(value, bool):
            argv.append(f"--{name}" if value else f"--no-{name}")
        elif value not in (None, ()):
            argv += [f"--{name}", str(value)]
    assert read(*argv).build(EngineConfig) == wanted


def test_values_of_a_repeated_flag_are_collected() -> None:
    assert read("--api-key", "a", "--api-key", "b").given(Door) == {"api_key": ("a", "b")}
    greedy = read("m", "--api-key", "a", "b", "--port", "1", "--api-key", "c", greedy=True)
    assert greedy.given(Door) == {"api_key": ("a", "b", "c"), "port": 1}
    assert read(env={"GAPLESS_API_KEY": "a, b"}).given(Door) == {"api_key": ("a", "b")}


@pytest.mark.parametrize(
    "text, value",
    [("17", 17), ("32k", 32_000), ("32K", 32_768), ("1M", 1_048_576), ("1m", 10**6), ("1.5k", 1_500), ("2G", 2**31)],
)
def test_a_size_with_a_unit_is_read(text: str, value: int) -> None:
    assert read_size(text) == value
    assert engine("--max-model-len", text) == {"max_model_len": value}


@pytest.mark.parametrize("text", ["", "k", "1.0001k", "1.5", "0x10", "1kk", "1 000", "1_0k", "nan", "1e3"])
def test_a_wrong_size_is_refused(text: str) -> None:
    assert read_size(text) is None
    with pytest.raises(UsageError, match=r"--max-model-len.*expected a whole number"):
        engine(f"--max-model-len={text}")


@pytest.mark.parametrize("text", ["auto", "-1", "none"])
def test_an_optional_size_may_be_left_to_the_engine(text: str) -> None:
    assert engine("--max-model-len", text) == {"max_model_len": None}


@pytest.mark.parametrize("spelling", MEANS)
def test_a_spelling_with_a_fixed_meaning_sets_it(spelling: str) -> None:
    field, value = MEANS[spelling]
    assert engine(spelling) == {field: value}
    assert getattr(read(spelling).build(EngineConfig), field) == value


@pytest.mark.parametrize("spelling", NO_OPS)
def test_no_ops_are_taken_with_a_note(spelling: str) -> None:
    settings = read(spelling)
    assert settings.given(EngineConfig) == {}
    assert len(settings.notes) == 1 and spelling in settings.notes[0]


@pytest.mark.parametrize("spelling", REFUSED)
def test_a_flag_that_is_not_accepted_says_why(spelling: str) -> None:
    with pytest.raises(UsageError, match=f"{spelling} is not accepted: ") as caught:
        read(spelling.replace("-", "_").replace("__", "--", 1))
    assert REFUSED[spelling] in str(caught.value)


OURS = {spelling for spec in specs(EngineConfig) for spelling in spec.spellings}


@pytest.mark.parametrize("spelling", sorted(NOT_YET - OURS))
def test_flags_of_other_engines_are_named_as_missing(spelling: str) -> None:
    with pytest.raises(UsageError, match=f"{spelling} is not available in gapless yet"):
        read("model", spelling, "2")


@pytest.mark.parametrize(
    "typed, meant",
    [("--max-num-seq", "--max-num-seqs"), ("--max_modl_len", "--max-model-len"), ("--page-sise", "--page-size")],
)
def test_an_unknown_flag_names_the_nearest_one(typed: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"^unknown flag {typed}; did you mean {meant}\\?$"):
        read(typed, "3")


def test_an_unknown_flag_unlike_any_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown flag --zzzzqqq; see gapless serve --help"):
        read("--zzzzqqq")
    with pytest.raises(UsageError, match="unknown flag --bogus; see gapless serve --help"):
        read("--bogus")  # two dashes alone do not make it like --uds
    with pytest.raises(UsageError, match="unexpected argument 'redis://cache:6379'"):
        read("a", "redis://me:secret@cache:6379")
    with pytest.raises(UsageError, match="unexpected argument 'b'"):
        read("a", "b")
    with pytest.raises(UsageError, match="two models are named: redis://cache:6379 and --model a"):
        read("redis://me:secret@cache:6379", "--model", "a")


def test_flags_are_not_abbreviated() -> None:
    with pytest.raises(UsageError, match="unknown flag --max-model"):
        read("--max-model", "3")


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--dtype", "int3"], "--dtype.*must be one of auto, bfloat16, float16, float32, got 'int3'"),
        (["--port", "x"], "--port.*expected a whole number"),
        (["--gpu-memory-utilization", "much"], "--gpu-memory-utilization.*expected a number, got 'much'"),
        (["--max-num-seqs"], "--max-num-seqs.*expected one argument"),
    ],
)
def test_wrong_values_name_the_flag(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read(*argv)


def test_the_record_has_the_last_word() -> None:
    with pytest.raises(ConfigError, match="depth must be auto or a whole number from 1 to 8, got '9'"):
        read("--depth", "9").build(EngineConfig)


def test_a_word_without_a_flag_is_the_model() -> None:
    assert engine("some/dir", "--depth", "2") == {"model": "some/dir", "depth": "2"}
    assert engine("--depth", "2", "some/dir") == {"model": "some/dir", "depth": "2"}
    assert engine("same", "-m", "same") == {"model": "same"}
    with pytest.raises(UsageError, match="two models are named: a and --model b"):
        read("a", "--model", "b")
    assert read("a").typed == {"model"}


@pytest.mark.parametrize("field", [s.field for s in specs(EngineConfig)])
def test_every_flag_has_a_variable(field: str) -> None:
    spec = spec_of(field)
    text, value = ("off", False) if spec.kind is bool else sample(spec)
    settings = read(env={f"GAPLESS_{field.upper()}": text})
    assert settings.given(EngineConfig) == {field: value}
    assert settings.typed == set()


def test_wrong_variables_are_named() -> None:
    with pytest.raises(UsageError, match=r"^GAPLESS_BLOCK_SIZE: expected a whole number.*, got 'big'$"):
        read(env={"GAPLESS_BLOCK_SIZE": "big"})
    with pytest.raises(UsageError, match="GAPLESS_QUIET: expected true or false, got 'maybe'"):
        read(env={"GAPLESS_QUIET": "maybe"})
    assert engine(env={"GAPLESS_BLOCK_SIZE": "", "GAPLESS_UNRELATED": "x"}) == {}


def config_file(tmp_path: Path, name: str, text: str) -> str:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_command_line_beats_environment_beats_file(tmp_path: Path) -> None:
    path = config_file(tmp_path, "c.json", json.dumps({"depth": 2, "page-size": 8, "seed": 1}))
    env = {"GAPLESS_DEPTH": "3", "GAPLESS_SEED": "2"}
    assert engine("--config", path) == {"depth": "2", "block_size": 8, "seed": 1}
    assert engine("--config", path, env=env) == {"depth": "3", "block_size": 8, "seed": 2}
    assert engine("--config", path, "--depth", "4", env=env) == {"depth": "4", "block_size": 8, "seed": 2}
    assert engine("--no-async-scheduling", env=env)["depth"] == "1"


def test_a_toml_file_gives_flags_their_values(tmp_path: Path) -> None:
    text = 'model = "x"\nmax_model_len = "4K"\napi_key = ["a", "b"]\nquiet = true\ntimeout = 2\ncache-prompt = false'
    settings = read("--config", config_file(tmp_path, "c.toml", text))
    assert settings.build(Door) == Door(api_key=("a", "b"), quiet=True, timeout=2.0)
    assert settings.given(EngineConfig) == {"model": "x", "max_model_len": 4096, "enable_prefix_caching": False}


def test_a_yaml_file_gives_flags_their_values(tmp_path: Path) -> None:
    text = (
        "model: x\nmax-model-len: 4K\napi_key: [a, b]\nquiet: true\ntimeout: 2\nno-such: 1\n"
        "speculative-config: {method: ngram, num_speculative_tokens: 3}\n"
    )
    path = config_file(tmp_path, "c.yaml", text)
    with pytest.raises(UsageError, match=r"c\.yaml: unknown key 'no-such'"):
        read("--config", path)
    path = config_file(tmp_path, "c.yml", text.replace("no-such: 1\n", ""))
    settings = read("--config", path, "--max-model-len", "64")
    assert settings.build(Door) == Door(api_key=("a", "b"), quiet=True, timeout=2.0)
    config = '{"method": "ngram", "num_speculative_tokens": 3}'
    assert settings.given(EngineConfig) == {"model": "x", "max_model_len": 64, "speculative_config": config}
    assert engine("--config", config_file(tmp_path, "empty.yaml", "# nothing\n")) == {}


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("c.ini", "a: 1", r"must end in .yaml, .yml, .toml or .json"),
        ("c.yaml", "a: [1", r"c.yaml: while parsing"),
        ("c.yaml", "- a", r"expected one table of flags, got list"),
        ("c.json", "{", "Expecting property name"),
        ("c.json", "[1]", "expected one table of flags, got list"),
        ("c.toml", "a = b", r"c.toml: .*line 1"),
        ("c.json", '{"dept": 2}', "unknown key 'dept'; did you mean 'depth'"),
        ("c.json", '{"block_size": true}', "block_size: expected a whole number"),
        ("c.json", '{"block_size": 1.5}', "block_size: expected a whole number"),
        ("c.json", '{"quiet": 1}', "quiet: expected true or false"),
        ("c.json", '{"model": ["a"]}', "model: expected text"),
        ("c.json", '{"api_key": 3}', "api_key: expected a list"),
        ("c.json", '{"depth": null}', "depth: expected text"),
        ("c.json", '{"block_size": 4, "page-size": 8}', "'page-size' says block_size a second time"),
        ("c.json", '{"dtype": "fp8"}', "dtype: must be one of auto, bfloat16"),
    ],
)
def test_wrong_config_files_name_file_and_key(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = config_file(tmp_path, name, text)
    with pytest.raises(UsageError, match=message) as caught:
        read("--config", path)
    assert str(caught.value).startswith(path)


def test_a_missing_config_file_is_named() -> None:
    with pytest.raises(UsageError, match=r"^/nowhere/c\.json: cannot read"):
        read("--config", "/nowhere/c.json")


def test_help_tells_every_flag_its_default_and_its_group() -> None:
    text = command().format_help()
    for spec in [*specs(EngineConfig), *specs(Door)]:
        shown = [s.replace("--", "--[no-]", 1) for s in spec.spellings] if spec.kind is bool else spec.spellings
        assert all(s in text for s in shown if not (spec.kind is bool and not s.startswith("--")))
        assert f"\n{spec.group}:\n" in text
    flat = " ".join(text.split())
    assert "tokens of one KV page (default: 16)" in flat
    assert "share KV pages of equal prefixes (default: on)" in flat
    assert "where, at 100% (default: 127.0.0.1)" in flat
    assert all(word in text for word in [*MEANS, *NO_OPS])


def test_help_about_one_thing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for about in ("model-len", "Door", "all"):
        with pytest.raises(SystemExit) as stop:
            read(f"--help={about}")
        assert stop.value.code == 0
    text = capsys.readouterr().out
    about_len, rest = text.split("Door:", 1)
    assert "--max-model-len" in about_len and "--port" not in about_len
    assert "--host" in rest
    with pytest.raises(UsageError, match="no flag of gapless serve mentions 'warp'"):
        read("--help=warp")


def test_after_two_dashes_words_stay_as_they_are() -> None:
    words = Command("run", "test", (EngineConfig,))
    words.add_argument("PROMPT", nargs="*")
    settings = words.read(["--depth", "2", "--", "--block_size", "--tp", "--help=x"], {})
    assert settings.options.PROMPT == ["--block_size", "--tp", "--help=x"]
    assert settings.given(EngineConfig) == {"depth": "2"}
