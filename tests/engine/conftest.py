"""Engine tests use the tiny tokenizers of the text tests, and the references of the model tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "text"))
sys.path.insert(0, str(Path(__file__).parents[1] / "model"))
