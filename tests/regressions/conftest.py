"""The scenarios use the tiny tokenizers of the text tests, and the direct computation of the loop's tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "text"))
sys.path.insert(0, str(Path(__file__).parents[1] / "loop"))
