"""Configs that differ from another one in sizes."""

from __future__ import annotations

from dataclasses import replace

from gapless.model.config import ModelConfig


def resized(config: ModelConfig, layers: int = 0, hidden: int = 0, width: int = 0, **attention: object) -> ModelConfig:
    """The config with other sizes; `attention` are fields of its layers' attention."""
    spec, layer = config.spec, config.spec.layer
    at, mlp = replace(layer.attention, **attention), replace(layer.mlp, width=width or layer.mlp.width)
    same = (replace(layer, attention=at, mlp=mlp),) * (layers or len(spec.layers))
    return replace(config, spec=replace(spec, layers=same, hidden_size=hidden or spec.hidden_size))
