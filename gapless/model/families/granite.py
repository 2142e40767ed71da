"""Granite 3: a Llama with factors of its embeddings, attention scores, sums and logits."""

from __future__ import annotations

from dataclasses import replace

from gapless.model.families.llama import LLAMA
from gapless.model.family import Family
from gapless.model.fields import Fields
from gapless.model.spec import ModelSpec

_FACTORS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


def _granite(fields: Fields) -> ModelSpec:
    spec = LLAMA.read(fields)
    embedding, scale, residual, scaling = (fields.real(name, 1.0, above=0.0) for name in _FACTORS)
    layers = [
        replace(layer, attention=replace(layer.attention, scale=scale), residual=residual) for layer in spec.layers
    ]
    return replace(spec, layers=tuple(layers), embedding_factor=embedding, logits_factor=1 / scaling)


GRANITE = Family(("granite",), _granite, reads=frozenset(_FACTORS))
