"""A part of the loop from outside the package, in a whole engine."""

from __future__ import annotations

from functools import partial

import pytest
from extending.toys.part import TenantBudget

from gapless import AsyncLLM, SamplingParams
from gapless.base.config import EngineConfig
from gapless.base.errors import RequestError
from gapless.engine.build import build_core
from gapless.engine.frontdoor import open_assets
from gapless.engine.thread_backend import ThreadBackend

CONFIG = EngineConfig("demo", device="cpu", threads=1, max_model_len=256, enforce_eager=True)
PROMPT, BUDGET = "One, two,", 40


async def tokens(llm, salt, count):
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    async for output in llm.generate(PROMPT, params, salt=salt):
        found = output.outputs[0].token_ids
    return list(found)


async def test_a_part_from_outside_ends_and_refuses_requests_over_a_budget():
    backend = ThreadBackend(partial(build_core, CONFIG, parts=(TenantBudget(BUDGET),)))
    async with AsyncLLM(backend, open_assets(CONFIG)) as llm:
        first = await tokens(llm, "ann", 30)
        with pytest.raises(RequestError, match="spent its last token"):
            await tokens(llm, "ann", 30)
        with pytest.raises(RequestError, match="come back tomorrow"):
            await tokens(llm, "ann", 1)
        assert await tokens(llm, "bob", 30) == first and len(first) == 30
