"""Prompts that are made up: exact lengths, shared beginnings, shares of a Zipf distribution."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from gapless.base.errors import ConfigError
from gapless.lab.dataset_files import Sampling, custom_prompts, sharegpt_prompts, trace_prompts
from gapless.lab.datasets import (
    IdSource,
    Lengths,
    LogUniform,
    WordSource,
    multi_turn_prompts,
    prefix_prompts,
    random_prompts,
    zipf_draws,
)
from gapless.lab.workload import WARM_UP_SEED, Workload, build, warm_up_prompts

IDS = IdSource(range(100, 5000))


def test_random_prompts_have_their_lengths_and_nothing_in_common():
    made = random_prompts(IDS, 50, Lengths(40, 0.5), Lengths(10, 0.2), prefix_len=7, seed=4)
    assert all(len(p.content) == p.input_len and p.content[:7] == made[0].content[:7] for p in made)
    inputs, outputs = {p.input_len - 7 for p in made}, {p.output_len for p in made}
    assert 20 <= min(inputs) < 30 < 50 < max(inputs) <= 60 and outputs == set(range(8, 13))
    assert len({p.content[7:15] for p in made}) == 50
    assert [p.place for p in made] == list(range(50))
    assert all(100 <= unit < 5000 for p in made for unit in p.content)


def test_a_seed_fixes_the_prompts():
    def make(seed):
        return random_prompts(IDS, 5, Lengths(8), Lengths(8), seed=seed)

    assert make(1) == make(1) != make(2)
    assert random_prompts(IDS, 1, Lengths(4), Lengths(1))[0].content == PINNED


PINNED = (130, 1918, 2191, 1766)


def test_lengths_stay_above_zero():
    rng = random.Random(0)
    assert {Lengths(1, 0.9).draw(rng) for _ in range(50)} == {1, 2}
    assert {Lengths(5).draw(rng) for _ in range(50)} == {5}


def test_log_uniform_lengths_reach_both_ends_and_halve_at_the_geometric_mean():
    rng = random.Random(0)
    drawn = [LogUniform(10, 1000).draw(rng) for _ in range(4000)]
    assert (min(drawn), max(drawn)) == (10, 1000)
    assert 0.47 < sum(length < 100 for length in drawn) / len(drawn) < 0.53
    assert {LogUniform(5, 5).draw(rng) for _ in range(5)} == {5}


def test_prefix_repetition_uses_every_prefix_equally():
    made = prefix_prompts(IDS, 30, prefixes=4, prefix_len=10, suffix_len=5, output_len=3, seed=2)
    groups = Counter(p.content[:10] for p in made)
    assert sorted(groups.values()) == [7, 7, 8, 8]
    assert {len(p.content) for p in made} == {15} == {p.input_len for p in made}
    assert len({p.content[10:] for p in made}) == 30
    order = [p.content[:10] for p in made]
    assert order != sorted(order)


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
def test_shared_prefixes_are_drawn_by_zipf(exponent):
    groups, count = 10, 20_000
    drawn = Counter(zipf_draws(random.Random(1), groups, exponent, count))
    weights = [1 / (k + 1) ** exponent for k in range(groups)]
    for k, weight in enumerate(weights):
        share = weight / sum(weights)
        assert abs(drawn[k] / count - share) < 5 * (share * (1 - share) / count) ** 0.5
    made = prefix_prompts(IDS, 60, prefixes=3, prefix_len=4, suffix_len=2, output_len=1, zipf=3.0)
    assert Counter(p.content[:4] for p in made).most_common(1)[0][1] > 40


def test_words_make_texts_of_the_length_that_their_tokens_give():
    made = random_prompts(WordSource(["one", "two"], 2.0), 3, Lengths(20), Lengths(1))
    assert [len(p.content.split()) for p in made] == [10, 10, 10]


def test_turns_follow_each_other():
    made = multi_turn_prompts(WordSource(["x"]), 7, 3, Lengths(4), Lengths(2), pause=1.0)
    assert [p.follows for p in made] == [-1, 0, 1, -1, 3, 4, -1]
    assert [p.input_len for p in made] == [4, 0, 0, 4, 0, 0, 4] and made[1].pause == 1.0
    with pytest.raises(ConfigError):
        multi_turn_prompts(WordSource(["x"]), 7, 0, Lengths(4), Lengths(2))


def test_warm_up_shares_nothing_with_what_is_measured():
    made = build(Workload(num_prompts=20, input_len=12, output_len=3, seed=WARM_UP_SEED + 1), IDS)
    warm = warm_up_prompts(made, IDS, 5)
    assert {len(p.content) for p in warm} == {12} and {p.output_len for p in warm} == {3}
    assert not {p.content[:4] for p in warm} & {p.content[:4] for p in made}


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"dataset": "sonnet"}, "dataset-name must be one of random"),
        ({"dataset": "custom"}, "--dataset-path"),
        ({"path": "x"}, "made up"),
        ({"num_prompts": 0}, "num-prompts must be at least 1"),
        ({"range_ratio": 1.0}, "range-ratio"),
        ({"zipf": -1.0}, "zipf"),
    ],
)
def test_workloads_that_cannot_be(fields, message):
    with pytest.raises(ConfigError, match=message):
        Workload(**fields)


def lines(path, *values):
    path.write_text("\n".join(v if isinstance(v, str) else json.dumps(v) for v in values) + "\n")
    return path


IN_ORDER = Sampling(0, shuffle=False)


def test_custom_files(tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    path = lines(
        tmp_path / "x.jsonl", {"prompt": "a", "output_tokens": 3}, "", {"prompt": [1, 2]}, {"messages": messages}
    )
    made = custom_prompts(path, 9, IN_ORDER)
    assert [(p.content, p.input_len, p.output_len) for p in made] == [
        ("a", 0, 3),
        ((1, 2), 2, 9),
        (tuple(messages), 0, 9),
    ]
    again = custom_prompts(path, 9, Sampling(8, seed=1))
    assert [p.place for p in again] == list(range(8)) and len({str(p.content) for p in again}) == 3
    assert [p.content for p in again] != [p.content for p in custom_prompts(path, 9, Sampling(8, seed=3))]


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "not JSON"),
        ("[]", "expected an object"),
        ({"text": "a"}, 'expected {"prompt"'),
        ({"prompt": ""}, "prompt must be text"),
        ({"prompt": [1, -1]}, "prompt must be text or a list of token ids"),
        ({"prompt": [True]}, "prompt must be"),
        ({"messages": [{"role": "user"}]}, "messages must be"),
        ({"prompt": "a", "output_tokens": 0}, "output_tokens must be a whole number of at least 1"),
        ({"prompt": "a", "max_tokens": "7"}, "output_tokens must be"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = lines(tmp_path / "x.jsonl", {"prompt": "a"}, line)
    with pytest.raises(ConfigError, match=message) as caught:
        custom_prompts(path, 9, IN_ORDER)
    assert f"{path}:2" in str(caught.value)


def test_files_that_are_none(tmp_path):
    with pytest.raises(ConfigError, match="cannot read dataset-path"):
        custom_prompts(tmp_path / "none", 9, IN_ORDER)
    with pytest.raises(ConfigError, match="holds no line"):
        custom_prompts(lines(tmp_path / "x", ""), 9, IN_ORDER)
    (tmp_path / "y").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        custom_prompts(tmp_path / "y", 9, IN_ORDER)
    with pytest.raises(ConfigError, match="output_tokens"):
        custom_prompts(lines(tmp_path / "z", {"prompt": "a"}), -1, IN_ORDER)


def talk(*texts):
    return {"conversations": [{"from": "human", "value": text} for text in texts]}


@pytest.mark.parametrize("as_list", [True, False])
def test_sharegpt_files(tmp_path, as_list):
    entries = [talk("why", "x" * 40), talk("alone"), talk("how", "y")]
    path = tmp_path / "s.json"
    path.write_text(json.dumps(entries)) if as_list else lines(path, *entries)
    made = sharegpt_prompts(path, 0, IN_ORDER)
    assert [(p.content, p.output_len) for p in made] == [("why", 10), ("how", 1)]
    assert {p.output_len for p in sharegpt_prompts(path, 77, IN_ORDER)} == {77}


def test_a_line_ends_where_json_lines_end(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "one\u2028line\x85"}\r\n\n{"prompt": "another"}\n', encoding="utf-8", newline="")
    assert [p.content for p in custom_prompts(path, 1, Sampling(2, shuffle=False))] == ["one\u2028line\x85", "another"]


def test_sharegpt_faults(tmp_path):
    path = tmp_path / "s.json"
    for text, message in (("[1]", "entry 0 must be"), ("[{]", "not JSON"), ("[]", "no conversation")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            sharegpt_prompts(path, 0, IN_ORDER)
    path.write_text(json.dumps([{"conversations": 5}]))
    with pytest.raises(ConfigError, match="entry 0: conversations must be a list"):
        sharegpt_prompts(path, 0, IN_ORDER)
    path.write_text(json.dumps([talk("a", 3)]))
    with pytest.raises(ConfigError, match="entry 0: a turn must look like"):
        sharegpt_prompts(path, 0, IN_ORDER)


TRACE = [
    {"timestamp": 4000, "input_length": 11, "output_length": 2, "hash_ids": [7, 8, 9]},
    {"timestamp": 1000, "input_length": 10, "output_length": 5, "hash_ids": [7, 8, 3]},
    {"timestamp": 1500, "input_length": 6, "output_length": 1},
]


def test_traces_share_what_their_hashes_share(tmp_path):
    path = lines(tmp_path / "t.jsonl", *TRACE)
    made = trace_prompts(path, IDS, 9, block=4)
    assert [(p.at, p.input_len, p.output_len) for p in made] == [(0.0, 10, 5), (0.5, 6, 1), (3.0, 11, 2)]
    assert all(len(p.content) == p.input_len for p in made)
    assert made[0].content[:8] == made[2].content[:8] and made[0].content[8:] != made[2].content[8:10]
    assert trace_prompts(path, IDS, 9, block=4) == made != trace_prompts(path, IDS, 9, block=4, seed=1)
    assert [p.at for p in trace_prompts(path, IDS, 2, timed=False)] == [None, None]
    assert trace_prompts(path, IDS, 9, scale=1.0)[-1].at == 3000.0


@pytest.mark.parametrize(
    "change, message",
    [
        ({"timestamp": -1}, "timestamp must be a number"),
        ({"timestamp": None}, "timestamp must be a number"),
        ({"input_length": 0}, "input_length must be a whole number"),
        ({"output_length": 1.5}, "output_length must be a whole number"),
        ({"hash_ids": 5}, "hash_ids must be a list"),
        ({"hash_ids": [1, "x"]}, "hash_ids must be a list"),
    ],
)
def test_trace_faults_name_the_line(tmp_path, change, message):
    path = lines(tmp_path / "t.jsonl", TRACE[0], TRACE[1] | change)
    with pytest.raises(ConfigError, match=f":2: {message}"):
        trace_prompts(path, IDS, 9)
