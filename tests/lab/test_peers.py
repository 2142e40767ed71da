"""benchmarks/peers.py: its arithmetic, and a whole run on two fake servers."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

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
        self.answer(json.dumps({"data": [{"id": "m", "owned_by": "fake"}], "version": "7"}).encode())

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
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
hold = "import sys, time; held = bytearray(b'x' * (40 << 20)); print('held', flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", hold], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
open(LOG, "a").write(f"{child.pid}\\n")
http.server.ThreadingHTTPServer.request_queue_size = 64
http.server.ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
"""


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType, ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = ("peers", "peer_servers", "peer_table")
    found = tuple(importlib.import_module(name) for name in names)
    for name in names:
        monkeypatch.delitem(sys.modules, name)
    return found  # type: ignore[return-value]


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


def test_words_of_the_command_line(modules):
    peers, servers, _ = modules
    spec = servers.parse_spec("llama@tiny,small:1=env A=1 server --port {port} --json '{\"a\": 1}'")
    assert (spec.name, spec.family, spec.runs_already) == ("llama", "llama", False)
    assert servers.filled(spec.where, {"port": "1"}) == ["env", "A=1", "server", "--port", "1", "--json", '{"a": 1}']
    cases = [peers.parse_case(text) for text in ("tiny:8:1:1", "small:1:1:1", "small:8:1:1")]
    assert [peers.takes_part(spec, case) for case in cases] == [True, True, False]
    for wrong in ("llama", "=command", "llama="):
        with pytest.raises(ValueError, match="NAME=COMMAND"):
            servers.parse_spec(wrong)
    for wrong in ("tiny:1:2", "tiny:0:1:1", "tiny:a:1:1"):
        with pytest.raises(ValueError):
            peers.parse_case(wrong)


def test_what_a_token_reads(modules, tmp_path):
    peers = modules[0]
    header = {"a": {"data_offsets": [0, 100]}, "model.embed_tokens.weight": {"data_offsets": [100, 160]}}
    data = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(data).to_bytes(8, "little") + data)
    config = {"num_hidden_layers": 3, "num_key_value_heads": 2, "hidden_size": 32, "num_attention_heads": 4}
    for tied, expected in ((True, 160), (False, 100)):
        (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tied}))
        assert peers.weight_bytes(tmp_path) == expected
    assert peers.kv_bytes_per_token(tmp_path) == 3 * 2 * 8 * 2 * 2  # layers, heads, width, K and V, two bytes each


def test_a_whole_run(modules, tmp_path, monkeypatch, capsys):
    peers = modules[0]
    (tmp_path / "fake.py").write_text(FAKE)
    command = f"{sys.executable} {tmp_path}/fake.py {{port}} %s %d {tmp_path}/children"
    words = ["--out", f"{tmp_path}/out", "--model", "tiny=none", "--ours", command % (0.01, 0)]
    words += [
        "--peer",
        f"vllm-slow={command % (0.03, 0)}",
        "--peer",
        f"llama-short={command % (0, 1)}",
        "--case",
        "tiny:8:8:2",
    ]
    words += ["--pause", "0", "--quiet", "1", "--client-priority", "none", "--starts", "--roofline", "--fill"]
    monkeypatch.setattr(sys, "argv", ["peers.py", *words])
    monkeypatch.setattr("gapless.lab.environment._LOOK_SECONDS", 0.01)
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
    until = time.monotonic() + 5
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
