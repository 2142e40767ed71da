"""Forms of output through the engine: in process, on a thread, and up to the loop of the real core."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from form_core import FormCore
from fronts import EOS, FRONT, TOKENIZER, core

from gapless import LLM, AsyncLLM, QueueFullError, RequestError, SamplingParams
from gapless.base.config import EngineConfig
from gapless.base.structured import StructuredOutputs
from gapless.engine import messages as m
from gapless.engine.build import build_core
from gapless.engine.frontdoor import ModelAssets, open_assets
from gapless.engine.inputs import Resolver
from gapless.engine.process_backend import ProcessBackend
from gapless.engine.thread_backend import ThreadBackend

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
UNIQUE = {"type": "array", "uniqueItems": True}


def asks(max_tokens=600, **fields):
    return SamplingParams(max_tokens=max_tokens, structured_outputs=StructuredOutputs(**fields))


def llm(one=None):
    return LLM(core=one or FormCore(TOKENIZER), front=FRONT)


def test_each_of_many_prompts_has_the_form_that_it_asks_for():
    with llm() as one:
        params = [asks(json=SCHEMA), asks(regex="[ab]{5}"), SamplingParams(max_tokens=4, ignore_eos=True)] * 5
        texts = [output.outputs[0].text for output in one.generate(["x"] * 15, params)]
        for record, letters, plain in zip(texts[::3], texts[1::3], texts[2::3], strict=True):
            assert "a" in json.loads(record) and re.fullmatch("[ab]{5}", letters) and plain
        assert (one.stats().grammars.compiled, one.stats().grammars.hits) == (2, 8)


def test_completions_of_one_prompt_share_a_compilation_and_nothing_else():
    with llm() as one:
        (output,) = one.generate("x", asks(regex="[a-z]{1,20}").replace(n=8, seed=1))
        texts = [completion.text for completion in output.outputs]
        assert all(re.fullmatch("[a-z]{1,20}", text) for text in texts) and len(set(texts)) > 3
        assert [completion.finish_reason for completion in output.outputs] == ["stop"] * 8
        assert one.stats().grammars.compiled == 1


def test_a_refusal_names_the_prompt_and_leaves_the_engine_quiet():
    with llm() as one:
        with pytest.raises(RequestError, match=r"prompts\[1\]: structured_outputs\.json .*uniqueItems") as caught:
            one.generate(["x", "y", "z"], [asks(regex="a"), asks(json=UNIQUE), asks(regex="b")])
        assert caught.value.param == "structured_outputs.json"
        with pytest.raises(RequestError, match=r"^structured_outputs\.json cannot"):
            one.generate("x", asks(json=UNIQUE))
        assert one.generate("x", asks(regex="abc"))[0].outputs[0].text == "abc"
        assert one.stats().grammars.waiting == 0


def test_more_requests_than_may_wait_are_submitted_bit_by_bit():
    with llm() as one:
        outputs = one.generate(["x"] * 700, asks(regex="[ab]"))
        assert {output.outputs[0].text for output in outputs} == {"a", "b"}


def resolver(eos_ids=(EOS,)):
    return Resolver(FRONT._replace(eos_ids=eos_ids), core().info)


def test_an_ignored_end_token_still_ends_a_form():
    (request,) = resolver().resolve("x", asks(regex="a").replace(ignore_eos=True, stop_token_ids=[5])).requests
    assert request.stop_ids == (5, EOS)
    (request,) = resolver().resolve("x", SamplingParams(ignore_eos=True)).requests
    assert request.stop_ids == ()


def test_a_form_crosses_to_another_process_and_its_matcher_does_not():
    fields = [
        {"json": SCHEMA, "disable_any_whitespace": True, "source": "guided_json"},
        {"choice": ["a", "b"]},
        {"json_object": True, "whitespace_pattern": " "},
        {"regex": "ä+"},
    ]
    for one in fields:
        (request,) = resolver().resolve("x", asks(**one)).requests
        (add,) = m.decode_to_core(m.encode([m.pack_request(request._replace(matcher=object()))]))
        again = m.unpack_request(add)
        assert again.params == request.params and again.matcher is None
        assert again.params.structured_outputs.where == request.params.structured_outputs.where


async def outputs_of(engine, prompt, params):
    async for output in engine.generate(prompt, params):
        final = output
    return final


async def test_requests_of_an_asyncio_program_have_their_forms_and_others_go_on():
    async with AsyncLLM(ThreadBackend(lambda: FormCore(TOKENIZER)), FRONT) as engine:
        params = [asks(json=SCHEMA), asks(choice=["yes", "no"]), SamplingParams(max_tokens=3), asks(json=UNIQUE)]
        runs = [outputs_of(engine, "x", one) for one in params * 3]
        results = await asyncio.gather(*runs, return_exceptions=True)
        for record, choice, plain, refused in zip(*[iter(results)] * 4, strict=True):
            assert "a" in json.loads(record.outputs[0].text)
            assert choice.outputs[0].text in ("yes", "no")
            assert len(plain.outputs[0].token_ids) == 3
            assert isinstance(refused, RequestError) and "uniqueItems" in str(refused)
        assert engine.open_requests == 0


async def test_a_request_aborted_before_its_matcher_is_there_ends_at_once():
    async with AsyncLLM(ThreadBackend(lambda: FormCore(TOKENIZER)), FRONT) as engine:
        stream = await engine.open("x", asks(regex="a{200}"), "one")
        await engine.abort("one")
        (delta,) = await stream.next()
        assert (delta.finish_reason, delta.token_ids) == ("abort", [])
        assert (await outputs_of(engine, "x", asks(regex="ab"))).outputs[0].text == "ab"


def test_a_core_without_a_compiler_of_its_own_sees_no_form():
    seen = []
    plain = core(script=lambda request, count: seen.append(request.matcher) or EOS)
    with LLM(core=plain, front=ModelAssets(TOKENIZER, (EOS,))) as one:
        one.generate("x", SamplingParams(max_tokens=2))
    assert seen == [None]


CONFIG = EngineConfig(model="demo", device="cpu", max_num_seqs=4, max_model_len=1024, enforce_eager=True)


@pytest.fixture(scope="module")
def real():
    made = build_core(CONFIG)
    yield made
    made.close()


@pytest.fixture(scope="module")
def demo(real):
    return LLM(core=real, front=open_assets(CONFIG))


@pytest.mark.seeds
def test_the_real_core_hands_each_request_to_the_loop_with_its_matcher(demo, real, monkeypatch):
    submit, seen = real.loop.submit, []

    def note(request):
        seen.append(request)
        submit(request._replace(matcher=None, params=request.params.replace(structured_outputs=None, max_tokens=2)))

    monkeypatch.setattr(real.loop, "submit", note)
    demo.generate(["x", "y", "z"], [asks(choice=["yes"]), SamplingParams(max_tokens=2), asks(choice=["yes"])])
    plain, *formed = sorted(seen, key=lambda request: request.params.structured_outputs is not None)
    assert plain.matcher is None
    words = np.zeros(-(-demo.info.vocab_size // 32), np.int32)
    for request in formed:
        request.matcher.advance(demo.get_tokenizer().encode("yes", False))
        request.matcher.write_mask(words)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        assert set(allowed.tolist()) == set(request.stop_ids)
    stats = demo.stats()
    assert (stats.grammars.compiled, stats.grammars.hits, stats.grammars.waiting) == (1, 1, 0)


@pytest.mark.seeds
def test_the_real_core_refuses_a_form_that_cannot_be_compiled(demo):
    with pytest.raises(RequestError, match='"uniqueItems"'):
        demo.generate("x", asks(json=UNIQUE))
    assert demo.stats().grammars.refused == 1


def plain_and_formed(core, resolver):
    """Fill the queue of two with plain requests, and have two with forms wait for matchers; returns both."""
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    plain = [resolver.resolve("x", params).requests[0] for _ in range(2)]
    formed = [resolver.resolve("x", asks(choice=["yes"])).requests[0] for _ in range(2)]
    for request in (*plain, *formed):
        core.submit(request)
    with pytest.raises(QueueFullError, match="wait for their grammars"):
        core.submit(formed[0]._replace(key=99))
    return plain, formed


def test_requests_with_matchers_wait_for_room_in_the_queue_and_can_be_aborted_there():
    core = build_core(replace(CONFIG, max_num_queued_reqs=2, max_num_seqs=1))
    plain, formed = plain_and_formed(core, Resolver(open_assets(CONFIG), core.info))
    core.abort(formed[1].key)
    ended = set()
    while core.has_work():
        _, settled, failed = core.step()
        assert failed == []
        ended |= {int(key) for one in settled for key in one.keys}
    assert ended == {plain[0].key, plain[1].key, formed[0].key}
    core.close()


@pytest.mark.process
async def test_the_engine_process_refuses_a_form_that_cannot_be_compiled():
    async with AsyncLLM.from_config(CONFIG, ProcessBackend(CONFIG)) as engine:
        with pytest.raises(RequestError, match='"uniqueItems"') as caught:
            await outputs_of(engine, "x", asks(json=UNIQUE))
        assert caught.value.param == "structured_outputs.json"
        assert (await outputs_of(engine, "x", SamplingParams(max_tokens=2))).finished
