"""Configs as the checkpoints of the hub have them, in the spellings of their time: each is read natively, and whole.

hub_configs.json has their fields, less those that concern training alone.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gapless.model.config import read_model_config

CONFIGS = json.loads(Path(__file__).with_name("hub_configs.json").read_text())
WINDOWS = {
    "Mistral-7B-v0.1": 32, "gemma-2-2b": 13, "gemma-3-1b": 22, "Phi-3-mini-4k": 32, "Olmo-3-7B": 24,
    "c4ai-command-r7b": 24,
}  # fmt: skip
"""Layers with a window"""
BILLIONS = {
    "Llama-3.1-8B": 8.03, "Qwen2.5-7B": 7.62, "Mistral-7B-v0.1": 7.24, "Mistral-7B-v0.3": 7.25, "gemma-2b": 2.51,
    "gemma-2-2b": 2.61, "gemma-3-1b": 1.0, "Phi-3-mini-4k": 3.82, "Phi-4-mini": 3.84, "phi-4": 14.66, "gpt2": 0.12,
    "OLMo-2-7B": 7.3, "Olmo-3-7B": 7.3, "granite-3.1-2b": 2.53, "c4ai-command-r": 34.98, "c4ai-command-r7b": 8.03,
}  # fmt: skip
"""Parameters, as published"""


@pytest.mark.parametrize("name", CONFIGS)
def test_a_known_config_is_read_whole_and_has_the_published_size(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    config = read_model_config(tmp_path)
    assert config.impl == "native" and config.sizes.parameters / 1e9 == pytest.approx(BILLIONS[name], abs=0.006)
    windows = [layer.attention.size for layer in config.spec.layers]
    assert sum(0 < size < config.max_position_embeddings for size in windows) == WINDOWS.get(name, 0)
    unused = {one.name for one in config.heard if one.use == "not used"}
    assert unused <= {"full_attn_mod", "interpolate_factor", "model_max_length"}
