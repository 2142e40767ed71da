"""Client tests run against the server of the server tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))
