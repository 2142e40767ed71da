"""The embedded demo model: its weights, the generator of its training text, its training and evaluation scripts."""

from pathlib import Path


def weights_dir() -> Path:
    """The directory that holds the packaged model: config, tokenizer, chat template and safetensors weights."""
    return Path(__file__).parent / "weights"
