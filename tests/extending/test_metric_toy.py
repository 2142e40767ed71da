"""A metric of one file outside the package, on /metrics, in the page's history and in `gapless top`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from served import Server

TOY = Path(__file__).parent / "toys" / "metric.py"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "extend" / "metric.md"
START = f"import sys; sys.path.insert(0, {str(TOY.parent)!r}); import metric; from gapless.cli.main import main; main()"


def test_the_page_shows_the_file_of_the_toy():
    assert f"```python\n{TOY.read_text(encoding='utf-8')}```\n" in PAGE.read_text(encoding="utf-8")


class ToyServer(Server):
    program = ("-c", START)


@pytest.mark.process
def test_an_added_metric_is_shown_wherever_metrics_are():
    server = ToyServer("demo", "--device", "cpu")
    try:
        assert "# TYPE toy:step_tokens gauge" in server.get("/metrics")
        assert "step_tokens" in json.loads(server.get("/debug/history"))["columns"]
        command = [sys.executable, "-c", START, "top", server.base, "--once", "--interval", "0.2"]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        assert " tokens a step" in shown
    finally:
        server.stop()
