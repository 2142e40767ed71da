"""Shapes of Qwen3, and directories of such models without weights."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
    "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "max_position_embeddings": 4096,
    "dtype": "bfloat16", "tie_word_embeddings": True, "eos_token_id": 1,
}  # fmt: skip
QWEN3_8B = QWEN3_06B | {
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_17B = QWEN3_06B | {"hidden_size": 2048, "intermediate_size": 6144}
QWEN3_4B = QWEN3_8B | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True}
QWEN3_32B = QWEN3_8B | {
    "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
}  # fmt: skip
SHAPES = {"0.6B": QWEN3_06B, "1.7B": QWEN3_17B, "4B": QWEN3_4B, "8B": QWEN3_8B, "32B": QWEN3_32B}


def weight_count(size: str) -> int:
    """The parameters of a size, norms left out."""
    shape = SHAPES[size]
    hidden, heads, pairs = shape["hidden_size"], shape["num_attention_heads"], shape["num_key_value_heads"]
    layer = hidden * (2 * heads + 2 * pairs) * shape["head_dim"] + 3 * hidden * shape["intermediate_size"]
    ends = shape["vocab_size"] * hidden * (1 if shape["tie_word_embeddings"] else 2)
    return int(shape["num_hidden_layers"] * layer + ends)


def token_bytes(size: str, ranks: int = 1) -> int:
    """The bytes of 16-bit KV that a token takes on each of some ranks."""
    shape = SHAPES[size]
    return 4 * int(shape["num_hidden_layers"]) * shape["head_dim"] * -(-int(shape["num_key_value_heads"]) // ranks)


def make_qwen(directory: Path, positions: int = 4096, size: str = "0.6B") -> Path:
    """A checkpoint directory without weights, for texts of `positions` tokens; Qwen3's shape of a `size`.

    Every token id has a text of its own, so that answers can be compared.
    """
    directory.mkdir(parents=True, exist_ok=True)
    demo = ROOT / "gapless" / "demo" / "weights"
    tokenizer = json.loads((demo / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    taken = {*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    vocabulary |= {f"Ġ#{n}": n for n in range(SHAPES[size]["vocab_size"]) if n not in taken}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text((demo / "tokenizer_config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(json.dumps({**SHAPES[size], "max_position_embeddings": positions}, indent=1))
    return directory
