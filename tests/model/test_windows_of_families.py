"""Windows by every spelling of config.json, against what transformers computes of the same file."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
import transformers
from model_harness import SIZES, random_weights, reference_logits
from paging_driver import Driver, Sequence, load, prompt, relative_error

from gapless.base.errors import ForeignModelError
from gapless.model.config import read_model_config

GONE, LAYERS = "gone", 3
KINDS = {
    "gone": GONE,
    "null": None,
    "full": ["full_attention"] * LAYERS,
    "mixed": ["full_attention", "sliding_attention", "full_attention"],
    "windows": ["sliding_attention"] * LAYERS,
}
WINDOWS = (GONE, None, 5)
FAMILIES = {
    "Qwen2": {"max_window_layers": 1},
    "Qwen3": {"max_window_layers": 2, "head_dim": 8},
    "Mistral": {"head_dim": 8},
    "Ministral": {"head_dim": 8},
    "Gemma2": {"head_dim": 8},
    "Gemma3": {"head_dim": 8, "sliding_window_pattern": 2},
    "Phi3": {"pad_token_id": 0},
    "Cohere2": {},
    "Olmo3": {},
}
TOKENS = prompt(17)


def cases():
    for family, kinds, window in itertools.product(FAMILIES, KINDS, WINDOWS):
        for used in (GONE, True, False) if family.startswith("Qwen") else (GONE,):
            yield pytest.param(family, kinds, window, used, id=f"{family}-{kinds}-{window}-{used}")


def theirs_of(path):
    """The model of transformers with random weights by this config.json, or None if it has none or cannot run."""
    try:
        config = transformers.AutoConfig.from_pretrained(path)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        random_weights(model)
        return model, reference_logits(model, TOKENS)
    except (ValueError, TypeError, KeyError):
        return None


@pytest.mark.parametrize(("family", "kinds", "window", "used"), [*cases()])
def test_a_window_is_that_of_transformers_or_refused(tmp_path, family, kinds, window, used):
    kind = "gemma3_text" if family == "Gemma3" else family.lower()
    values = SIZES | FAMILIES[family] | {"num_hidden_layers": LAYERS, "model_type": kind, "dtype": "float32"}
    values |= {"layer_types": KINDS[kinds], "sliding_window": window, "use_sliding_window": used}
    values |= {"architectures": [f"{family}ForCausalLM"]}
    values = {name: value for name, value in values.items() if value != GONE}
    (tmp_path / "config.json").write_text(json.dumps(values))
    theirs = theirs_of(tmp_path)
    try:
        layers = read_model_config(tmp_path).spec.layers
    except ForeignModelError as error:
        assert "layer_types" in str(error) or "sliding_window" in str(error)
        assert theirs is None or family == "Phi3"
        return
    if theirs is None:
        assert not any(layer.attention.size for layer in layers), "transformers refuses windows"
        return
    theirs[0].save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(values))
    model = load(tmp_path)
    driver, sequence = Driver(model, page_size=4), Sequence()
    found = driver.step(chunks=[(sequence, TOKENS[:9])])
    found += [driver.step(decode=[(sequence, token)])[0] for token in TOKENS[9:]]
    assert relative_error(torch.cat(found), theirs[1]) < 1e-5
