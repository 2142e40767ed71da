"""Models for benchmarks/peers.py, with random weights: any engine that reads Hugging Face checkpoints loads them.

    PYTHONPATH=. python benchmarks/peer_models.py --out DIR

tiny is a Qwen3 of 3.4 M parameters, whose step is nearly all host work; small has exactly the shape of Qwen3-0.6B, and
its step is nearly all reading of weights. Every id of the vocabulary decodes to text, so servers stream each token.
"""

from __future__ import annotations

import argparse
import json
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
SHARED = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "sliding_window": None,
    "use_sliding_window": False,
    "use_cache": True,
}
TINY = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "max_window_layers": 4,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
SMALL = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
MODELS = {"tiny": (TINY, 2000), "small": (SMALL, 151643)}
"""Shape, and how many ordinary tokens there are; the special ones follow."""


def tokenizer(size: int) -> Tokenizer:
    """Byte-level BPE: the bytes, all pairs of small letters, and made-up words that encoding never yields."""
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(a, b) for a in string.ascii_lowercase for b in string.ascii_lowercase]
    words += [a + b for a, b in merges]
    words += [f"Ġw{i}" for i in range(size - len(words))]
    made = Tokenizer(models.BPE({word: k for k, word in enumerate(words)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIALS])
    return made


def tensors(shape: dict[str, Any], seed: int) -> Iterator[tuple[str, Tensor]]:
    """bfloat16; products keep the size of what they are fed, whatever the depth."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, width = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * width, shape["num_key_value_heads"] * width

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(columns**-0.5).to(torch.bfloat16)

    yield "model.embed_tokens.weight", matrix(shape["vocab_size"], hidden)
    for k in range(shape["num_hidden_layers"]):
        layer = f"model.layers.{k}."
        sizes = {"self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden)}
        sizes |= {"self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries)}
        sizes |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
        for name, (rows, columns) in sizes.items():
            yield f"{layer}{name}.weight", matrix(rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}{name}.weight", torch.ones(hidden, dtype=torch.bfloat16)
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            yield f"{layer}{name}.weight", torch.ones(width, dtype=torch.bfloat16)
    yield "model.norm.weight", torch.ones(hidden, dtype=torch.bfloat16)
    if not shape["tie_word_embeddings"]:
        yield "lm_head.weight", matrix(shape["vocab_size"], hidden)


def build(folder: Path, shape: dict[str, Any], words: int, seed: int) -> int:
    """Write a checkpoint; returns its number of parameters."""
    folder.mkdir(parents=True, exist_ok=True)
    made = tokenizer(words)
    made.save(str(folder / "tokenizer.json"))
    end, begin = made.token_to_id("<|im_end|>"), made.token_to_id("<|endoftext|>")
    config = {**SHARED, **shape, "bos_token_id": begin, "eos_token_id": end}
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": shape["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    sampling = {"bos_token_id": begin, "eos_token_id": [end, begin], "do_sample": False}
    files = {"config": config, "tokenizer_config": about, "generation_config": sampling}
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value, indent=1), encoding="utf-8")
    weights = dict(tensors(shape, seed))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.numel() for tensor in weights.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for name in args.only:
        print(f"{name}: {build(args.out / name, *MODELS[name], args.seed):,} parameters", flush=True)


if __name__ == "__main__":
    main()
