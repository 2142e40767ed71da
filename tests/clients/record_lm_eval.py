"""Records what lm-eval's `local-completions` says to a server on the demo model, and what it makes of the answers.

    python tests/clients/record_lm_eval.py --python PYTHON_OF_AN_ENVIRONMENT_WITH_LM_EVAL

That environment needs `lm-eval[api]`. Writes tests/clients/lm_eval.jsonl, which test_lm_eval.py plays back.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

RECORDING = Path(__file__).with_name("lm_eval.jsonl")
START_SECONDS = 120

MIA = "Question: Mia has 17 pens. She buys 25 more. How many pens does she have?\nAnswer:"
TOM = "Question: Tom has 30 apples. He eats 12 of them. How many apples does he have?\nAnswer:"
CHOICES = [
    {"context": f"{MIA} She: 25 + 17 = 25 + 10 + 7 = 35 + 7 =", "choices": ["42", "41", "7"], "gold": 0},
    {"context": f"{TOM} Tom: 30 - 12 = 30 - 10 - 2 = 20 - 2 =", "choices": ["42", "18"], "gold": 1},
    {"context": "Question: Wie viel für 2 €?\nAnswer: 3 + 4 =", "choices": ["acht €", "7", "12 Münzen"], "gold": 1},
]
CAR = "Question: A car leaves Sydney for Lyon and drives 18 km every hour for 4 hours. How many km?\nAnswer:"
QUESTIONS = [{"context": MIA, "answer": "42"}, {"context": CAR, "answer": "72"}]
TASKS = {
    "gapless_choices": """\
task: gapless_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
target_delimiter: " "
doc_to_target: gold
metric_list:
  - {{metric: acc}}
  - {{metric: acc_norm}}
""",
    "gapless_answers": """\
task: gapless_answers
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{context}}}}"
doc_to_target: answer
generation_kwargs: {{until: ["Question:"], max_gen_toks: 64, temperature: 0}}
filter_list:
  - name: last
    filter:
      - {{function: regex, regex_pattern: "#### (-?[0-9]+)"}}
      - {{function: take_first}}
metric_list:
  - {{metric: exact_match}}
""",
}


class Recorder(ThreadingHTTPServer):
    """Passes every request on to a server, and keeps it with its answer."""

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.target = target
        self.exchanges: list[dict[str, Any]] = []


class Handler(BaseHTTPRequestHandler):
    server: Recorder

    def do_GET(self) -> None:
        self._pass(None)

    def do_POST(self) -> None:
        self._pass(self.rfile.read(int(self.headers.get("content-length", 0))))

    def _pass(self, body: bytes | None) -> None:
        request = urllib.request.Request(self.server.target + self.path, body, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                status, answer = response.status, response.read()
        except urllib.error.HTTPError as error:
            status, answer = error.code, error.read()
        sent = None if body is None else json.loads(body)
        entry = {"method": self.command, "path": self.path, "sent": sent, "status": status}
        entry["answer"] = json.loads(answer)
        if entry not in self.server.exchanges:
            self.server.exchanges.append(entry)
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""


def serve() -> tuple[subprocess.Popen[str], str]:
    """`gapless serve` on the demo model; its process and its address."""
    command = [sys.executable, "-m", "gapless", "serve", "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if match := re.search(r" at (http://\S+?),", line):
            threading.Thread(target=process.stdout.read, daemon=True).start()
            return process, match[1]
    raise SystemExit("the server did not start")


def run_lm_eval(python: str, address: str, folder: Path) -> dict[str, Any]:
    """The results of both tasks, and what the harness kept of every question."""
    for name, rows in (("gapless_choices", CHOICES), ("gapless_answers", QUESTIONS)):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / f"{name}.yaml").write_text(TASKS[name].format(data=data))
    model_args = f"model=demo,base_url={address}/v1/completions,num_concurrent=1,max_retries=1,max_length=2000"
    command = [python, "-m", "lm_eval", "--model", "local-completions", "--model_args", model_args]
    command += ["--tasks", ",".join(TASKS), "--include_path", str(folder), "--batch_size", "4"]
    command += ["--output_path", str(folder / "out"), "--log_samples"]
    subprocess.run(command, check=True, cwd=folder)
    (results,) = (folder / "out").glob("*/results_*.json")
    kept: dict[str, Any] = {"results": json.loads(results.read_text())["results"], "samples": {}}
    for task in TASKS:
        (samples,) = (folder / "out").glob(f"*/samples_{task}_*.jsonl")
        lines = [json.loads(line) for line in samples.read_text().splitlines()]
        kept["samples"][task] = [{"doc": line["doc"], "resps": line["resps"]} for line in sorted(lines, key=_number)]
    return kept


def _number(line: dict[str, Any]) -> int:
    return int(line["doc_id"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", required=True, help="interpreter of an environment with lm-eval[api]")
    python = parser.parse_args().python
    process, address = serve()
    recorder = Recorder(address)
    threading.Thread(target=recorder.serve_forever, daemon=True).start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            kept = run_lm_eval(python, f"http://127.0.0.1:{recorder.server_port}", Path(folder))
    finally:
        process.terminate()
        process.wait(30)
        recorder.shutdown()
    version = subprocess.check_output([python, "-c", "import lm_eval; print(lm_eval.__version__)"], text=True).strip()
    lines = [json.dumps({"lm_eval": version, **kept}), *map(json.dumps, recorder.exchanges)]
    RECORDING.write_text("".join(line + "\n" for line in lines))


if __name__ == "__main__":
    main()
