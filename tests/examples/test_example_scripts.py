"""The scripts of examples/, each run as a reader runs it, on the demo model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import Server

pytestmark = pytest.mark.process
ROOT = Path(__file__).resolve().parents[2]


def output_of(script: str, *args: str) -> str:
    command = [sys.executable, str(ROOT / "examples" / script), *args]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server("--device", "cpu")
    yield running
    running.stop()


def test_offline_answers_both_prompts_in_their_order():
    first, second = output_of("offline.py").strip().split("\n\n")
    assert "What is 17 + 25?" in first and "#### 42" in first and first.endswith("stop]")
    assert "Mia has 17 pens" in second and "#### 42" in second


def test_streaming_prints_every_piece_of_both_answers_once():
    found = re.findall(r"^(sum|product): '(.*)'$", output_of("streaming.py"), re.MULTILINE)
    texts = {name: "".join(piece for of, piece in found if of == name) for name in ("sum", "product")}
    assert len(found) > 2, "more than one piece each"
    assert texts["sum"] == r" 25 + 17 = 25 + 10 + 7 = 35 + 7 = 42.\n#### 42"
    assert texts["product"] == r" 8 * 7 = 56.\n#### 56"


def test_logprobs_of_a_greedy_answer_are_those_of_the_likeliest_tokens():
    lines = output_of("logprobs.py").splitlines()
    assert len(lines) == 24
    for line in lines:
        chosen, logprob, best = re.fullmatch(r"('.*?') +(-?\d\.\d{3})   likeliest: ('.*?') .*", line).groups()
        assert chosen == best and float(logprob) <= 0


def test_the_openai_client_gets_one_answer_whole_and_one_as_a_stream(server):
    answers = output_of("openai_client.py", server.base)
    assert answers == "30 + 12 = 30 + 10 + 2 = 40 + 2 = 42.\n#### 42\n8 * 7 = 56.\n#### 56\n"
