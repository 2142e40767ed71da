"""Every rope type against transformers' own rotary embedding and models."""

from __future__ import annotations

import pytest
import torch
from model_harness import SIZES, reference, reference_logits
from paging_driver import Driver, Sequence, load, prompt, relative_error

from gapless.kernels.plain import angles, cos_sin
from gapless.model.rope import rope_table
from gapless.model.spec import RopeConfig

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 512}
TYPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "yarn": {"rope_type": "yarn", **YARN},
    "yarn-betas": {"rope_type": "yarn", **YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "yarn-factor": {"rope_type": "yarn", **YARN, "attention_factor": 0.7},
    "yarn-mscale": {"rope_type": "yarn", **YARN, "mscale": 0.8, "mscale_all_dim": 0.5},
}


@pytest.mark.parametrize("name", TYPES)
def test_tables_of_scaled_ropes_equal_transformers(name, tmp_path):
    theirs = reference("qwen3", head_dim=64, rope_parameters={"rope_theta": 1e6, **TYPES[name]})
    theirs.save_pretrained(tmp_path)
    positions = torch.arange(SIZES["max_position_embeddings"])
    cos, sin = theirs.model.rotary_emb(torch.zeros(1), positions[None])
    ours_cos, ours_sin = cos_sin(angles(positions, load(tmp_path).ropes[0]))
    signs = torch.cat((-torch.ones(32), torch.ones(32)))
    torch.testing.assert_close(ours_cos[:, 0], cos[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(ours_sin[:, 0] * signs, sin[0], rtol=0, atol=1e-6)


def test_dynamic_is_a_function_of_the_position_alone(tmp_path):
    """Past the trained length chunking changes nothing; the base is the one transformers has at max_model_len."""
    theirs = reference(
        "llama",
        max_position_embeddings=64,
        rope_parameters={"rope_theta": 5000.0, "rope_type": "dynamic", "factor": 4.0},
    )
    theirs.save_pretrained(tmp_path)
    model, tokens = load(tmp_path, max_model_len=256), prompt(256)
    [whole] = Driver(model).step(chunks=[(Sequence(), tokens)])
    # one shot at exactly max_model_len is where transformers computes the same base
    assert relative_error(whole, reference_logits(theirs, tokens)) < 1e-5
    driver, sequence = Driver(model), Sequence()
    parts = [driver.step(chunks=[(sequence, tokens[low : low + 50])])[0] for low in range(0, 256, 50)]
    assert relative_error(torch.cat(parts), whole) < 1e-5


def test_positions_past_the_end_are_harmless():
    """Inert rows carry any position."""
    table = rope_table(RopeConfig(), 8, 16, 16)
    cos, _ = cos_sin(angles(torch.tensor([3, 15, 16, 10**9]), table))
    assert torch.equal(cos[1], cos[2])
    assert torch.equal(cos[1], cos[3])
    assert not torch.equal(cos[0], cos[1])
