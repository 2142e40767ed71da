"""`gapless bench`: flags to plans, a run over a real socket, files, and the modes that run in this process."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lab.scripted import Model, Request, serving

import gapless
from gapless.base.errors import ConfigError
from gapless.cli.bench_flags import BenchFlags
from gapless.cli.bench_serve import make_plan
from gapless.cli.flags import Command
from gapless.cli.main import main
from gapless.lab import startup
from gapless.lab.arrivals import Burst, Ramp
from gapless.lab.bench import LoadPlan

ROOT = Path(__file__).resolve().parents[2]


def plan(line: str) -> LoadPlan:
    return make_plan(Command("bench serve", "", (BenchFlags,), greedy=True).read(line.split(), {}).build(BenchFlags))


def test_without_flags_it_is_a_closed_loop_on_this_machine():
    made = plan("")
    assert made.target.base_url == "http://127.0.0.1:8000" and made.target.model == ""
    assert made.concurrency == 16 and math.isinf(made.arrivals.rate) and made.fit_lengths
    assert (made.work.dataset, made.work.num_prompts, made.work.input_len, made.work.output_len) == (
        *("random", 128),
        *(1024, 128),
    )
    assert made.target.ignore_eos and made.target.extra_body == {"temperature": 0.0}


def test_a_command_line_of_vllm_is_read():
    made = plan(
        "--backend vllm --base-url http://h:9 --endpoint /v1/completions --model m "
        "--dataset-name random --num-prompts 200 --random-input-len 512 --random_output_len 64 --random-prefix-len 16 "
        "--random-range-ratio 0.2 --request-rate 4 --burstiness 0.5 --max-concurrency 32 --seed 7 --ignore-eos "
        "--percentile-metrics ttft,e2el --metric-percentiles 50,99.9 --goodput ttft:200 tpot:20 --num-warmups 5 "
        "--ready-check-timeout-sec 60 --header A=b C=d=e --temperature 0.7 --disable-tqdm "
        "--metadata version=1 tp=2 --result-filename y.json --save-detailed"
    )
    assert (made.target.backend, made.target.model, made.target.endpoint) == ("openai", "m", "/v1/completions")
    assert made.target.headers == (("A", "b"), ("C", "d=e"))
    assert made.target.extra_body == {"temperature": 0.7}
    work = made.work
    assert (work.num_prompts, work.input_len, work.output_len, work.range_ratio) == (200, 512, 64, 0.2)
    assert (work.prefix_len, work.seed) == (16, 7)
    assert (made.arrivals.rate, made.arrivals.burstiness, made.concurrency) == (4.0, 0.5, 32)
    assert made.metrics == ("ttft", "e2el") and made.percents == (50.0, 99.9)
    assert made.goodput == {"ttft": 200.0, "tpot": 20.0} and made.num_warmups == 5 and not made.fit_lengths


@pytest.mark.parametrize(
    "line, want",
    [
        (
            "--dataset-name prefix-repetition --prefix-repetition-prefix-len 9 --prefix-repetition-num-prefixes 3",
            {"prefix_len": 9, "prefixes": 3, "input_len": 256, "output_len": 128, "zipf": 0.0},
        ),
        (
            "--dataset-name generated-shared-prefix --gsp-num-groups 4 --gsp-question-len 5 --prefix-zipf 2",
            {"dataset": "shared_prefix", "prefixes": 4, "input_len": 5, "prefix_len": 2048, "zipf": 2.0},
        ),
        (
            "--dataset-name shared_prefix",
            {"prefixes": 64, "prefix_len": 2048, "input_len": 128, "output_len": 256, "zipf": 1.0},
        ),
        ("--dataset-name multi_turn --multi-turn-turns 3 --multi-turn-think-sec 2", {"turns": 3, "pause": 2.0}),
        (
            "--dataset-name mooncake --dataset-path f --timed-trace-chunk-hash-size 16 --request-rate 2",
            {"dataset": "timed_trace", "path": "f", "block": 16, "self_timed": False},
        ),
        ("--dataset-name custom --dataset-path f --num-prompts 0", {"output_len": 256, "shuffle": True}),
        ("--dataset-name custom --dataset-path f --custom-output-len 7", {"output_len": 7}),
        ("--dataset-name sharegpt --dataset-path f --output-len 9 --disable-shuffle", {"output_len": 9}),
        ("--dataset-name sharegpt --dataset-path f", {"output_len": 0, "shuffle": True}),
        ("--dataset-name trace --dataset-path f", {"dataset": "timed_trace", "self_timed": True}),
    ],
)
def test_the_flags_of_a_data_set_make_its_workload(line, want):
    work = plan(line).work
    assert {name: getattr(work, name) for name in want} == want


def test_concurrency_is_unlimited_if_the_rate_paces_requests():
    assert plan("--max-concurrency 3").concurrency == 3
    assert plan("--request-rate inf").concurrency is None
    assert plan("--dataset-name timed_trace --dataset-path f").concurrency is None
    burst = plan("--request-rate burst:3:1.5")
    assert burst.arrivals.burst == Burst(3, 1.5) and burst.concurrency is None
    ramp = plan("--request-rate linear:1:9")
    assert ramp.arrivals.ramp == Ramp("linear", 1.0, 9.0) and ramp.concurrency is None


def test_answers_run_to_their_length_where_it_is_planned():
    assert not plan("--dataset-name sharegpt --dataset-path f").target.ignore_eos
    assert plan("--dataset-name sharegpt --dataset-path f --ignore-eos").target.ignore_eos
    assert not plan("--no-ignore-eos").target.ignore_eos


@pytest.mark.parametrize(
    "line, message",
    [
        ("--dataset-name custm", "did you mean custom?"),
        ("--dataset-name custom", "--dataset-path FILE"),
        ("--dataset-path x", "made up"),
        ("--request-rate 0", "request-rate must be above 0"),
        ("--burstiness 0", "burstiness must be above 0"),
        ("--request-rate linear:1", "linear:START:END"),
        ("--request-rate linear:0:2", "both ends of a ramp must be above 0"),
        ("--request-rate burst:0:1", "a burst has at least 1 request"),
        ("--request-rate fast", "request-rate must be a number"),
        ("--ramp-up-strategy linear", "--request-rate linear:START:END"),
        ("--num-prompts 0", "num-prompts must be at least 1"),
        ("--extra-body {", "--extra-body is not JSON"),
        ("--extra-body 3", "must be a JSON object"),
        ("--header x", "--header takes KEY=VALUE"),
        ("--goodput itl:3", "goodput takes pairs"),
        ("--percentile-metrics ttft,x", "--percentile-metrics takes"),
        ("--metric-percentiles 200", "metric-percentiles takes"),
        ("--backend tgi", "backend"),
        ("--base-url ftp://x", "a server's URL must look like http://localhost:8000"),
        ("--max-concurrency 0", "--max-concurrency must be"),
        ("--num-warmups -1", "--num-warmups must be"),
        ("--prefix-zipf -1", "--prefix-zipf must be"),
        ("--multi-turn-turns 0", "--multi-turn-turns must be"),
        ("--num-prefixes 0", "--num-prefixes must be"),
        ("--range-ratio 1", "range-ratio must be"),
        ("--num-prompts 1.5", "num-prompts"),
        ("--nm-prompts 3", "did you mean --num-prompts?"),
    ],
)
def test_wrong_flags_are_told_before_any_server_is_asked(line, message):
    with pytest.raises(ConfigError) as caught:
        plan(line)
    assert message in str(caught.value)


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(ttft=0.005, itl=0.001)


@pytest.fixture(scope="module")
def url(model: Model) -> Iterator[str]:
    with serving(model) as found:
        yield found


def bench(url: str, *more: str) -> int:
    line = "bench serve --num-prompts 5 --random-input-len 8 --random-output-len 3 --client-priority none --base-url"
    return main([*line.split(), url, *more])


def test_a_run_over_a_socket(url, model, tmp_path, capsys):
    folder = tmp_path / "results"
    kept = ["--out", f"{folder}/", "--metadata", "commit=abc", "label=mine"]
    assert bench(url, "--api-key", "k", "--save-detailed", *kept) == 0
    shown = capsys.readouterr()
    assert "Successful requests:                     5         \n" in shown.out
    assert "Total generated tokens:                  15        \n" in shown.out
    assert "5 requests of random to m at http" in shown.err
    assert model.asked[-1].headers["authorization"] == "Bearer k"
    (path,) = folder.iterdir()
    assert path.name.startswith("openai-infqps-concurrency16-m-20")
    result = json.loads(path.read_text())
    assert (result["commit"], result["label"], result["backend"], result["seed"]) == ("abc", "mine", "openai", 0)
    assert len(result["ttfts"]) == 5 and result["client"]["priority"] == "none" and result["gapless_version"]
    # What the client saw is at least what the server waited; how much more is up to the machine.
    assert min(result["ttfts"]) >= 0.005 and min(result["latencies"]) >= 0.007


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--metadata", "commit"], "--metadata takes KEY=VALUE"),
        (["--out", "no/such/folder.json"], "cannot write --out no/such/folder.json"),
        (["--save-detailed"], "--save-detailed needs --out"),
        (["--save-result"], "--out FILE.json"),
    ],
)
def test_flags_that_would_lose_the_result_are_refused_before_the_run(words, message, url, model, capsys):
    asked = len(model.asked)
    assert bench(url, *words) == 2
    assert message in capsys.readouterr().err and len(model.asked) == asked


def test_a_file_that_is_named_is_written(url, tmp_path):
    path = tmp_path / "r.json"
    line = "--num-prompts 5 --random-input-len 8 --random-output-len 3 --client-priority none --result-filename"
    assert main(["bench", "serve", url, *line.split(), str(path)]) == 0
    assert json.loads(path.read_text())["completed"] == 5


def test_results_may_be_gathered_in_one_file(url, tmp_path):
    for _ in range(2):
        assert bench(url, "--out", str(tmp_path / "all.jsonl")) == 0
    lines = (tmp_path / "all.jsonl").read_text().splitlines()
    assert [json.loads(line)["completed"] for line in lines] == [5, 5] and "ttfts" not in json.loads(lines[0])
    blocked = tmp_path / "file"
    blocked.touch()
    assert bench(url, "--out", f"{blocked}/x/") == 2


def test_a_bench_that_cannot_run_exits_with_1(url, capsys):
    assert bench(url, "--model", "other") == 1
    assert "has no model 'other'; it has m" in capsys.readouterr().err
    assert bench("http://127.0.0.1:1") == 1
    assert "is a server running there?" in capsys.readouterr().err
    assert main(["bench"]) == 2 and main(["bench", "--help"]) == 0 and main(["bench", "serv"]) == 2


class Interrupting(Model):
    """Ctrl-C comes with the fourth request of the run, which is never answered."""

    def stream(self, request: Request) -> Any:
        if len(self.asked) == 5:  # the first one found out what the server takes
            os.kill(os.getpid(), signal.SIGINT)
            return iter([(60.0, b"")])
        return super().stream(request)


def test_ctrl_c_keeps_what_was_measured(tmp_path, capsys):
    out = tmp_path / "a.json"
    with serving(Interrupting(ttft=0.001, itl=0.001)) as url:
        assert bench(url, "--max-concurrency", "1", "--out", str(out)) == 130
    shown = capsys.readouterr().out
    assert "Successful requests:                     3 " in shown
    assert "note: interrupted: 3 of 5 requests had ended, and no others count" in shown
    result = json.loads(out.read_text())
    assert result["interrupted"] is True and (result["completed"], result["num_prompts"]) == (3, 5)


RUN = """
import sys
from gapless.cli.main import main
code = main(sys.argv[1:])
print("LOADED", sorted({m.split(".")[0] for m in sys.modules} - set(sys.stdlib_module_names)))
sys.exit(code)
"""


def test_a_run_loads_nothing_but_the_standard_library(url):
    words = ["bench", "serve", "--num-prompts", "2", "--random-output-len", "2", "--base-url", url]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{RUN}", *words],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "LOADED ['__main__', 'gapless']" in done.stdout


class FakeLLM:
    """Echoes lengths."""

    calls: list[Any] = []  # noqa: RUF012
    info = SimpleNamespace(vocab_size=50)

    def __init__(self, **engine: Any) -> None:
        self.calls.append(engine)

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *_: object) -> None: ...

    def generate(self, prompts: Any, sampling_params: Any, use_tqdm: bool) -> list[Any]:
        params = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(prompts)
        self.calls.append((prompts, params, use_tqdm))
        outputs = [SimpleNamespace(token_ids=[0] * p.max_tokens) for p in params]
        pairs = zip(prompts, outputs, strict=True)
        return [SimpleNamespace(prompt_token_ids=list(prompt), outputs=[output]) for prompt, output in pairs]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    FakeLLM.calls = []
    monkeypatch.setitem(gapless.__dict__, "LLM", FakeLLM)
    return FakeLLM.calls


def test_bench_throughput_runs_all_prompts_in_one_call(calls, capsys, tmp_path):
    path = tmp_path / "t.json"
    line = "bench throughput demo --num-prompts 4 --input-len 6 --output-len 3 --depth 2 --output-json"
    assert main([*line.split(), str(path)]) == 0
    engine, (prompts, params, _) = calls
    assert engine == {"model": "demo", "depth": "2"} and [len(p) for p in prompts] == [6] * 4
    assert all(max(p) < 50 for p in prompts) and {(p.max_tokens, p.ignore_eos, p.temperature) for p in params} == {
        (3, True, 0.0)
    }
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("Throughput: ") and shown[0].endswith(" output tokens/s")
    assert shown[1:] == ["Total num prompt tokens:  24", "Total num output tokens:  12"]
    result = json.loads(path.read_text())
    assert result["num_requests"] == 4 and result["total_num_tokens"] == 36 and result["model"] == "demo"
    rates = result["tokens_per_second"] * result["elapsed_time"], result["requests_per_second"] * result["elapsed_time"]
    assert rates == pytest.approx((36, 4))


def test_throughput_of_a_file_uses_its_prompts(calls, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "abc", "output_tokens": 2}')
    assert main(["bench", "throughput", "--dataset-name", "custom", "--dataset-path", str(path)]) == 0
    assert calls[1][0] == ["abc"] * 128
    path.write_text('{"messages": [{"role": "user", "content": "x"}]}')
    assert main(["bench", "throughput", "--dataset-name", "custom", "--dataset-path", str(path)]) == 2


def test_bench_latency_times_every_iteration_after_the_warmup(calls, capsys, tmp_path):
    path = tmp_path / "l.json"
    line = "bench latency --batch-size 2 --input-len 5 --output-len 3 --num-iters 4 --num-iters-warmup 2 --output-json"
    assert main([*line.split(), str(path)]) == 0
    batches = [prompts for prompts, _, _ in calls[1:]]
    assert len(batches) == 6 and {len(p) for batch in batches for p in batch} == {5}
    assert len({tuple(p) for batch in batches for p in batch}) == 12  # nothing that a prefix cache could know
    shown = capsys.readouterr().out
    assert "Avg latency: " in shown and "99% percentile latency: " in shown
    result = json.loads(path.read_text())
    assert len(result["latencies"]) == 4 and list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 4)


@pytest.mark.parametrize(
    "line",
    [
        "latency --num-iters 0",
        "throughput --input-len x",
        "startup --output-json /nowhere/at/all",
        "startup --depth 99",
    ],
)
def test_a_flag_of_another_bench_is_refused(line, calls):
    assert main(["bench", *line.split()]) == 2 and calls == []


@pytest.mark.process
def test_a_real_start_is_taken_apart(capsys):
    assert main(["bench", "startup", "--num-iters", "1", "--num-gpu-blocks-override", "200"]) == 0
    rows = {line[:28].strip(): line[28:].split() for line in capsys.readouterr().out.splitlines()}
    parts = ["interpreter", "imports", "tokenizer and template"]
    parts += ["torch", "device", "weights", "memory", "warm-up", "graphs", "other"]
    assert list(rows) == ["phase", *parts, "ready"]
    assert sum(float(rows[name][0]) for name in parts) == pytest.approx(float(rows["ready"][0]), abs=0.01)
    assert float(rows["torch"][0]) > float(rows["device"][0])


def test_starts_as_a_table():
    starts = [startup.Start((("a", 1.0), ("other", 1.0)), 2.0), startup.Start((("a", 3.0), ("b", 1.0)), 4.0)]
    starts.append(startup.Start((("a", 5.0), ("b", 1.0)), 6.0))
    rows = [line.split() for line in startup.table(starts)[1:]]
    assert rows[0] == ["a", "1.000", "4.000", "3.000", "5.000", "80%"]
    assert rows[-1] == ["ready", "2.000", "5.000", "4.000", "6.000", "100%"]
    assert startup.startup_json(starts)["avg_startup_time"] == 4.0


@pytest.mark.parametrize("code, kind", [(2, ConfigError), (1, gapless.base.errors.EngineError)])
def test_a_start_that_fails_has_the_childs_last_words(code, kind, monkeypatch):
    failed = SimpleNamespace(returncode=code, stdout="", stderr="noise\nno such model\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(kind, match="the engine did not start: no such model"):
        startup.measure_start({})
