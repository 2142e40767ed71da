"""Grammar tests use the tiny tokenizers of the text tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "text"))
