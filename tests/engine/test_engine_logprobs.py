"""Log-probabilities of a dense model through the whole engine, against transformers; and their shapes in Python."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from by_hand import ByHand
from fronts import FRONT, TOKENIZER, core, says
from model_harness import reference, reference_logits
from sharpest import sharpest

from gapless import LLM, SamplingParams
from gapless.base.config import EngineConfig
from gapless.base.errors import EngineDeadError
from gapless.base.records import Flag
from gapless.engine.async_llm import AsyncLLM
from gapless.engine.outputs import Logprob
from gapless.engine.thread_backend import ThreadBackend
from gapless.engine.wiring import build_core
from gapless.kernels import plain

VOCAB = TOKENIZER.vocab_size
SPECULATIVE = '{"method": "ngram", "num_speculative_tokens": 3}'
CLOSE = 2e-4
"""float32, other shapes of matrices."""


@pytest.fixture(scope="module", params=sharpest(["llama", "qwen3"]))
def pair(request, tmp_path_factory):
    """A model of transformers, and the directory that ours is read from."""
    return saved(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return saved("qwen3", tmp_path_factory)


def saved(family, folders):
    model, directory = reference(family, vocab_size=VOCAB), folders.mktemp(family)
    model.save_pretrained(directory)
    return model, directory


def engine(directory, depth="2", **options):
    """Few rows, few tokens a step and few pages: chunks, queueing and preemption take part."""
    small = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "max_model_len": 64, "block_size": 4}
    options = {"num_gpu_blocks_override": 19, **options}
    config = EngineConfig(model=str(directory), device="cpu", depth=depth, **{**small, **options})
    return LLM(core=build_core(config), front=FRONT)


def ids(count, seed):
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


def ask(**fields):
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 9, "ignore_eos": True, **fields})


WORK = [
    (ids(40, 1), ask(logprobs=5, prompt_logprobs=3)),
    (ids(7, 2), ask(temperature=1.3, top_k=4, seed=5, logprobs=20, max_tokens=25)),
    (ids(3, 3), ask()),
    (ids(40, 1), ask(prompt_logprobs=0, max_tokens=3)),
    (ids(40, 1), ask(logprobs=0, max_tokens=14)),
    (ids(1, 4), ask(logprobs=1, prompt_logprobs=1, temperature=2.0, top_p=0.5, seed=1)),
]


def check(model, output, params):
    """Every number against log_softmax over the logits of transformers."""
    prompt, (done,) = output.prompt_token_ids, output.outputs
    tokens = [*prompt, *done.token_ids]
    table = torch.log_softmax(reference_logits(model, tokens), -1)
    entries = [*(output.prompt_logprobs or [None] * len(prompt)), *(done.logprobs or [None] * len(done.token_ids))]
    assert (output.prompt_logprobs is None) == (params.prompt_logprobs is None)
    assert (done.logprobs is None) == (params.logprobs is None)
    assert len(entries) == len(tokens) and entries[0] is None
    for place, entry in enumerate(entries):
        if entry is None:
            continue
        top = params.prompt_logprobs if place < len(prompt) else params.logprobs
        check_entry(entry, tokens[place], table[place - 1], top)
    if params.logprobs is not None:
        own = [entry[token].logprob for token, entry in zip(done.token_ids, done.logprobs, strict=True)]
        assert done.cumulative_logprob == pytest.approx(sum(own))
    else:
        assert done.cumulative_logprob is None


def check_entry(entry, token, expected, top):
    assert next(iter(entry)) == token, "the token that stands there comes first"
    ranked = sorted(entry, key=lambda other: entry[other].rank)
    likely = [other for other in ranked if entry[other].rank <= top]
    assert [entry[other].rank for other in likely] == list(range(1, top + 1))
    assert set(entry) == {token, *likely}
    for other in entry:
        assert entry[other].logprob == pytest.approx(expected[other].item(), abs=CLOSE)
        assert entry[other].decoded_token == TOKENIZER.token_bytes(other).decode(errors="replace")
    # Two logits closer than rounding may stand either way round; counts of those clearly above and below may not.
    own = expected[token]
    assert (expected > own + CLOSE).sum() < entry[token].rank <= (expected > own - CLOSE).sum()
    assert [entry[other].logprob for other in likely] == pytest.approx(
        expected.topk(top).values.tolist() if top else [], abs=CLOSE
    )


def test_log_probabilities_are_those_of_transformers_at_any_depth(pair):
    """Prompts in chunks, requests that ask beside ones that do not, a cached prefix, preemption."""
    model, directory = pair
    prompts, params = [prompt for prompt, _ in WORK], [one for _, one in WORK]
    first = None
    for depth in ("1", "4") if model.config.model_type == "llama" else ("2", "8"):
        with engine(directory, depth) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert llm.stats().queue.preemptions
        for output, one in zip(outputs, params, strict=True):
            check(model, output, one)
        tokens = [output.outputs[0].token_ids for output in outputs]
        first = first or tokens
        assert tokens == first


@pytest.mark.seeds
def test_every_bit_of_a_request_alone_is_the_same_at_any_depth(qwen3):
    _, directory = qwen3
    found = []
    for depth in ("1", "2", "4", "8"):
        with engine(directory, depth) as llm:
            (output,) = llm.generate(ids(30, 9), ask(logprobs=20, prompt_logprobs=20, temperature=0.7, seed=3), False)
            found.append((output.outputs[0].logprobs, output.prompt_logprobs))
    assert all(other == found[0] for other in found)


def test_two_completions_share_one_scored_prompt(qwen3):
    model, directory = qwen3
    params = ask(n=2, prompt_logprobs=1, logprobs=1, temperature=1.0, seed=3)
    with engine(directory) as llm:
        llm.generate(ids(40, 1), ask(max_tokens=1), False)  # from now on the second one finds its prompt cached
        (output,) = llm.generate(ids(40, 1), params, False)
    for done in output.outputs:
        prompt = {"prompt_token_ids": output.prompt_token_ids, "prompt_logprobs": output.prompt_logprobs}
        check(model, SimpleNamespace(**prompt, outputs=[done]), params)


# Shapes, with a core that says known numbers.


def test_log_probabilities_in_python_have_their_shapes():
    with LLM(core=core(), front=FRONT) as llm:
        (output,) = llm.generate([3, 4, 5], ask(max_tokens=2, logprobs=1, prompt_logprobs=0), False)
    assert output.prompt_logprobs == [None, {4: Logprob(-2.0, 2, text(4))}, {5: Logprob(-2.0, 2, text(5))}]
    (done,) = output.outputs
    assert done.logprobs == [
        {token: Logprob(-2.0, 2, text(token)), (token - 1) % VOCAB: Logprob(-1.0, 1, text((token - 1) % VOCAB))}
        for token in done.token_ids
    ]
    assert done.cumulative_logprob == -4.0


def text(token):
    return TOKENIZER.token_bytes(token).decode(errors="replace")


def test_a_stop_string_leaves_one_entry_a_token():
    with LLM(core=says("hello there", lag=3), front=FRONT) as llm:
        (output,) = llm.generate([3], ask(max_tokens=11, logprobs=0, stop="lo t"), False)
    (done,) = output.outputs
    assert (done.text, len(done.logprobs), len(done.token_ids)) == ("hel", 7, 7)


async def test_a_stream_brings_each_entry_once():
    async with AsyncLLM(ThreadBackend(core), FRONT) as llm:
        stream = await llm.open([3, 4, 5], ask(max_tokens=20, logprobs=1, prompt_logprobs=1))
        entries, tokens = [], []
        while not stream.finished:
            for delta in await stream.next():
                assert stream.prompt_logprobs is not None and len(stream.prompt_logprobs) == 3
                assert len(delta.logprobs) == len(delta.token_ids)
                entries += delta.logprobs
                tokens += delta.token_ids
                await asyncio.sleep(0.001)
        assert [next(iter(entry)) for entry in entries] == tokens and len(tokens) == 20
        assert stream.snapshot().outputs[0].logprobs == entries
        plain = await llm.open([3], ask(max_tokens=1))
        assert [delta.logprobs for delta in await plain.next()] == [None]


# The tracker: nothing is news before the prompt is scored.


def by_hand():
    return ByHand(2, prompt_logprobs=1)


def test_a_completion_whose_prompt_was_cached_waits_for_the_one_that_is_scored():
    follower = by_hand()
    follower.say(keys=[2])
    follower.say(keys=[2], scored=[1])
    assert (follower.stream.woken, follower.stream.has_news) == (0, False)
    follower.say(keys=[1, 2], scored=[2])
    assert (follower.stream.woken, follower.stream.has_news) == (1, True)
    assert [(delta.index, len(delta.token_ids)) for delta in follower.stream.take()] == [(1, 3), (0, 1)]
    assert len(follower.stream.prompt_logprobs) == 3


@pytest.mark.parametrize("how", ["error", "abort", "fail"])
def test_a_completion_waits_no_longer_than_the_scored_one_lives_whose_failure_comes_first(how):
    follower = by_hand()
    follower.say(keys=[2])
    if how == "error":
        follower.say(keys=[1], flag=Flag.ERROR)
    elif how == "abort":
        follower.tracker.abort("r")
    else:
        follower.tracker.fail(1, RuntimeError("no"))
    assert follower.stream.woken and follower.stream.has_news
    if how == "error":
        assert [(delta.index, delta.finish_reason) for delta in follower.stream.take()] == [(0, "error"), (1, None)]


async def test_a_request_that_fails_before_its_prompt_is_scored_says_nothing_else():
    """Half of a prompt's log-probabilities are no answer, and an echo could not be written."""
    follower = by_hand()
    follower.say(keys=[2], scored=[1])
    follower.tracker.fail_all(lambda: EngineDeadError("gone"))
    with pytest.raises(EngineDeadError, match="gone"):
        await follower.stream.next()
    assert follower.stream.finished


def test_entries_of_a_prompt_are_made_for_their_reader_alone_and_once(monkeypatch):
    """A step may score thousands of positions, on the thread that hands out everybody's tokens."""
    follower, made = by_hand(), []
    monkeypatch.setattr("gapless.engine.open_request.entry", lambda *line: made.append(line) or {line[2]: None})
    follower.say(keys=(), scored=[1])
    follower.say(keys=[1], scored=[2])
    assert not made
    assert follower.stream.prompt_logprobs == [None, {4: None}, {5: None}]
    assert follower.stream.prompt_logprobs == [None, {4: None}, {5: None}]
    assert [row for _, row, *_ in made] == [0, 0]


def test_a_position_out_of_turn_is_our_fault():
    follower = by_hand()
    with pytest.raises(AssertionError, match="out of turn"):
        follower.say(keys=(), scored=[2])


OPTIONS = {"speculative_config": SPECULATIVE}, {"block_size": 16}, {"max_num_batched_tokens": 64}, {"kernels": "torch"}


@pytest.mark.seeds
@pytest.mark.parametrize("depth", ["1", "4"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_prompt_of_the_whole_context_is_scored_beside_others(qwen3, monkeypatch, depth, options):
    """The token after it, which nobody gets, has a place of its own in the row, and needs no page."""
    model, directory = qwen3
    if options == {"kernels": "torch"}:
        monkeypatch.setattr("gapless.engine.share.choose", lambda *_: plain.KERNELS)
        options = {}
    small = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "max_model_len": 64, "block_size": 4}
    config = EngineConfig(model=str(directory), device="cpu", depth=depth, **{**small, **options})
    scored = ask(prompt_logprobs=2, max_tokens=1)
    work = [
        (ids(64, 1), scored, True), (ids(7, 2), ask(logprobs=1), False), (ids(64, 3), scored, True),
        (ids(1, 4) * 64, scored, True), (ids(63, 5), scored, False), (ids(9, 6), ask(logprobs=0, max_tokens=55), False),
    ]  # fmt: skip

    async def run():
        async with AsyncLLM(ThreadBackend(lambda: build_core(config)), FRONT) as llm:
            streams = [await llm.open(prompt, params, prompt_only=alone) for prompt, params, alone in work]
            for stream in streams:
                while not stream.finished:
                    await stream.next()
            return [stream.snapshot() for stream in streams]

    for output, (_, params, _) in zip(asyncio.run(run()), work, strict=True):
        check(model, output, params)
