"""Records again what real clients say to gapless, and what they make of its answers. One command, run by hand:

    python tests/clients/record.py                      # all clients; --only NAME for some

Each client is installed into an environment of its own, with the version that stands here, in a cache folder outside
the repository. A server on the demo model answers. tests/clients/recorded/*.json are written; tests/clients/test_*.py
play them against the present server, so that CI installs none of these clients.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import lm_eval_tasks
from recorder import KEY, Recorder, recording

import gapless

HERE = Path(__file__).parent
RECORDED = HERE / "recorded"
SCENARIO_SECONDS = 300


class Client(NamedTuple):
    """What is installed, and the scenario that it plays; lm-eval plays its own tasks."""

    requirement: str
    scenario: str = ""


CLIENTS = {
    "openai-3": Client("openai==3.51.0", "openai_steps.py"),
    "openai-2": Client("openai==2.54.0", "openai_steps.py"),
    "litellm": Client("litellm==1.106.2", "litellm_steps.py"),
    "langchain-openai": Client("langchain-openai==1.7.3", "langchain_steps.py"),
    "anthropic": Client("anthropic==2.10.0", "anthropic_steps.py"),
    "openai-agents": Client("openai-agents==0.24.0", "agents_steps.py"),
    "instructor": Client("instructor==1.17.0", "instructor_steps.py"),
    "lm-eval": Client("lm-eval[api]==0.4.13"),
}
# Nothing is asked of any other machine, and nobody's keys or proxies come into a recording.
KEPT_VARIABLES = ("PATH", "HOME", "LANG", "TMPDIR", "SSL_CERT_FILE", "PIP_CONFIG_FILE", "PIP_INDEX_URL")
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
OFFLINE |= {"NO_PROXY": "127.0.0.1", "LANGCHAIN_TRACING_V2": "false", "OPENAI_AGENTS_DISABLE_TRACING": "true"}


def environment(cache: Path, name: str) -> Path:
    """The interpreter of a client's environment, made when it is missing or holds another version."""
    folder, wanted = cache / name, CLIENTS[name].requirement
    python, stamp = folder / "bin" / "python", folder / "requirement.txt"
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"{name}: installing {wanted} into {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", wanted], check=True)
        stamp.write_text(wanted)
    return python


def play(python: Path, scenario: str, recorder: Recorder) -> dict[str, Any]:
    """The steps, each with the requests that it sent and what the client made of the answers."""
    variables = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [str(python), str(HERE / "scenarios" / scenario), recorder.address],
            cwd=folder, env={**variables, **OFFLINE}, stdout=subprocess.PIPE, text=True,
            timeout=SCENARIO_SECONDS, check=True,
        )  # fmt: skip
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    for step in told["steps"]:
        step["exchanges"] = recorder.exchanges(step["name"])
    return told


def as_text(value: dict[str, Any]) -> str:
    """JSON with a line for each step or exchange, so that a change of one is a change of one line."""
    rows = []
    for key, inner in value.items():
        if isinstance(inner, list):
            items = ",\n  ".join(json.dumps(one, ensure_ascii=False) for one in inner)
            rows.append(f"{json.dumps(key)}: [\n  {items}\n ]")
        else:
            rows.append(f"{json.dumps(key)}: {json.dumps(inner, ensure_ascii=False)}")
    return "{\n " + ",\n ".join(rows) + "\n}\n"


def record(name: str, cache: Path) -> None:
    client, python = CLIENTS[name], environment(cache, name)
    with recording() as recorder:
        if client.scenario:
            told = play(python, client.scenario, recorder)
        else:
            told = lm_eval_tasks.play(python, recorder, cache / "huggingface", KEY)
    path = RECORDED / f"{name}.json"
    about = {"client": name, "requirement": client.requirement, "gapless": gapless.__version__}
    path.write_text(as_text({**about, **told}), encoding="utf-8")
    print(f"wrote {path.relative_to(HERE.parents[1])}", flush=True)


def main() -> None:
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "gapless-clients"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CLIENTS, default=list(CLIENTS), help="these clients")
    parser.add_argument("--cache", type=Path, default=default, help=f"folder of the environments (default: {default})")
    options = parser.parse_args()
    for name in options.only:
        record(name, options.cache)


if __name__ == "__main__":
    main()
