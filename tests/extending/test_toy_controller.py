"""A controller from outside the package decides in an engine that runs a request."""

from __future__ import annotations

import pytest
from extending.installed import TOYS, install

from gapless import LLM, SamplingParams
from gapless.base.errors import ConfigError
from gapless.pace.controllers import CONTROLLERS, Controllers

PROMPTS = [[5] * 20, [7] * 300]


@pytest.fixture(autouse=True)
def package(tmp_path, monkeypatch):
    install(tmp_path, "gapless.controllers", fixed="controller:FixedChunks", none="controller:annotations")
    for path in (TOYS, tmp_path):
        monkeypatch.syspath_prepend(str(path))


def played(*controllers: str) -> tuple[list[list[int]], set[int]]:
    """Return the tokens of both prompts, and the numbers of prompt tokens of full steps beside decoding rows."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM("demo", max_model_len=512, max_num_batched_tokens=128, controllers=controllers) as llm:
        done = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
        beside = [step.chunk_tokens for step in llm.recording().steps if step.decode_rows]
    return [list(one.outputs[0].token_ids) for one in done], set(beside) - {0}


def test_a_limit_from_outside_bounds_the_chunks_of_an_engine_and_keeps_its_tokens():
    tokens, whole = played()
    assert played("fixed") == (tokens, {64})
    assert max(whole) > 64


def test_a_controller_that_is_not_there_or_controls_nothing_is_refused_with_what_to_do():
    with pytest.raises(ConfigError, match="controllers must be one of fixed, none, got 'fast'"):
        LLM("demo", controllers=("fast",))
    with pytest.raises(ConfigError, match=r"none is .*, and must be a subclass of one of Depth, ChunkLimit"):
        Controllers.named(["none"])


def test_controllers_without_a_name_are_the_built_in_ones():
    assert Controllers.named(()) is CONTROLLERS
