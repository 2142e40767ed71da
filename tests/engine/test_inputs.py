"""Admission: each refusal names its field, and what is admitted is resolved."""

from typing import Any

import numpy as np
import pytest
from fronts import EOS, FRONT, TOKENIZER, core
from hypothesis import given
from hypothesis import strategies as st

from gapless.base.errors import RequestError
from gapless.base.params import MAX_STOP_IDS, SamplingParams
from gapless.engine.inputs import Resolver, check_request_id, child_seed, mix

INFO = core(max_model_len=32).info


def resolver(seed: int = 7, **changes: Any) -> Resolver:
    return Resolver(FRONT, INFO._replace(**changes), seed)


@pytest.mark.parametrize(
    "prompt",
    ["hello a", TOKENIZER.encode("hello a"), {"prompt": "hello a"}, np.array(TOKENIZER.encode("hello a"))],
    ids=["text", "ids", "object", "array"],
)
def test_every_form_of_prompt_gives_the_same_tokens(prompt):
    (request,) = resolver().resolve(prompt, SamplingParams()).requests
    assert request.tokens.tolist() == TOKENIZER.encode("hello a")
    assert request.tokens.dtype == np.int32


def test_ids_win_over_the_text_beside_them():
    resolved = resolver().resolve({"prompt": "hello", "prompt_token_ids": [1, 2]}, SamplingParams())
    assert (resolved.prompt, resolved.tokens.tolist()) == ("hello", [1, 2])


@pytest.mark.parametrize(
    "prompt",
    [
        *("", [], {"prompt_token_ids": []}, {}, {"prompt": 3}, [1.5], [True], ["a"], [-1], [10**30], None, 3, "\ud800"),
        *([INFO.vocab_size], np.zeros((2, 2), np.int32)),
    ],
)
def test_a_bad_prompt_is_refused(prompt):
    with pytest.raises(RequestError) as caught:
        resolver().resolve(prompt, SamplingParams())
    assert caught.value.param == "prompt"
    assert len(str(caught.value)) < 200


def test_the_last_token_of_the_vocabulary_is_taken():
    (request,) = resolver().resolve([INFO.vocab_size - 1], SamplingParams()).requests
    assert request.tokens.tolist() == [INFO.vocab_size - 1]


@pytest.mark.parametrize("prompt_len", [1, 30, 31, 32, 33])
@pytest.mark.parametrize("max_tokens", [None, 1, 2, 31, 32])
def test_a_request_ends_at_the_context_limit(prompt_len, max_tokens):
    params = SamplingParams(max_tokens=max_tokens)
    if prompt_len + (max_tokens or 1) <= 32:
        (request,) = resolver().resolve([1] * prompt_len, params).requests
        assert request.max_len == (32 if max_tokens is None else prompt_len + max_tokens)
        return
    with pytest.raises(RequestError, match="This model's maximum context length is 32 tokens") as caught:
        resolver().resolve([1] * prompt_len, params)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("prompt_len", [1, 31, 32, 33, 34])
def test_a_prompt_that_is_only_scored_may_fill_the_context(prompt_len):
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    if prompt_len <= 32:
        (request,) = resolver().resolve([1] * prompt_len, params, prompt_only=True).requests
        assert request.max_len == prompt_len + 1
        return
    with pytest.raises(RequestError, match=rf"is 32 tokens. However, your prompt has {prompt_len} tokens\. "):
        resolver().resolve([1] * prompt_len, params, prompt_only=True)


def test_min_tokens_must_fit_too():
    with pytest.raises(RequestError, match="at least 30 in the completion"):
        resolver().resolve([1] * 3, SamplingParams(max_tokens=None, min_tokens=30))
    (request,) = resolver().resolve([1] * 3, SamplingParams(max_tokens=None, min_tokens=29)).requests
    assert request.min_len == 32


def test_a_far_too_long_text_is_refused_without_tokenising(monkeypatch):
    one = resolver()
    monkeypatch.setattr(TOKENIZER, "encode", lambda *_: pytest.fail("tokenised"))
    with pytest.raises(RequestError, match="maximum context length"):
        one.resolve("a" * (32 * TOKENIZER.max_token_bytes + 1), SamplingParams())


def test_stop_ids_hold_the_end_of_sequence_unless_it_is_ignored():
    def ids(**params):
        return resolver().resolve([1], SamplingParams(**params)).requests[0].stop_ids

    assert ids() == (EOS,)
    assert ids(stop_token_ids=[5, 5, EOS]) == (5, EOS)
    assert ids(stop_token_ids=[5], ignore_eos=True) == (5,)
    assert ids(stop_token_ids=list(range(MAX_STOP_IDS)), ignore_eos=True) == tuple(range(MAX_STOP_IDS))
    for bad in ({"stop_token_ids": list(range(MAX_STOP_IDS))}, {"stop_token_ids": [INFO.vocab_size]}):
        with pytest.raises(RequestError) as caught:
            ids(**bad)
        assert caught.value.param == "stop_token_ids"


def test_keys_are_never_used_twice():
    one = resolver()
    keys = [r.key for _ in range(20) for r in one.resolve([1], SamplingParams(n=3)).requests]
    assert len(set(keys)) == 60 and min(keys) > 0


def test_the_seeds_of_sequences_differ_and_repeat():
    def seeds(seed: int | None, n: int = 1, engine: int = 7, calls: int = 1):
        one = resolver(engine)
        params = SamplingParams(seed=seed, n=n)
        return [r.seed for _ in range(calls) for r in one.resolve([1], params).requests]

    assert seeds(5) == seeds(5, engine=8) == seeds(5, n=3)[:1] == [5]
    assert len(set(seeds(5, n=64))) == 64
    assert seeds(None, calls=3) == seeds(None, calls=3)
    assert len(set(seeds(None, n=4, calls=4) + seeds(None, engine=8))) == 17
    assert all(0 <= seed < 2**63 for seed in seeds(-1, n=8) + seeds(None, n=8))


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
def test_mixed_seeds_are_63_bits_and_differ(seed, number):
    assert 0 <= mix(seed, number) < 2**63
    assert mix(seed, number) != mix(seed, number + 1)
    assert child_seed(seed, 0) == seed


@pytest.mark.parametrize("name", ["", "a" * 129, "a\nb", "\x00", 3, None])
def test_a_request_id_is_short_and_printable(name):
    with pytest.raises(RequestError):
        check_request_id(name)
    check_request_id("a" * 128)


def test_stop_strings_need_text():
    with pytest.raises(RequestError, match="detokenize") as caught:
        resolver().resolve([1], SamplingParams(stop="x", detokenize=False))
    assert caught.value.param == "stop"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"priority": "a"}, "priority"),
        ({"priority": 2**31}, "priority"),
        ({"priority": True}, "priority"),
        ({"salt": 5}, "salt"),
        ({"params": {"max_tokens": 4}}, "sampling_params"),
    ],
)
def test_an_option_of_the_wrong_type_is_refused_by_name(options, param):
    with pytest.raises(RequestError) as caught:
        resolver().resolve("hello", **{"params": SamplingParams(), **options})
    assert caught.value.param == param


def bad_words(*words: str, vocab: int = INFO.vocab_size) -> tuple[tuple[int, ...], ...]:
    (request,) = resolver(vocab_size=vocab).resolve([1], SamplingParams(bad_words=words)).requests
    return request.bad_words


def test_bad_words_become_tokens_alone_and_after_a_space():
    encode = TOKENIZER.encode
    assert bad_words("hello", "a") == bad_words("  hello", "a")
    assert bad_words("a") == (tuple(encode("a", False)), tuple(encode(" a", False))), "as many tokens after a space"
    assert bad_words("hello") == (tuple(encode("hello", False)),), "more tokens after a space, as vLLM has it"
    assert bad_words("hello", vocab=max(encode("hello", False))) == (), "the model has no logits for it"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bad_words", ["hello " * 60] * 100), ("bad_words", ["\ud800"]),
        ("logit_bias", {INFO.vocab_size: 1}), ("allowed_token_ids", [1, INFO.vocab_size]),
        ("allowed_token_ids", [EOS]),
    ],
)  # fmt: skip
def test_an_adjustment_that_cannot_be_is_refused_by_name(name, value):
    with pytest.raises(RequestError) as caught:
        resolver().resolve([1], SamplingParams(min_tokens=1, **{name: value}))
    assert caught.value.param == name


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("most", [1, 5, 31, 32, -1])
def test_a_prompt_is_cut_as_by_slicing(most, side):
    ids = [1 + number % 9 for number in range(70)]
    params = SamplingParams(max_tokens=8, truncate_prompt_tokens=most, truncation_side=side)
    kept = 24 if most == -1 else most
    if kept + 8 > 32:
        with pytest.raises(RequestError, match="maximum context length is 32"):
            resolver().resolve(ids, params)
        params = params.replace(max_tokens=None)
        if kept == 32:
            return
    resolved = resolver().resolve(ids, params)
    assert resolved.tokens.tolist() == (ids[:kept] if side == "right" else ids[-kept:])
    if kept >= 3:
        assert resolver().resolve(ids[:3], params).tokens.tolist() == ids[:3]


def test_the_longest_prompt_leaves_room_for_the_output():
    def kept(**params: Any) -> int:
        return len(resolver().resolve([1] * 99, SamplingParams(truncate_prompt_tokens=-1, **params)).tokens)

    own = FRONT._replace(defaults={"max_tokens": 40})
    cut = SamplingParams(max_tokens=40, truncate_prompt_tokens=-1)
    assert len(Resolver(own, INFO, 7).resolve([1] * 99, cut).tokens) == 31, "the model's own limit is no wish"
    assert kept(max_tokens=None) == 31 and kept(max_tokens=None, min_tokens=5) == 27 and kept(max_tokens=16) == 16
    scored = resolver().resolve([1] * 99, SamplingParams(max_tokens=1, truncate_prompt_tokens=-1), prompt_only=True)
    assert len(scored.tokens) == 32


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("truncate_prompt_tokens", value) for value in (0, -2, 1.5, True, 2**31, 33)),
        *(("truncation_side", value) for value in ("", "both", 1)),
    ],
)
def test_a_cut_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(RequestError, match=field) as caught:
        resolver().resolve([1], SamplingParams(**{field: value}))  # type: ignore[arg-type]
    assert caught.value.param == field


def test_a_budget_outside_of_chats_is_refused_by_name():
    with pytest.raises(RequestError, match="needs a chat") as caught:
        resolver().resolve([1], SamplingParams(thinking_token_budget=5))
    assert caught.value.param == "thinking_token_budget"
