"""The tasks that lm-eval's `local-completions` plays when it is recorded: every kind of request that it makes.
The worked problems are the demo model's held-out ones under lm-eval's own rules for GSM8K."""

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from recorder import Recorder

from gapless.demo import held_out

MIA = "Question: Mia has 17 pens. She buys 25 more. How many pens does she have?\nAnswer:"
TOM = "Question: Tom has 30 apples. He eats 12 of them. How many apples does he have?\nAnswer:"
CHOICES = [
    {"context": f"{MIA} She: 25 + 17 = 25 + 10 + 7 = 35 + 7 =", "choices": ["42", "41", "7"], "gold": 0},
    {"context": f"{TOM} Tom: 30 - 12 = 30 - 10 - 2 = 20 - 2 =", "choices": ["42", "18"], "gold": 1},
    {"context": "Question: Wie viel für 2 €?\nAnswer: 3 + 4 =", "choices": ["acht €", "7", "12 Münzen"], "gold": 1},
]
TEXTS = [{"text": f"{MIA} She: 25 + 17 = 42.\n#### 42"}, {"text": "Repeat: zwölf Münzen\nzwölf Münzen"}]
HELD_OUT = (0, 1, 2, 3, 95, 115)
"""Numbers of held-out problems of seed 0; the last two are answered wrong."""
HEAD = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
"""
TASKS = {
    "gapless_choices": """\
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
target_delimiter: " "
doc_to_target: gold
metric_list:
  - {metric: acc}
  - {metric: acc_norm}
""",
    "gapless_worked": """\
output_type: generate_until
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["Question:", "</s>", "<|im_end|>"], do_sample: false, temperature: 0.0}
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
    ignore_case: true
    ignore_punctuation: false
    regexes_to_ignore: [",", "\\\\$", "(?s).*#### ", "\\\\.$"]
filter_list:
  - name: strict-match
    filter:
      - {function: regex, regex_pattern: "#### (\\\\-?[0-9\\\\.\\\\,]+)"}
      - {function: take_first}
  - name: flexible-extract
    filter:
      - {function: regex, group_select: -1, regex_pattern: "(-?[$0-9.,]{2,})|(-?[0-9]+)"}
      - {function: take_first}
""",
    "gapless_texts": """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: word_perplexity}
  - {metric: byte_perplexity}
  - {metric: bits_per_byte}
""",
}


def documents() -> dict[str, list[dict[str, Any]]]:
    made = held_out(max(HELD_OUT) + 1, 0)
    worked = [{"question": made[number][0], "answer": made[number][1]} for number in HELD_OUT]
    return {"gapless_choices": CHOICES, "gapless_worked": worked, "gapless_texts": TEXTS}


def play(python: Path, recorder: Recorder, cache: Path, key: str) -> dict[str, Any]:
    """What lm-eval makes of all tasks, and every request that it sent."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for task, rows in documents().items():
            data = folder / f"{task}.jsonl"
            data.write_text("".join(json.dumps(row) + "\n" for row in rows))
            (folder / f"{task}.yaml").write_text(HEAD.format(name=task, data=data) + TASKS[task])
        url = f"{recorder.address}/v1/completions"
        # The key in the environment goes with completions, auth_token with /tokenize and /tokenizer_info.
        model_args = f"model=demo,base_url={url},auth_token={key},num_concurrent=1,max_retries=1,max_length=2000"
        command = [str(python), "-m", "lm_eval", "--model", "local-completions", "--model_args", model_args]
        command += ["--tasks", ",".join(TASKS), "--include_path", name, "--batch_size", "4"]
        command += ["--output_path", str(folder / "out"), "--log_samples"]
        variables = {"OPENAI_API_KEY": key, "HF_HOME": str(cache), "NO_PROXY": "127.0.0.1"}
        subprocess.run(command, check=True, cwd=folder, env={**os.environ, **variables})
        return {**_versions(python), **_results(folder / "out"), "exchanges": recorder.exchanges("")}


def _versions(python: Path) -> dict[str, str]:
    told = "import sys, lm_eval; print(lm_eval.__version__, sys.version.split()[0])"
    version, interpreter = subprocess.check_output([str(python), "-c", told], text=True).split()
    return {"version": version, "python": interpreter}


def _results(out: Path) -> dict[str, Any]:
    (results,) = out.glob("*/results_*.json")
    kept: dict[str, Any] = {"results": json.loads(results.read_text())["results"], "samples": {}}
    for task in TASKS:
        (samples,) = out.glob(f"*/samples_{task}_*.jsonl")
        lines = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda line: int(line["doc_id"]))
        kept["samples"][task] = [_sample(line) for line in lines]
    return kept


def _sample(line: dict[str, Any]) -> dict[str, Any]:
    metrics = {name: line[name] for name in line["metrics"]}
    kept = {name: line[name] for name in ("doc", "resps", "filtered_resps")}
    return {**kept, "filter": line["filter"], "metrics": metrics}
