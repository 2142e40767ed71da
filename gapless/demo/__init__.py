"""The embedded demo model: its weights and its held-out questions. `examples/demo_model/` is what made them."""

import json
import random
from pathlib import Path

from gapless.base.errors import ConfigError


def weights_dir() -> Path:
    """The directory that holds the packaged model: config, tokenizer, chat template and safetensors weights."""
    return Path(__file__).parent / "weights"


def head_dir() -> Path:
    """The directory that holds the packaged EAGLE-3 head of the model."""
    return Path(__file__).parent / "eagle3"


def held_out(count: int, seed: int) -> list[tuple[str, str]]:
    """`count` held-out arithmetic problems as (question, worked answer that ends in `#### answer`).

    Seed 0 takes them in the order of the file, every other seed in an order of its own. Raises ConfigError if there are
    not that many.
    """
    lines = (Path(__file__).parent / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    if count > len(lines):
        raise ConfigError(
            f"the demo model has {len(lines)} held-out questions, not {count}: lower --num-questions or --shots, "
            "or give a file with --data"
        )
    if seed:
        random.Random(seed).shuffle(lines)
    rows = [json.loads(line) for line in lines[:count]]
    return [(row["question"], row["answer"]) for row in rows]
