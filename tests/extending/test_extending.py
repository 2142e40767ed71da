"""The pages "Add a ...": each diff applies to today's tree, and the page's program then prints what the page says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(diff|python|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PLAIN = "from gapless.kernels import native\nnative.load = lambda: None\n"
"""Without the C++ kernels"""

pytestmark = pytest.mark.process


class Tree:
    """A copy of the package to which the diff of a page is applied."""

    def __init__(self, folder: Path, page: str) -> None:
        self.folder, self.paths = folder, [str(folder)]
        shutil.copytree(ROOT / "gapless", folder / "gapless", ignore=shutil.ignore_patterns("__pycache__"))
        parts = BLOCK.findall((ROOT / "docs" / "extend" / f"{page}.md").read_text(encoding="utf-8"))
        self.blocks = dict(reversed(parts))
        diffs = [text for kind, text in parts if kind == "diff"]
        assert len(diffs) == 1, "a page has one diff"
        subprocess.run(["git", "apply", "-"], cwd=folder, input=diffs[0], text=True, check=True)

    def run(self, *command: str) -> str:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(self.paths)}
        done = subprocess.run(
            [sys.executable, *command], cwd=self.folder, env=environment, capture_output=True, text=True, timeout=1500
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def check_program(self, before: str = "") -> None:
        """Run the page's program after these lines: it prints the page's text."""
        assert self.run("-c", before + self.blocks["python"]) == self.blocks["text"]


@pytest.mark.timeout(1800)  # the C++ is compiled
@pytest.mark.parametrize("before", ["", PLAIN], ids=["native", "plain"])
def test_an_added_sampling_parameter_changes_tokens(tmp_path, before):
    Tree(tmp_path, "sampling-parameter").check_program(before)
