"""Tiny random checkpoints of each family, written by transformers, and a driver that pages them in hostile ways."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from gapless.base.config import EngineConfig
from gapless.model.dense import DenseModel
from gapless.model.loader import load_model
from gapless.model.seam import BatchShape, StepInputs

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama-biased": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3-mha": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16, "num_key_value_heads": 4, "attention_bias": True}),
}
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CPU = torch.device("cpu")


def reference(family: str = "llama", **changes: object) -> PreTrainedModel:
    """A model of transformers with random weights, large enough that every term matters."""
    config_class, model_class, flags = FAMILIES[family]
    torch.manual_seed(7)
    model = model_class(config_class(**{**SIZES, **flags, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2)
    return model


def save(model: PreTrainedModel, directory: Path, **options: object) -> Path:
    model.save_pretrained(directory, **options)
    return directory


def load(directory: Path, **options: object) -> DenseModel:
    return load_model(EngineConfig(model=str(directory), **options), CPU)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [random.Random(seed * 10_007 + length).randrange(SIZES["vocab_size"]) for _ in range(length)]


def reference_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float()


def relative_error(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    assert torch.isfinite(got).all()
    return ((got - want).abs().max() / want.abs().max()).item()


class Sequence:
    """Tokens whose KV is in the cache, and the pages that hold it."""

    def __init__(self, tokens: list[int] | None = None, pages: list[int] | None = None) -> None:
        self.tokens = list(tokens or [])
        self.pages = list(pages or [])


class Driver:
    """Runs steps over a cache full of NaN, the null page too, with pages in random order and stale table entries."""

    def __init__(self, model: DenseModel, pages: int = 160, page_size: int = 16, seed: int = 0) -> None:
        self.model, self.page_size = model, page_size
        self.cache = model.new_cache(pages, page_size, CPU)
        self.cache.data.fill_(torch.nan)
        self.random = random.Random(seed)
        self.free = list(range(1, pages))
        self.random.shuffle(self.free)

    def step(
        self,
        decode: list[tuple[Sequence, int]] = (),
        chunks: list[tuple[Sequence, list[int]]] = (),
        inert: int = 0,
        slack: int = 0,
    ) -> list[Tensor]:
        """Append one token to each decode sequence and many to each chunk's; logits of each, inert rows last of decode.

        `slack` widens the host's bound of decode lengths, as running ahead does.
        """
        rows = [(sequence, [token]) for sequence, token in decode]
        starts = [len(sequence.tokens) for sequence, _ in [*rows, *chunks]]
        for sequence, tokens in [*rows, *chunks]:
            sequence.tokens += tokens
            while len(sequence.pages) * self.page_size < len(sequence.tokens):
                sequence.pages.append(self.free.pop())
        bound = max([1, *(len(sequence.tokens) for sequence, _ in rows)]) + slack
        shape = BatchShape(
            len(rows) + inert, tuple((s, len(t)) for s, (_, t) in zip(starts[len(rows) :], chunks)), bound
        )
        inputs = self._inputs(rows, list(chunks), starts, inert, bound)
        with torch.no_grad():
            hidden = self.model.forward(inputs, self.model.plan(shape), self.cache)
            logits = self.model.logits(hidden)
        assert hidden.shape[0] == shape.tokens
        parts = logits.split([1] * (len(rows) + inert) + [len(tokens) for _, tokens in chunks])
        return [*parts[: len(rows)], *parts[len(rows) + inert :]]

    def _inputs(self, rows: list, chunks: list, starts: list[int], inert: int, bound: int) -> StepInputs:
        longest = max([bound, *(len(sequence.tokens) for sequence, _ in chunks)])
        width = -(-longest // self.page_size) + self.random.randrange(3)
        ids, positions, slots, pages, lens = [], [], [], [], []
        parts = list(zip([*rows, *chunks], starts))
        for place in [*parts[: len(rows)], *[None] * inert, *parts[len(rows) :]]:
            table = [self.random.randrange(self.cache.pages) for _ in range(width)]
            if place is None:
                (
                    ids.append(0),
                    positions.append(10**6),
                    slots.append(self.random.randrange(self.page_size)),
                    lens.append(1),
                )
            else:
                (sequence, tokens), start = place
                table[: len(sequence.pages)] = sequence.pages
                ids += tokens
                positions += range(start, start + len(tokens))
                slots += [
                    table[p // self.page_size] * self.page_size + p % self.page_size for p in positions[-len(tokens) :]
                ]
                lens.append(len(sequence.tokens))
            pages.append(table)
        return StepInputs(*(torch.tensor(x, dtype=torch.int64) for x in (ids, positions, slots, pages, lens)))
