"""benchmarks/peers.py: its arithmetic, and a whole run on two fake servers."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import random
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from gapless.lab import environment
from gapless.lab.arrivals import burstiness_of
from gapless.lab.records import ClientUse, LoadRun, Sample

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

FAKE = """
import http.server, json, subprocess, sys, time

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args): pass

    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if self.path == "/metrics":
            names = ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
            return self.answer("".join(f"{name} {n * CACHE * answers}\\n" for name, n in zip(names, (3, 4))).encode())
        self.answer(json.dumps({"data": [{"id": "m", "owned_by": "fake"}], "version": "7"}).encode())

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open(LOG + "-prompts", "a") as told:
            told.write(f"{len(asked['prompt'])}\\n")
        length = asked["max_tokens"] - SHORT * (answers_left() < 0)
        events = [{"choices": [{"text": "a", "finish_reason": None}]} for _ in range(length - 1)]
        events.append({"choices": [{"text": "a", "finish_reason": "length"}]})
        events.append({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": length}})
        time.sleep(PAUSE)
        lines = [*map(json.dumps, events), "[DONE]"]
        self.answer("".join(f"data: {line}\\n\\n" for line in lines).encode())

answers = 0
def answers_left():
    global answers
    answers += 1
    return 2 - answers

PORT, PAUSE, SHORT, LOG = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
CACHE = "--enable-prefix-caching" in sys.argv
hold = "import sys, time; held = bytearray(b'x' * (40 << 20)); print('held', flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", hold], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
open(LOG, "a").write(f"{child.pid}\\n")
http.server.ThreadingHTTPServer.request_queue_size = 64
http.server.ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
"""


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ...]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = ("peers", "peer_servers", "peer_table", "peer_work")
    found = tuple(importlib.import_module(name) for name in names)
    for name in names:
        monkeypatch.delitem(sys.modules, name)
    return found


def rounds(values, metric="output_throughput", first=0):
    return [{"round": first + k, metric: value} for k, value in enumerate(values)]


def test_a_ratio_is_taken_within_a_round(modules):
    table = modules[2]
    # The machine slows down by half on the way: every round still says 2.
    runs = {"ours": rounds([200.0, 150.0, 100.0]), "vllm-a": rounds([100.0, 75.0, 50.0])}
    assert table.paired(runs, "ours", "vllm-a", "output_throughput") == (2.0, 2.0, 2.0, 3)
    # A round that one side lost does not shift the others.
    runs["vllm-a"] = rounds([75.0, 25.0], first=1)
    assert table.paired(runs, "ours", "vllm-a", "output_throughput") == (3.0, 2.0, 4.0, 2)
    assert table.paired(runs, "ours", "llama", "output_throughput") is None


def test_the_peer_is_the_strongest_of_the_engines_that_count(modules):
    table = modules[2]
    runs = {"ours": rounds([9]), "vllm-a": rounds([1, 5, 9]), "vllm-b": rounds([6, 6, 6]), "llama": rounds([7])}
    assert table.best(runs, ("vllm",), "output_throughput", True) == "vllm-b"
    assert table.best(runs, ("vllm",), "output_throughput", False) == "vllm-a"
    assert table.best(runs, ("vllm", "llama"), "output_throughput", True) == "llama"
    assert table.best(runs, ("other",), "output_throughput", True) is None


@pytest.mark.parametrize(
    ("ratio", "bound", "higher", "says"),
    [
        ((1.5, 1.3, 1.6, 5), 1.3, True, "met"),
        ((1.5, 1.2, 1.6, 5), 1.3, True, "met by the median, not by every round (worst 1.2)"),
        ((0.65, 0.6, 1.4, 5), 1.3, True, "missed: 0.65 is 50% below 1.3"),
        ((0.4, 0.3, 0.5, 5), 0.5, False, "met"),
        ((0.4, 0.3, 0.6, 5), 0.5, False, "met by the median, not by every round (worst 0.6)"),
        ((0.75, 0.3, 0.9, 5), 0.5, False, "missed: 0.75 is 50% above 0.5"),
    ],
)
def test_an_aim_is_met_by_every_round_or_not_at_all(modules, ratio, bound, higher, says):
    assert modules[2].verdict(modules[2].Ratio(*ratio), bound, higher) == says


def test_the_words_of_the_command_line_are_read(modules):
    peers, servers = modules[:2]
    spec = servers.parse_spec("llama@tiny,small:1=env A=1 server --port {port} --json '{\"a\": 1}'")
    assert (spec.name, spec.family, spec.runs_already) == ("llama", "llama", False)
    assert servers.filled(spec.where, {"port": "1"}) == ["env", "A=1", "server", "--port", "1", "--json", '{"a": 1}']
    cases = [peers.parse_case(text) for text in ("tiny:8:1:1", "small:1:1:1", "small:8:1:1")]
    assert [peers.takes_part(spec, case) for case in cases] == [True, True, False]
    for wrong in ("llama", "=command", "llama="):
        with pytest.raises(ValueError, match="NAME=COMMAND"):
            servers.parse_spec(wrong)
    for wrong in ("tiny:1:2", "tiny:0:1:1", "tiny:a:1:1", "tiny:1:1:1:odd", "tiny:1:1:1:open:1"):
        with pytest.raises(ValueError):
            peers.parse_case(wrong)


def test_bytes_that_a_token_reads_are_counted(modules, tmp_path):
    peers = modules[0]
    header = {"a": {"data_offsets": [0, 100]}, "model.embed_tokens.weight": {"data_offsets": [100, 160]}}
    data = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(data).to_bytes(8, "little") + data)
    config = {"num_hidden_layers": 3, "num_key_value_heads": 2, "hidden_size": 32, "num_attention_heads": 4}
    for tied, expected in ((True, 160), (False, 100)):
        (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tied}))
        assert peers.weight_bytes(tmp_path) == expected
    assert peers.kv_bytes_per_token(tmp_path) == 3 * 2 * 8 * 2 * 2  # layers, heads, width, K and V, two bytes each


def test_prompts_of_each_kind_have_their_lengths(modules, tmp_path):
    work = modules[3]
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 1024}')
    assert [work.longest_prompt(tmp_path, length) for length in (512, 4096)] == [256, 768]
    with pytest.raises(ValueError, match="too short for mixed rows"):
        work.longest_prompt(tmp_path, 260)
    sizes = work.Sizes(128, 64, 768, 50)
    plain, mixed, opened, shared = (sizes.prompts(kind, 400, 7) for kind in work.KINDS)
    assert {(p.input_len, p.output_len) for p in plain} == {(128, 64)}
    lengths, answers = sorted(p.input_len for p in mixed), sorted(p.output_len for p in mixed)
    assert lengths[0] < 15 and lengths[-1] > 650 and answers[0] < 20 and answers[-1] > 230
    assert lengths[0] >= 10 and lengths[-1] <= 768 and lengths == sorted(len(p.content) for p in mixed)
    assert opened == mixed != sizes.prompts("mixed", 400, 8)
    assert {(p.input_len, p.output_len) for p in shared} == {(512 + 128, 64)}
    assert len({p.content[:512] for p in shared}) == 1 and len({p.content[512:] for p in shared}) == 400
    assert shared[0].content[:512] != sizes.prompts("shared", 1, 8)[0].content[:512]


def test_open_rows_are_poisson_at_a_share_of_the_slowest_side(modules):
    work = modules[3]
    rate = work.open_rate({"ours": 40.0, "vllm": 10.0, "llama": 20.0})
    assert rate == pytest.approx(7.0) and work.open_rate({}) == 0.0
    times = work.departures(700, rate, 3)
    assert times == work.departures(700, rate, 3) != work.departures(700, rate, 4)
    assert list(times) == sorted(times) and times[-1] == pytest.approx(100.0)
    assert 0.9 < burstiness_of(times) < 1.1  # 1 is Poisson
    assert work.departures(3, 0.0, 3) == (0.0, 0.0, 0.0)


def test_rows_that_need_another_prefix_cache_have_servers_of_their_own(modules):
    peers = modules[0]
    cases = [peers.parse_case(f"tiny:8:1:1{kind}") for kind in ("", ":mixed", ":open", ":shared")]
    assert [case.kind for case in cases] == list(peers.KINDS)
    assert [case.server for case in cases] == ["tiny", "tiny", "tiny", "tiny, prefix cache on"]
    assert {case.prefix_caching for case in cases[:3]} == {"--no-enable-prefix-caching"}
    assert cases[3].prefix_caching == "--enable-prefix-caching"


def side(tokens, ttft, goodput=None):
    runs = zip(tokens, ttft, strict=True)
    both = [{"round": k, "output_throughput": v, "p99_ttft_ms": w} for k, (v, w) in enumerate(runs)]
    return [{**run, "request_goodput": goodput} for run in both]


def test_the_table_says_where_ours_is_behind(modules):
    table = modules[2]
    runs = {"ours": side([90, 90], [20, 30], 5.0), "vllm": side([100, 80], [10, 20], 4.0)}
    case = {"model": "tiny", "kind": "mixed", "concurrency": 8, "runs": runs, "problems": []}
    result = {"host": {"cpu": "A Chip", "cores": 4, "vector": ["avx2", "amx_bf16"], "gpus": ["A GPU"]}}
    result |= {"sides": {"ours": "", "vllm": ""}, "versions": {"vllm": "0.32"}, "cases": [case]}
    assert table.ratio_table(result)[-1].endswith("| 2 | **TTFT p99** |")
    runs["ours"] = side([90, 82], [20, 20], 3.0)
    assert table.ratio_table(result)[-1].endswith("| 2 | tokens/s, TTFT p99, **goodput** |")
    case |= {"kind": "open", "rate": 3.14159}
    assert table.ratio_table(result)[-1].startswith("| tiny open 3.14/s | vllm | 0.962 [0.9..1.02] |")
    assert table.ratio_table(result)[-1].endswith("| 2 | TTFT p99, **goodput** |")
    assert table.machine(result) == "On A Chip, 4 cores (avx2 amx_bf16): ours, vllm 0.32."
    assert "amx_bf16); A GPU: ours" in table.machine({**result, "device": "cuda"})
    # Its figures are no others' aims, and a mixed row of the same size is not the plain one.
    assert table.runs_of(result, "tiny", 8) == {}
    assert table.runs_of({"cases": [{**case, "kind": "plain"}]}, "tiny", 8) is runs


@pytest.mark.parametrize(
    ("flags", "bounded", "told"),
    [
        ("avx2 avx512f amx_bf16", (), "A Chip, 4 cores (avx2 avx512f amx_bf16)"),
        ("avx2 avx512f amx_bf16", ("ATEN", "ONEDNN", "MKL"), "A Chip, kept to AVX2, 4 cores (avx2)"),
        (
            "avx2 avx512f amx_bf16",
            ("ATEN", "MKL"),
            "A Chip, kept to AVX2 but for oneDNN, 4 cores (avx2 avx512f amx_bf16)",
        ),
        ("avx2", ("ATEN", "ONEDNN", "MKL"), "A Chip, 4 cores (avx2)"),  # it has no more
    ],
)
def test_the_table_says_that_the_processor_is_kept_to_avx2(modules, monkeypatch, flags, bounded, told):
    bounds = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    for variable, value in bounds.items():
        monkeypatch.delenv(variable, raising=False)
        if variable.startswith(bounded):
            monkeypatch.setenv(variable, value)
    words = {"flags": flags, "model name": "A Chip"}
    monkeypatch.setattr(environment, "processor_says", lambda name: words.get(name, ""))
    monkeypatch.setattr(environment, "usable_cores", lambda: 4)
    host = environment.describe_host()
    assert modules[2].machine({"host": host, "sides": {"ours": ""}}) == f"On {told}: ours."


def fake_servers(tmp_path, monkeypatch, *words):
    """Call peers.py with these words, without its pauses and its longer measurements."""
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.setattr("gapless.lab.environment.BUSY_LOOK_SECONDS", 0.01)
    common = ["--pause", "0", "--quiet", "1", "--client-priority", "none", "--starts", "--roofline", "--fill"]
    monkeypatch.setattr(sys, "argv", ["peers.py", "--out", f"{tmp_path}/out", *words, *common])


def fake(tmp_path, seconds, lacks=0):
    """The command line of a server whose answers take `seconds` and lack `lacks` of the tokens asked for."""
    flags = f"{{port}} {seconds} {lacks} {tmp_path}/children {{prefix_caching}}"
    return f"{sys.executable} {tmp_path}/fake.py {flags}"


@pytest.mark.process
def test_open_and_shared_rows_are_measured(modules, tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 400}')
    words = ["--model", f"tiny={tmp_path}", "--ours", fake(tmp_path, 0.02), "--peer", f"vllm={fake(tmp_path, 0.04)}"]
    words += ["--case", "tiny:4:8:1", "tiny:4:8:2:open", "tiny:4:8:1:shared", "--rows", "open", "shared"]
    words += ["--clients", "2", "--client-priority", "none"]
    fake_servers(tmp_path, monkeypatch, *words, "--same-prompts", "0", "--goodput", "ttft:10000")
    modules[0].main()
    opened, shared = json.loads((tmp_path / "out.json").read_text())["cases"]
    assert [case["kind"] for case in (opened, shared)] == ["open", "shared"]
    # The slower side gives the rate; 8 requests leave within 8 / rate, whatever the side.
    capacity = opened["capacity"]
    assert opened["rate"] == pytest.approx(0.7 * min(capacity.values())) and capacity["vllm"] < 4 / 0.04
    for runs in opened["runs"].values():
        assert [run["round"] for run in runs] == [0, 1] and all(run["completed"] == 8 for run in runs)
        assert all(run["duration"] > 4 / opened["rate"] for run in runs)
        assert all(run["request_goodput"] == run["request_throughput"] for run in runs)
    assert "prefix_hits" not in opened["runs"]["ours"][0]
    assert [shared["runs"][name][0]["prefix_hits"] for name in ("ours", "vllm")] == [0.75, 0.75]
    printed = capsys.readouterr().out
    assert "tiny shared 4 | ours | " in printed and "TTFT 10000 ms" in printed and "not measured" not in printed


def test_long_prompts_are_sent_in_the_rounds_alone(modules, tmp_path, monkeypatch):
    """One may take a peer many minutes."""
    words = ["--model", "long=none", "--ours", fake(tmp_path, 0), "--case", "long:1:1:2", "--warm-up", "0"]
    fake_servers(tmp_path, monkeypatch, *words, "--same-prompts", "0", "--input-len", "900", "--output-len", "4")
    modules[0].main()
    lengths = [int(line) for line in (tmp_path / "children-prompts").read_text().split()]
    assert lengths[-2:] == [900, 900] and max(lengths[:-2]) == 128


def test_runs_of_several_clients_are_one_run(modules):
    """On the clock of the one that began first; the client's use is that of the busiest."""
    play = importlib.import_module("peer_clients")
    samples = [Sample(place, 0.5, 0.5, (1.0, 2.0), 2.0, 3, 2, "", released=0.5) for place in range(3)]
    late = LoadRun((samples[1],), 1.5, ClientUse(0.2, 2.0, (0.01,)), 100.25)
    soon = LoadRun((samples[2], samples[0]), 1.5, ClientUse(0.3, 2.5, (0.02,)), 100.0)
    run = play.merged([late, soon])
    assert [sample.place for sample in run.samples] == [0, 1, 2] and run.began == 100.0
    assert run.duration == 1.75 and run.client == ClientUse(0.3, 2.5, (0.01, 0.02))
    moved = run.samples[1]
    assert (moved.scheduled, moved.released, moved.sent, moved.ended, moved.events) == (
        0.75,
        0.75,
        0.75,
        2.25,
        (1.25, 2.25),
    )
    assert (moved.ttft, moved.itls, moved.lag) == (0.5, (1.0,), 0.0)


def test_client_processes_are_up_before_the_first_load(modules):
    """One that a load had to start would begin it later than the others."""
    play = importlib.import_module("peer_clients")
    before = set(multiprocessing.active_children())
    with play.LoadClients(3, "none"):
        assert len(set(multiprocessing.active_children()) - before) == 3


def test_a_client_process_that_is_late_fails_the_load(modules, monkeypatch):
    play = importlib.import_module("peer_clients")
    monkeypatch.setattr(play, "TOGETHER_SECONDS", -0.01)
    late = "after the others began: let other work on this machine end"
    with play.LoadClients(2, "none") as clients, pytest.raises(RuntimeError, match=late):
        clients.play(None, ("one", "two"), (0.0, 0.0), None)


@pytest.mark.process
def test_a_whole_run_measures_every_peer(modules, tmp_path, monkeypatch, capsys):
    peers = modules[0]
    words = ["--model", "tiny=none", "--ours", fake(tmp_path, 0.01), "--peer", f"vllm-slow={fake(tmp_path, 0.03)}"]
    words += ["--peer", f"llama-short={fake(tmp_path, 0, 1)}", "--case", "tiny:8:8:2"]
    fake_servers(tmp_path, monkeypatch, *words)
    peers.main()
    printed = capsys.readouterr().out
    result = json.loads((tmp_path / "out.json").read_text())
    (case,) = result["cases"]
    assert {side: [run["round"] for run in runs] for side, runs in case["runs"].items()} == {
        "ours": [0, 1],
        "vllm-slow": [0, 1],
        "llama-short": [],
    }
    assert len(case["problems"]) == 2 and "not as long as asked for" in case["problems"][0]
    tokens = [[run["output_throughput"] for run in case["runs"][side]] for side in ("ours", "vllm-slow")]
    assert f" {modules[2].ratios(*tokens)} | 2 | " in next(
        line for line in printed.splitlines() if "vllm-slow | ≥ 1.3" in line
    )
    # The child has a session of its own, and counts: 40 MiB are its.
    for side in ("ours", "vllm-slow"):
        assert result["memory"]["tiny"][side]["ready"]["pss"] > 40 << 20
        assert result["memory"]["tiny"][side]["ready"]["processes"] == 2
    assert result["sides"]["ours"] == "fake 7"
    assert result["tokens"]["tiny"]["vllm-slow"].startswith("0 of 4 answers differ")
    assert result["tokens"]["tiny"]["llama-short"].startswith("4 of 4 answers differ")
    children = [int(line) for line in (tmp_path / "children").read_text().split()]
    assert len(children) == 3
    until = time.monotonic() + 60
    while any(alive(pid) for pid in children) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(alive(pid) for pid in children)
    monkeypatch.setattr(sys, "argv", ["peers.py", "--read", f"{tmp_path}/out.json"])
    peers.main()
    assert capsys.readouterr().out == printed == (tmp_path / "out.md").read_text()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_log_uniform_lengths_reach_both_ends_and_halve_at_the_geometric_mean(modules):
    rng, LogUniform = random.Random(0), modules[3].LogUniform
    drawn = [LogUniform(10, 1000).draw(rng) for _ in range(4000)]
    assert (min(drawn), max(drawn)) == (10, 1000)
    assert 0.47 < sum(length < 100 for length in drawn) / len(drawn) < 0.53
    assert {LogUniform(5, 5).draw(rng) for _ in range(5)} == {5}
