"""The packaged demo model: small, importable without torch, with questions that everybody gets in the same order."""

import subprocess
import sys

import pytest

from gapless.base.errors import ConfigError
from gapless.demo import held_out, weights_dir


def test_the_packaged_directory_is_small():
    files = [path for path in weights_dir().rglob("*") if path.is_file()]
    assert {path.name for path in files} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert sum(path.stat().st_size for path in files) <= 12 * 2**20


def test_asking_for_the_directory_imports_no_torch():
    code = "import sys; from gapless.demo import weights_dir; weights_dir(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_seed_decides_which_questions_are_asked():
    assert held_out(20, 5) == held_out(30, 5)[:20] != held_out(20, 6)
    assert held_out(20, 0) == held_out(20, 0)
    assert sorted(held_out(1000, 1)) == sorted(held_out(1000, 0))


def test_questions_are_different_and_answered():
    questions = held_out(1000, 0)
    assert len({question for question, _ in questions}) == 1000
    assert all(answer.rpartition("\n#### ")[2].isdigit() for _, answer in questions)


def test_more_questions_than_there_are_is_an_error_that_says_how_many():
    with pytest.raises(ConfigError, match="1000 held-out questions, not 1001"):
        held_out(1001, 0)
