"""Whole experiments on servers in this process that play a script."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from ab_made_up import load_run
from server.server_harness import ALPHABET, TOKENS, VOCAB, Server, serving

from gapless.base.errors import ConfigError
from gapless.cli.main import main
from gapless.lab import ab, environment
from gapless.lab.ab import run_experiment
from gapless.lab.ab_plan import AbFlags, Setup
from gapless.lab.arms import Arm, Live, arms_from_flags, arms_from_urls
from gapless.lab.bench import BenchResult, LoadPlan
from gapless.lab.datasets import Workload
from gapless.lab.summary import summarise
from gapless.lab.target import Target
from gapless.testing.core import FakeCore

SMALL = LoadPlan(work=Workload(num_prompts=8, input_len=16, output_len=12), concurrency=4)


def plain_script(request: Any, count: int) -> int:
    """The alphabet, whatever the prompt is."""
    return int(TOKENS.encode(ALPHABET)[count % 26])


def other_script(request: Any, count: int) -> int:
    """Another letter for the third."""
    return plain_script(request, count + (count == 2))


@pytest.fixture(scope="module")
def fast() -> Iterator[Server]:
    with serving(core=lambda: FakeCore(VOCAB, script=plain_script)) as server:
        yield server


@pytest.fixture(scope="module")
def other() -> Iterator[Server]:
    with serving(core=lambda: FakeCore(VOCAB, script=other_script)) as server:
        yield server


def setup(a: Server, b: Server, **fields: Any) -> Setup:
    known: dict[str, Any] = {"runs": 4, "pause": 0.0, "quiet_wait": 0.0, "metrics": "mean_tpot_ms"}
    return Setup(arms_from_urls(a.url, b.url), SMALL, AbFlags(**{**known, **fields}))


@pytest.fixture(autouse=True)
def no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "BUSY_LOOK_SECONDS", 0.01)


def test_one_server_against_itself_gives_a_whole_report(fast):
    said: list[str] = []
    report = run_experiment(setup(fast, fast), said.append)
    assert report["design"]["order"] == "ABBAABBA"
    assert [run["seed"] for run in report["runs"]] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [run["first"] for run in report["runs"]] == [True, False] * 4
    assert report["tokens"]["compared"] == 32 and report["tokens"]["differ"] == 0
    assert [arm["completed"] for arm in report["arms"]] == [32, 32]
    assert [arm["output_tokens"] for arm in report["arms"]] == [32 * 12] * 2
    assert [arm["prompt_tokens"] for arm in report["arms"]] == [32 * 16] * 2
    assert report["workload"]["num_prompts"] == 8 and report["workload"]["max_concurrency"] == 4
    assert report["host"]["cores"] >= 1 and report["arms"][0]["server"]["id"] == "tiny"
    assert json.loads(json.dumps(report)) == report
    assert len([line for line in said if line.startswith("pair ")]) == 8


@pytest.mark.seeds
def test_texts_are_cut_to_their_lengths_as_in_bench_serve(fast):
    chat = LoadPlan(Target(backend="openai-chat"), Workload(num_prompts=4, input_len=16, output_len=2), concurrency=4)
    report = run_experiment(setup(fast, fast, runs=2, warmup_runs=0)._replace(load=chat), lambda text: None)
    # What the chat template adds is the same for every prompt.
    (template,) = {a["prompt_tokens"] / a["completed"] - 16 for a in report["arms"]}
    assert template == int(template) > 0
    assert not any("planned length" in note for note in report["warnings"])


class Made:
    """In the place of PairedLoad: no server, runs of known length. B is 5 % slower."""

    def __init__(self, plan: LoadPlan, priority: str) -> None:
        self.plan = plan
        self.rng = random.Random(1)

    async def meet(self, servers: object) -> None: ...

    def described(self) -> dict[str, Any]:
        return {}

    def seed(self, pair: int) -> int:
        return 100 + pair

    def play(self, arm: int, pair: int) -> BenchResult:
        run = load_run(0.01 * (1 + 0.05 * arm + self.rng.gauss(0, 0.002)))
        return BenchResult(self.plan, run, [], summarise(run, []), ())


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ab, "PairedLoad", Made)
    monkeypatch.setattr(ab, "live", lambda arm: nullcontext(Live(arm.url, {})))


@pytest.mark.usefixtures("made")
@pytest.mark.seeds
def test_runs_stop_when_the_first_metric_is_decided():
    arms = arms_from_urls("http://a", "http://b")
    made = Setup(arms, SMALL, AbFlags(runs=40, stop_early=True, pause=0.0, quiet_wait=0.0))
    report = run_experiment(made, lambda text: None)
    assert report["design"]["looks"] == [10, 20, 30, 40]
    assert report["design"]["pairs"] == 10 and report["design"]["planned_pairs"] == 40
    assert report["design"]["alpha"] == 0.001 and report["metrics"][0]["verdict"] == "worse"
    whole = run_experiment(made._replace(flags=AbFlags(runs=12, pause=0.0, quiet_wait=0.0)), lambda text: None)
    assert whole["design"]["pairs"] == 12 and whole["design"]["alpha"] == 0.05


@pytest.mark.usefixtures("made")
def test_new_servers_are_started_for_every_pair(monkeypatch):
    starts: list[str] = []

    def started(arm: Arm) -> Any:
        starts.append(arm.letter)
        return nullcontext(Live("", {}))

    monkeypatch.setattr(ab, "live", started)
    flags = AbFlags(runs=4, restart=True, order="random", pause=0.0, quiet_wait=0.0)
    made = Setup(arms_from_flags([], [], []), SMALL, flags)
    report = run_experiment(made, lambda text: None)
    assert starts == ["A", "B"] * 4
    assert sorted(report["design"]["order"]) == ["A"] * 4 + ["B"] * 4


@pytest.mark.parametrize(
    "fields, says",
    [
        ({"runs": 3}, "even number"),
        ({"metrics": "tptt"}, "'tptt' is not one of"),
        ({"restart": True, "a_url": "http://a"}, "restart needs arms given by flags"),
        ({"stop_early": True, "runs": 40, "alpha": 0.002}, "too small"),
    ],
)
def test_flags_that_contradict_themselves_are_refused(fields, says):
    with pytest.raises(ConfigError, match=says):
        AbFlags(**fields)
    AbFlags(restart=True)


def command(*words: str) -> list[str]:
    small = ["--num-prompts", "8", "--input-len", "16", "--output-len", "12", "--max-concurrency", "4"]
    return ["ab", "-n", "4", "--pause", "0", "--quiet-wait", "0", "--metrics", "mean_tpot_ms", *small, *words]


def test_the_command_writes_three_files_and_its_exit_code_is_the_rule(fast, other, tmp_path, capsys):
    out = str(tmp_path / "new" / "ab")
    urls = ["--a-url", fast.url, "--b-url", other.url]
    assert main(command(*urls, "--out", out, "--fail-if", "tokens:differ")) == 3
    shown = capsys.readouterr().out
    assert "✗ `--fail-if tokens:differ`" in shown and "Same tokens: NO" in shown
    report = json.loads(Path(f"{out}.json").read_text())
    assert [row["key"] for row in report["metrics"]] == ["mean_tpot_ms"]
    assert report["tokens"]["differ"] == report["tokens"]["compared"] == 32
    assert report["tokens"]["first"]["at"] == 2
    assert Path(f"{out}.md").read_text() == shown and "<!doctype html>" in Path(f"{out}.html").read_text()
    assert main(["ab", "--read", f"{out}.json"]) == 3
    assert capsys.readouterr().out == shown
    assert main(["ab", "--read", f"{out}.json", "--fail-if", "requests:failed"]) == 0
    assert main(["ab", "--read", f"{out}.json", "--fail-if", "itl:worse"]) == 3  # a metric, but not of this report
    assert main(["ab", "--read", f"{out}.json", "--fail-if", "speed:worse"]) == 2


@pytest.mark.parametrize(
    "words, says",
    [
        ([], "say what A and B are"),
        (["--a-url", "http://x"], "give both --a-url and --b-url"),
        (["http://x"], "give the URLs of both servers, A first, got http://x"),
        (["http://x", "http://y", "--a-url", "http://z"], "give the URLs of both servers"),
        (["--", "--depth", "1"], "1 group(s) of flags"),
        (["-n", "5", "--", "--", ""], "even number"),
        (["--fail-if", "bad", "--", "--", "--x"], "--fail-if bad"),
        (["--fail-if", "e2el:worse", "--metrics", "mean_tpot_ms", "--", "--", "--x"], "no judged metric"),
        (["--base-url", "http://x"], "unknown flag --base-url"),
        (["--read", "nowhere.json"], "--read nowhere.json: No such file"),
        (["--read", __file__], "--read " + __file__),
        (["--out", f"{__file__}/x", "--a-url", "http://x", "--b-url", "http://x"], "cannot make --out"),
    ],
)
def test_a_wrong_command_line_is_refused(words, says, capsys):
    assert main(["ab", *words]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.process
def test_two_flag_sets_of_the_real_server(tmp_path, capsys):
    out = tmp_path / "r"
    both = ["--", "--kv-cache-memory-bytes", "64M", "--max-num-seqs", "4", "--threads", "1"]
    words = command("-n", "2", "--warmup-runs", "0", "--out", str(out), "--fail-if", "tokens:differ", "requests:failed")
    assert main([*words, *both, "--", "--depth", "1", "--", "--depth", "4"]) == 0
    report = json.loads(Path(f"{out}.json").read_text())
    assert [arm["own_flags"] for arm in report["arms"]] == [["--depth", "1"], ["--depth", "4"]]
    assert report["tokens"]["compared"] == 16 and report["tokens"]["differ"] == 0
    assert report["metrics"][0]["verdict"] == "unknown"
    for arm in report["arms"]:
        assert "serves demo" in arm["server"]["started"] and arm["failed"] == 0
    children = Path("/proc/self/task").glob("*/children")
    words = [Path(f"/proc/{pid}/cmdline").read_bytes() for path in children for pid in path.read_text().split()]
    assert not any(b"serve" in line.split(b"\0") for line in words), "servers of other tests have other words"


BLOCKED = """
import json, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy", "msgspec", "zmq", "starlette", "uvicorn", "tokenizers", "rich"):
            raise ModuleNotFoundError(name=name)
sys.meta_path.insert(0, Blocker())
from gapless.cli.main import main
sys.exit(main(json.loads(sys.argv[1])))
"""


@pytest.mark.process
def test_servers_at_urls_are_compared_without_torch(fast, tmp_path):
    words = command("--warmup-runs", "0", "--out", str(tmp_path / "r"))
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, json.dumps([*words, "-n", "2", fast.url, fast.url])],
        cwd=Path(__file__).resolve().parents[2], capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "**Same tokens: yes**, all 16 answers" in done.stdout
    assert (tmp_path / "r.html").exists()
