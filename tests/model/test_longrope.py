"""longrope: a function of the position that max_model_len chooses, with the tables and logits of transformers."""

from __future__ import annotations

import json

import pytest
import torch
from model_harness import reference, reference_logits
from paging_driver import Driver, Sequence, load, prompt, relative_error

from gapless.base.errors import CheckpointError
from gapless.model.config import read_model_config

ORIGINAL = 32
LISTS = {"short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5], "long_factor": [1.0, 1.5, 2.5, 4.0, 8.0, 16.0]}
ROPES = {
    "plain": {},
    "attention": {"attention_factor": 1.3},
    "factor": {"factor": 4.0},
}


def saved(directory, **rope):
    """A Phi with longrope of three quarters of each head."""
    parameters = {"rope_type": "longrope", "rope_theta": 1000.0, "partial_rotary_factor": 0.75, **LISTS, **rope}
    changes = {"original_max_position_embeddings": ORIGINAL, "max_position_embeddings": 256}
    theirs = reference("phi3-part", rope_parameters=parameters, **changes)
    theirs.save_pretrained(directory)
    return theirs


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("length", (ORIGINAL, ORIGINAL + 1, 200), ids=("short", "just-long", "long"))
def test_longrope_takes_the_factors_of_its_length(tmp_path, rope, length):
    """Sequences of max_model_len tokens are those of transformers, and chunks change nothing."""
    theirs, tokens = saved(tmp_path, **ROPES[rope]), prompt(length)
    driver, sequence = Driver(load(tmp_path, max_model_len=length)), Sequence()
    found = [driver.step(chunks=[(sequence, tokens[low : low + 13])])[0] for low in range(0, length, 13)]
    assert relative_error(torch.cat(found), reference_logits(theirs, tokens)) < 1e-5


def test_the_names_of_before_are_longrope(tmp_path):
    """The first checkpoints of Phi-3 name it su, or yarn, in rope_scaling, and name their code."""
    saved(tmp_path)
    path, wanted = tmp_path / "config.json", read_model_config(tmp_path).spec
    values = json.loads(path.read_text())
    values |= {"partial_rotary_factor": 0.75, "rope_theta": values.pop("rope_parameters")["rope_theta"]}
    values |= {"auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}}
    for name in ("su", "yarn", "longrope"):
        path.write_text(json.dumps(values | {"rope_scaling": {"type": name, **LISTS}}))
        assert read_model_config(tmp_path).spec == wanted


@pytest.mark.parametrize(
    ("changes", "says"),
    (
        ({"original_max_position_embeddings": None}, "original_max_position_embeddings is missing; it must be there"),
        ({"original_max_position_embeddings": 1}, "original_max_position_embeddings must be above 1, got 1"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling must be of type longrope"),
        ({"rope_parameters": {"rope_type": "longrope", **LISTS}}, "short_factor must be a list of 8 numbers, got 6"),
    ),
)
def test_a_longrope_that_cannot_be_is_refused_by_name(tmp_path, changes, says):
    saved(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=says):
        read_model_config(tmp_path)
