"""`prefix_allowed_tokens_fn`: a Python function decides which tokens may come, for its own request alone."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from gapless import LLM, AsyncLLM, EngineConfig, RequestError, SamplingParams
from gapless.base.params import PREFIX_FUNCTION
from gapless.engine.inputs import child_seed
from gapless.engine.process_backend import ProcessBackend
from gapless.loop import masks

PROMPT = "Question: Mia has 14 pens and buys 7 more. How many pens does Mia have?\nAnswer:"
OPTIONS = {"device": "cpu", "max_num_seqs": 4, "max_model_len": 256}


@pytest.fixture(scope="module")
def llm():
    with LLM("demo", **OPTIONS) as one:
        yield one


def asking(function=None, **asks):
    return SamplingParams(**{"temperature": 0, "max_tokens": 40, "ignore_eos": True, **asks, PREFIX_FUNCTION: function})


def of_its_length(batch, ids):
    """Tokens whose number leaves the rest that the length does."""
    assert batch == 0 and ids.dtype is torch.int64 and ids.ndim == 1
    return range(len(ids) % 7, 500, 7)


def one_run(depth):
    with LLM("demo", **OPTIONS, depth=depth) as llm:
        params = [asking(), asking(of_its_length), asking(), asking(of_its_length, temperature=1.5, top_p=0.9, seed=3)]
        outputs = llm.generate([PROMPT] * 4, params, use_tqdm=False)
        plain = llm.generate([PROMPT], asking(), use_tqdm=False)[0].outputs[0].token_ids
    return len(outputs[0].prompt_token_ids), [output.outputs[0].token_ids for output in outputs], plain


@pytest.mark.seeds
@pytest.mark.parametrize("depth", ["4", "1", "8"])
def test_tokens_are_those_of_the_function_at_every_depth_and_neighbours_keep_theirs(depth):
    start, tokens, plain = one_run(depth)
    for ids in tokens[1], tokens[3]:
        assert [token % 7 for token in ids] == [length % 7 for length in range(start, start + 40)]
        assert len(ids) == 40 and max(ids) < 500
    assert tokens[0] == tokens[2] == plain


def test_the_function_gets_prompt_and_output_and_may_end_the_output(llm):
    seen, end = [], llm.get_tokenizer().eos_token_id

    def ends_after_three(batch, ids):
        seen.append(ids.tolist())
        return [end] if len(seen) > 3 else [9, 10]

    (output,) = llm.generate([PROMPT], asking(ends_after_three, ignore_eos=False), use_tqdm=False)
    prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids
    assert output.outputs[0].finish_reason == "stop" and set(tokens[:3]) <= {9, 10} and len(tokens) == 4
    assert seen[:4] == [[*prompt, *tokens[:count]] for count in range(4)]


@pytest.mark.seeds
def test_each_completion_is_followed_by_itself(llm):
    params = asking(of_its_length, n=3, temperature=1.0, seed=11)
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    alone = [
        llm.generate([PROMPT], params.replace(n=1, seed=child_seed(11, index)), use_tqdm=False)[0].outputs[0]
        for index in range(3)
    ]
    assert [one.token_ids for one in output.outputs] == [one.token_ids for one in alone]


def raises(batch, ids):
    raise KeyError("a mistake")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (raises, "raised KeyError: 'a mistake'"),
        (lambda batch, ids: [], "must return one token id or more, each from 0 to"),
        (lambda batch, ids: [-1], "must return one token id or more"),
        (lambda batch, ids: [10**30], "raised OverflowError"),
        (lambda batch, ids: None, "raised TypeError"),
    ],
)
def test_a_function_that_fails_ends_its_request_with_the_reason(llm, function, reason):
    with pytest.raises(RequestError, match=rf"prompts\[1\]: {PREFIX_FUNCTION} {reason}") as caught:
        llm.generate([PROMPT] * 2, [asking(), asking(function)], use_tqdm=False)
    assert caught.value.param == PREFIX_FUNCTION
    assert len(llm.generate([PROMPT], asking(), use_tqdm=False)[0].outputs[0].token_ids) == 40


class Panic(BaseException):
    """Raised as a library of Rust does when it breaks."""


def panics(batch, ids):
    raise Panic("broken")


def test_a_function_that_breaks_is_named_by_the_error(llm):
    with pytest.raises(RequestError, match=f"{PREFIX_FUNCTION}: the matcher failed: Panic: broken") as caught:
        llm.generate([PROMPT], asking(panics), use_tqdm=False)
    assert caught.value.param == PREFIX_FUNCTION


def test_a_function_that_does_not_come_back_is_named_by_the_error(llm, monkeypatch):
    monkeypatch.setattr(masks, "LATE_SECONDS", 0.2)
    let = threading.Event()
    with pytest.raises(RequestError, match=f"{PREFIX_FUNCTION}: the mask of a token took longer than 10 s") as caught:
        llm.generate([PROMPT], asking(lambda batch, ids: [1] * let.wait(60)), use_tqdm=False)
    let.set()
    assert caught.value.param == PREFIX_FUNCTION


@pytest.mark.parametrize("wrong", [{PREFIX_FUNCTION: 3}, {"structured_outputs": {"choice": ["a"]}}])
def test_a_value_that_is_no_function_or_goes_beside_a_form_is_refused(wrong):
    with pytest.raises(RequestError, match=PREFIX_FUNCTION):
        SamplingParams(**{PREFIX_FUNCTION: of_its_length, **wrong})


def test_a_function_among_logits_processors_is_refused_with_the_mend():
    with pytest.raises(RequestError, match=r"the engine the function at start.*prefix_allowed_tokens_fn"):
        SamplingParams(logits_processors=[of_its_length])


async def test_an_async_engine_on_a_thread_takes_a_function():
    async with AsyncLLM.from_config(EngineConfig("demo", **OPTIONS)) as llm:
        outputs = [output async for output in llm.generate(PROMPT, asking(of_its_length))]
    assert all(token < 500 for token in outputs[-1].outputs[0].token_ids) and outputs[-1].finished


class Running(ProcessBackend):
    """A backend that behaves as if its process were ready."""

    def __init__(self):
        super().__init__(EngineConfig("demo"))
        self._ready.set()
        self.sink = self
        self.refusals = []

    def refused(self, key, error):
        self.refusals.append((key, error))


async def test_an_engine_in_another_process_refuses_a_function(llm):
    backend = Running()
    (request,) = llm.resolver.resolve(PROMPT, asking(of_its_length)).requests
    backend.submit(request)
    await asyncio.sleep(0)
    ((key, error),) = backend.refusals
    assert key == request.key and isinstance(error, RequestError) and "use LLM, or AsyncLLM" in str(error)
