"""Flags are made of the config records: every spelling, every source, every mistake."""

from __future__ import annotations

import dataclasses
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gapless.base.config import EngineConfig, flag
from gapless.base.errors import ConfigError
from gapless.base.sizes import read_size
from gapless.base.spellings import TABLE, VALUES, Fate, Foreign
from gapless.base.variables import OTHERS, OWN_VARIABLES
from gapless.cli.bench_flags import BenchFlags
from gapless.cli.bench_serve import make_plan
from gapless.cli.errors import UsageError
from gapless.cli.flags import Command, Settings
from gapless.cli.sampling import SamplingFlags
from gapless.cli.spec import Spec, specs
from gapless.cli.variables import variables
from gapless.lab.ab_plan import AbFlags
from gapless.lab.eval_run import EvalFlags
from gapless.server.config import ServerConfig


@dataclasses.dataclass(frozen=True)
class Door:
    """A stand-in with the kinds of fields that the server's record has."""

    host: str = flag("127.0.0.1", "where, at 100%", group="Door")
    port: int = flag(8000, "port", group="Door", aliases=("-p",))
    api_key: tuple[str, ...] = flag((), "keys", group="Door")
    quiet: bool = flag(False, "say less", group="Door", aliases=("--silent", "-s"))
    timeout: float | None = flag(None, "seconds", group="Door")


@cache
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
    if spec.field in ("depth", "device"):
        return ("3", "3") if spec.field == "depth" else ("cpu", "cpu")
    if spec.field == "kv_tiers":
        return "host:1GiB", ("host:1GiB",)
    if spec.field in ("kv_peers", "kv_peer_listen"):
        return "unix:/kv", ("unix:/kv",) if spec.many else "unix:/kv"
    if spec.field == "device_ids":
        return "1", "1"
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
def test_every_spelling_of_every_engine_flag_is_read(field, spelling):
    text, value = sample(spec_of(field))
    assert engine(spelling, text) == {field: value}
    if spelling.startswith("--"):
        assert engine(f"{spelling}={text}") == {field: value}
        assert engine(spelling.replace("-", "_").replace("__", "--", 1), text) == {field: value}
    assert getattr(read(spelling, text).build(EngineConfig), field) == value


@pytest.mark.parametrize("field, spelling", SWITCHES, ids=lambda x: x)
def test_every_spelling_of_every_switch_is_read(field, spelling):
    assert engine(spelling) == {field: True}
    assert engine("--no-" + spelling[2:]) == {field: False}
    assert engine("--no_" + spelling[2:].replace("-", "_")) == {field: False}


def test_values_of_a_repeated_flag_are_collected():
    assert read("--api-key", "a", "--api-key", "b").given(Door) == {"api_key": ("a", "b")}
    greedy = read("m", "--api-key", "a", "b", "--port", "1", "--api-key", "c", greedy=True)
    assert greedy.given(Door) == {"api_key": ("a", "b", "c"), "port": 1}
    assert read(env={"GAPLESS_API_KEY": "a, b"}).given(Door) == {"api_key": ("a", "b")}


@pytest.mark.parametrize(
    "text, value",
    [
        *(("17", 17), ("32k", 32_000), ("32K", 32_768), ("1M", 1_048_576), ("1m", 10**6), ("1.5k", 1_500)),
        *(("2G", 2**31), ("32KiB", 32_768), ("32KB", 32_000), ("1GiB", 2**30), ("1.3KiB", 1_331)),
    ],
)
def test_a_size_with_a_unit_is_read(text, value):
    assert read_size(text) == value
    assert engine("--max-model-len", text) == {"max_model_len": value}


@pytest.mark.parametrize("text", ["", "k", "1.0001k", "1.5", "0x10", "1kk", "1 000", "1_0k", "nan", "1e3", "1B", "1kB"])
def test_a_wrong_size_is_refused(text):
    assert read_size(text) is None
    with pytest.raises(UsageError, match=r"--max-model-len.*expected a whole number"):
        engine(f"--max-model-len={text}")


@pytest.mark.parametrize("text", ["auto", "-1", "none"])
def test_an_optional_size_may_be_left_to_the_engine(text):
    assert engine("--max-model-len", text) == {"max_model_len": None}


SERVE = Command("serve", "test", (EngineConfig, ServerConfig), model_word=True, greedy=True)


def rows(*fates: Fate) -> list[Foreign]:
    return [row for row in TABLE if row.fate in fates]


def reader(*argv: str) -> Settings:
    return SERVE.read(argv, {})


def said(row: Foreign) -> list[str]:
    """A value of this row, where it takes one."""
    own = {"speculative_config.model": "x/y", "speculative_config.method": "suffix", "lora_modules": "a=b"}
    own |= {"root_path": "/x", "override_generation_config": "{}", "default_chat_template_kwargs": "{}"}
    first = row.at.split()[:1]
    return [{"*": own.get(row.field, "3"), "+": "a=b"}.get(text, text) for text in first]


@pytest.mark.parametrize("row", rows(Fate.SET), ids=str)
def test_a_flag_of_another_engine_sets_the_field_that_it_is_here(row):
    field, _, part = row.field.partition(".")
    words = ["--spec-method", "eagle3"] if part == "model" else []
    words += ["--spec-model", "x/y"] if row.text == "draft_model" else []
    words += ["--ssl-certfile", "x"] if field == "ssl_keyfile" else []
    flag = f"{'--no-' if row.text == 'off' else '--'}{field.replace('_', '-')}"
    for name in row.names:
        settings = reader(*words, name, *said(row))
        assert field in settings.given(EngineConfig) | settings.given(ServerConfig)
        assert settings.build(EngineConfig) and settings.build(ServerConfig)
        assert part in settings.given(EngineConfig)[field] if part else settings.said[field] == name
        assert settings.notes[-1].startswith(f"{name} is written {flag}")


def test_a_secret_of_another_engines_flag_is_not_repeated():
    assert "pa55" not in str(reader("--admin-api-key", "pa55").notes)
    with pytest.raises(UsageError, match=r"^--hf-token is not accepted: other users") as caught:
        reader("--hf-token", "pa55")
    assert "pa55" not in str(caught.value)
    with pytest.raises(UsageError, match=r"^-mu host/x.gguf is not available") as caught:
        reader("-mu", "user:pa55@host/x.gguf")


@pytest.mark.parametrize("row", rows(Fate.NOTHING), ids=str)
def test_a_flag_that_changes_nothing_is_taken_with_a_note(row):
    for name in set(row.names) - set(SERVE.spellings()):  # those that are ours are for LLM(...)
        settings = reader(name, *said(row))
        assert settings.given(EngineConfig) == settings.given(ServerConfig) == {}
        assert settings.notes == [f"{' '.join([name, *said(row)])} changes nothing: {row.text}"]


@pytest.mark.parametrize("row", rows(Fate.INSTEAD, Fate.NOT_YET), ids=str)
def test_a_flag_that_is_not_here_is_answered_by_its_name(row):
    for name in row.names:
        typed = f"--{name[2:].replace('-', '_')}" if name.startswith("--") else name
        with pytest.raises(UsageError, match=f"^{name}.* {row.fate.value}") as caught:
            reader(typed, *said(row))
        assert row.text in str(caught.value)


def test_each_row_about_other_engines_is_still_true():
    """What is "not available yet" is no flag of any command, and a flag that a text names is one."""
    records = (EngineConfig, ServerConfig, SamplingFlags, AbFlags, BenchFlags, EvalFlags)
    ours = {name for record in records for spec in specs(record) for name in spec.spellings}
    fields = {spec.field for record in (EngineConfig, ServerConfig) for spec in specs(record)}
    assert not {name for row in rows(Fate.NOT_YET, Fate.INSTEAD) for name in row.names} & ours
    for row in TABLE:
        assert row.fate not in (Fate.SET, Fate.NEEDS) or row.field.partition(".")[0] in fields, row
        assert {flag for flag in re.findall(r"--[a-z][a-z-]+", row.text)} <= ours, row
        for name in row.names:
            found = [one.at for one in TABLE if name in one.names]
            assert len(found) == len(set(found)), f"{name} has two rows for the same values"
    assert VALUES.keys() <= fields


def test_a_flag_without_its_value_is_named():
    for words in (["--pp-size"], ["--pp-size", "--port", "1"], ["--speculative-config.method"]):
        with pytest.raises(UsageError, match=f"^{words[0]}: expected a value$"):
            reader(*words)
    with pytest.raises(UsageError, match=r"^--kv-offloading-backend is not accepted"):
        reader("--kv-offloading-backend=lmcache")


def test_parts_of_a_json_field_may_be_given_one_by_one():
    words = ("--speculative_config.method", "ngram", "-sc.num_speculative_tokens=3")
    assert reader(*words).given(EngineConfig) == {
        "speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}'
    }
    for whole in (["--speculative-config", '{"method": "ngram"}'], ['-sc={"method": "ngram"}']):
        given = reader(*whole, "--spec-tokens", "3").given(EngineConfig)
        assert given == {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}'}
    with pytest.raises(UsageError, match=r"^--override-generation-config must be a JSON object"):
        reader("--override-generation-config", "0.5", "--temp", "1")


def test_options_of_a_backend_of_forms_are_refused():
    name, backend = "--structured-outputs-config", {"backend": "xgrammar"}
    for words in ((name, json.dumps(backend)), (f"{name}.backend", "xgrammar")):
        assert reader(*words).notes[0].endswith("changes nothing: forms of output are always on, by one backend")
    for words in (
        (name, json.dumps(backend | {"disable_any_whitespace": True})),
        (f"{name}.disable_any_whitespace", "true"),
        ("--guided-decoding-backend", "xgrammar:disable-any-whitespace"),
    ):
        with pytest.raises(UsageError, match="is not accepted: it may say the backend alone"):
            reader(*words)


def test_the_name_of_the_model_in_requests_is_not_lost():
    flags = Command("bench serve", "", (BenchFlags,), greedy=True).read(
        ["--model", "Qwen/Qwen3-8B", "--served-model-name", "qwen"], {}
    )
    plan = make_plan(flags.build(BenchFlags))
    assert plan.target.model == "qwen"


def test_a_switch_takes_a_word_for_its_state():
    assert engine("--enforce-eager=true", "--enable-prefix-caching=off") == {
        "enforce_eager": True,
        "enable_prefix_caching": False,
    }
    assert reader("--enable-sleep-mode=false", "--no_enable_lora", "--no-enable-expert-parallel").notes == [
        "--no-enable-sleep-mode changes nothing: it is off",
        "--no-enable-lora changes nothing: adapters are served as soon as --lora-modules or --lora-dir names some",
        "--no-enable-expert-parallel changes nothing: an engine has the ranks of --tensor-parallel-size, on one host",
    ]
    with pytest.raises(UsageError, match=r"^--no-enable-chunked-prefill is not accepted: chunked prefill cannot"):
        reader("--enable-chunked-prefill=False")
    with pytest.raises(UsageError, match="--enforce-eager: expected true or false, got 'maybe'"):
        engine("--enforce-eager=maybe")


def test_a_wrong_value_is_told_under_the_name_that_was_typed():
    cases = {
        ("--depth", "9"): "^--depth must be auto or a whole number from 1 to 8, got '9'",
        ("--mem-fraction-static", "1.5"): "^--mem-fraction-static must be a number from 0.01 to 1, got 1.5",
        ("--served-model-name", ""): "^--served-model-name must be texts, none of them empty",
        ("--max-loras-per-batch", "0"): "^--max-loras-per-batch must be a whole number from 1",
        ("--spec-method", "mlp"): "^--speculative-config.method must be one of ngram",
    }
    for words, message in cases.items():
        with pytest.raises(ConfigError, match=message):
            settings = reader(*words)
            settings.build(EngineConfig), settings.build(ServerConfig)
    with pytest.raises(ConfigError, match=r"^GAPLESS_BLOCK_SIZE must be a whole number from 1"):
        read(env={"GAPLESS_BLOCK_SIZE": "0"}).build(EngineConfig)


def test_a_mistyped_variable_is_warned_of():
    env = {"GAPLESS_DEPHT": "2", "GAPLESS_PORT": "1", "GAPLESS_AMX": "0", "GAPLESS_QUIET": "1", "HF_HOME": "x"}
    assert read(env=env).notes == [
        "GAPLESS_DEPHT in the environment is not known, and changes nothing; did you mean GAPLESS_DEPTH?"
    ]


def test_every_variable_of_the_table_has_a_description():
    table = variables()
    assert table["GAPLESS_MAX_NUM_SEQS"].startswith("--max-num-seqs: requests running at once")
    assert {*OWN_VARIABLES, *OTHERS} <= table.keys() and all(table.values())


def test_a_config_file_may_have_keys_of_other_engines(tmp_path):
    keys = {
        "pipeline-parallel-size": 1,
        "enable-auto-tool-choice": True,
        "kv-offloading-size": 2,
        "async_scheduling": True,
        "cpu-offload-gb": None,
        "lora-paths": ["a=x", "b=y"],
    }
    settings = read("--config", config_file(tmp_path, "c.json", json.dumps(keys)))
    assert settings.given(EngineConfig) == {
        "kv_tiers": ("host:2GiB",), "depth": "auto", "lora_modules": ("a=x", "b=y"),
    }  # fmt: skip
    said = [key for key, value in keys.items() if value is not None]
    assert [note.split()[0] for note in settings.notes] == [f"--{key.replace('_', '-')}" for key in said]


def test_help_tells_what_becomes_of_another_engines_flag(capsys):
    with pytest.raises(SystemExit):
        read("--help=swap-space")
    assert "--swap-space, --preemption-mode VALUE: changes nothing (preempted requests" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv, message",
    [
        ("--max-num-seq 3", r"^unknown flag --max-num-seq; did you mean --max-num-seqs\?$"),
        ("--max_modl_len 3", r"^unknown flag --max_modl_len; did you mean --max-model-len\?$"),
        ("--enable-steep-mode", r"^unknown flag --enable-steep-mode; did you mean --enable-sleep-mode"),
        ("--enable-flux-mode", r"^unknown flag --enable-flux-mode; see gapless serve --help$"),
        ("--bogus", r"^unknown flag --bogus; see gapless serve --help$"),  # two dashes do not make it like --uds
        ("-hfoo", r"^unknown flag -hfoo; see gapless serve --help$"),
        ("--max-model 3", "unknown flag --max-model"),  # no abbreviations
        ("a b", "unexpected argument 'b'"),
        ("a --model b", "two models are named: a and --model b"),
        ("a redis://me:secret@cache:6379", "unexpected argument 'redis://cache:6379'"),
        ("redis://me:secret@cache:6379 --model a", "two models are named: redis://cache:6379 and --model a"),
        ("--dtype int3", "--dtype.*must be one of auto, bfloat16, float16, float32, got 'int3'"),
        ("--port x", "--port.*expected a whole number"),
        ("--gpu-memory-utilization much", "--gpu-memory-utilization.*expected a number, got 'much'"),
        ("--max-num-seqs", "--max-num-seqs.*expected one argument"),
        ("--config /nowhere/c.json", r"^/nowhere/c\.json: cannot read"),
        ("--help=warp", "no flag of gapless serve mentions 'warp'"),
    ],
)
def test_a_wrong_command_line_is_refused(argv, message):
    with pytest.raises(UsageError, match=message):
        read(*argv.split())


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("GAPLESS_BLOCK_SIZE", "big", r"^GAPLESS_BLOCK_SIZE: expected a whole number.*, got 'big'$"),
        ("GAPLESS_QUIET", "maybe", "GAPLESS_QUIET: expected true or false, got 'maybe'"),
    ],
)
def test_a_wrong_variable_is_named(name, value, message):
    with pytest.raises(UsageError, match=message):
        read(env={name: value})
    assert engine(env={name: "", "GAPLESS_UNRELATED": "x"}) == {}


def test_a_word_without_a_flag_is_the_model():
    assert engine("some/dir", "--depth", "2") == {"model": "some/dir", "depth": "2"}
    assert engine("--depth", "2", "some/dir") == {"model": "some/dir", "depth": "2"}
    assert engine("same", "-m", "same") == {"model": "same"}
    assert read("a").typed == {"model"}


@pytest.mark.parametrize("field", [s.field for s in specs(EngineConfig)])
def test_every_flag_has_a_variable(field):
    spec = spec_of(field)
    text, value = ("off", False) if spec.kind is bool else sample(spec)
    settings = read(env={f"GAPLESS_{field.upper()}": text})
    assert settings.given(EngineConfig) == {field: value}
    assert settings.typed == set()


def config_file(tmp_path: Path, name: str, text: str) -> str:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_command_line_beats_environment_beats_file(tmp_path):
    path = config_file(tmp_path, "c.json", json.dumps({"depth": 2, "page-size": 8, "seed": 1}))
    env = {"GAPLESS_DEPTH": "3", "GAPLESS_SEED": "2"}
    assert engine("--config", path) == {"depth": "2", "block_size": 8, "seed": 1}
    assert engine("--config", path, env=env) == {"depth": "3", "block_size": 8, "seed": 2}
    assert engine("--config", path, "--depth", "4", env=env) == {"depth": "4", "block_size": 8, "seed": 2}
    assert engine("--no-async-scheduling", env=env)["depth"] == "1"


def test_a_toml_file_gives_flags_their_values(tmp_path):
    text = 'model = "x"\nmax_model_len = "4K"\napi_key = ["a", "b"]\nquiet = true\ntimeout = 2\ncache-prompt = false'
    settings = read("--config", config_file(tmp_path, "c.toml", text))
    assert settings.build(Door) == Door(api_key=("a", "b"), quiet=True, timeout=2.0)
    assert settings.given(EngineConfig) == {"model": "x", "max_model_len": 4096, "enable_prefix_caching": False}


def test_a_yaml_file_gives_flags_their_values(tmp_path):
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
def test_wrong_config_files_name_file_and_key(tmp_path, name, text, message):
    path = config_file(tmp_path, name, text)
    with pytest.raises(UsageError, match=message) as caught:
        read("--config", path)
    assert str(caught.value).startswith(path)


def test_help_tells_every_flag_its_default_and_its_group():
    text = command().format_help()
    for spec in [*specs(EngineConfig), *specs(Door)]:
        shown = [s.replace("--", "--[no-]", 1) for s in spec.spellings] if spec.kind is bool else spec.spellings
        assert all(s in text for s in shown if not (spec.kind is bool and not s.startswith("--")))
        assert f"\n{spec.group}:\n" in text
    flat = " ".join(text.split())
    assert "tokens of one KV page (default: 16)" in flat
    assert "share KV pages of equal prefixes (default: on)" in flat
    assert "where, at 100% (default: 127.0.0.1)" in flat


def test_help_about_one_thing_is_printed(capsys):
    for about in ("model-len", "Door", "all"):
        with pytest.raises(SystemExit) as stop:
            read(f"--help={about}")
        assert stop.value.code == 0
    text = capsys.readouterr().out
    about_len, rest = text.split("Door:", 1)
    assert "--max-model-len" in about_len and "--port" not in about_len
    assert "--host" in rest


def test_after_two_dashes_words_stay_as_they_are():
    words = Command("run", "test", (EngineConfig,))
    words.add_argument("PROMPT", nargs="*")
    settings = words.read(["--depth", "2", "--", "--block_size", "--tp", "--help=x"], {})
    assert settings.options.PROMPT == ["--block_size", "--tp", "--help=x"]
    assert settings.given(EngineConfig) == {"depth": "2"}
