"""Prompts that are made up: exact lengths, shared beginnings, shares of a Zipf distribution."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace

import pytest

from gapless.base.errors import ConfigError
from gapless.lab.datasets import (
    Lengths,
    Source,
    Workload,
    build,
    custom_prompts,
    multi_turn_prompts,
    prefix_prompts,
    random_prompts,
    sharegpt_prompts,
    trace_prompts,
    zipf_draws,
)
from gapless.lab.workload import WARM_UP_SEED, warm_up_prompts

IDS = Source(range(100, 5000))


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


def test_prefix_repetition_uses_every_prefix_equally():
    lengths = {"prefix_len": 10, "input_len": 5, "output_len": 3}
    made = prefix_prompts(IDS, Workload("shared_prefix", 30, seed=2, prefixes=4, zipf=0.0, **lengths))
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
    lengths = {"prefix_len": 4, "input_len": 2, "output_len": 1}
    made = prefix_prompts(IDS, Workload("shared_prefix", 60, prefixes=3, zipf=3.0, **lengths))
    assert Counter(p.content[:4] for p in made).most_common(1)[0][1] > 40


def test_words_make_texts_of_the_length_that_their_tokens_give():
    made = random_prompts(Source(["one", "two"], 2.0), 3, Lengths(20), Lengths(1))
    assert [len(p.content.split()) for p in made] == [10, 10, 10]


def test_turns_follow_each_other():
    work = Workload("multi_turn", 7, turns=3, input_len=4, output_len=2, pause=1.0)
    made = multi_turn_prompts(Source(["x"]), work)
    assert [p.follows for p in made] == [-1, 0, 1, -1, 3, 4, -1]
    assert [p.input_len for p in made] == [4, 0, 0, 4, 0, 0, 4] and made[1].pause == 1.0


def test_warm_up_shares_nothing_with_what_is_measured():
    made = build(Workload(num_prompts=20, input_len=12, output_len=3, seed=WARM_UP_SEED + 1), IDS)
    warm = warm_up_prompts(made, IDS, 5)
    assert {len(p.content) for p in warm} == {12} and {p.output_len for p in warm} == {3}
    assert not {p.content[:4] for p in warm} & {p.content[:4] for p in made}


def lines(path, *values):
    path.write_text("\n".join(v if isinstance(v, str) else json.dumps(v) for v in values) + "\n")
    return path


def work(dataset, path, **fields):
    """Takes each line once, in order, unless `fields` say otherwise."""
    return Workload(dataset, path=str(path), **{"num_prompts": 0, "shuffle": False, "output_len": 9, **fields})


def test_a_custom_file_gives_its_prompts(tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    path = lines(
        tmp_path / "x.jsonl", {"prompt": "a", "output_tokens": 3}, "", {"prompt": [1, 2]}, {"messages": messages}
    )
    made = custom_prompts(work("custom", path))
    assert [(p.content, p.input_len, p.output_len) for p in made] == [
        ("a", 0, 3),
        ((1, 2), 2, 9),
        (tuple(messages), 0, 9),
    ]
    again = custom_prompts(work("custom", path, num_prompts=8, seed=1, shuffle=True))
    assert [p.place for p in again] == list(range(8)) and len({str(p.content) for p in again}) == 3
    other = custom_prompts(work("custom", path, num_prompts=8, seed=3, shuffle=True))
    assert [p.content for p in again] != [p.content for p in other]


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
        custom_prompts(work("custom", path))
    assert f"{path}:2" in str(caught.value)


def test_files_that_are_none(tmp_path):
    with pytest.raises(ConfigError, match="cannot read dataset-path"):
        custom_prompts(work("custom", tmp_path / "none"))
    with pytest.raises(ConfigError, match="holds no line"):
        custom_prompts(work("custom", lines(tmp_path / "x", "")))
    (tmp_path / "y").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        custom_prompts(work("custom", tmp_path / "y"))
    with pytest.raises(ConfigError, match="output_tokens"):
        custom_prompts(work("custom", lines(tmp_path / "z", {"prompt": "a"}), output_len=0))


def talk(*texts):
    return {"conversations": [{"from": "human", "value": text} for text in texts]}


@pytest.mark.parametrize("as_list", [True, False])
def test_a_sharegpt_file_gives_its_first_turns(tmp_path, as_list):
    entries = [talk("why", "x" * 40), talk("alone"), talk("how", "y")]
    path = tmp_path / "s.json"
    path.write_text(json.dumps(entries)) if as_list else lines(path, *entries)
    made = sharegpt_prompts(work("sharegpt", path, output_len=0))
    assert [(p.content, p.output_len) for p in made] == [("why", 10), ("how", 1)]
    assert {p.output_len for p in sharegpt_prompts(work("sharegpt", path, output_len=77))} == {77}


def test_a_line_ends_where_json_lines_end(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "one\u2028line\x85"}\r\n\n{"prompt": "another"}\n', encoding="utf-8", newline="")
    assert [p.content for p in custom_prompts(work("custom", path, num_prompts=2))] == ["one\u2028line\x85", "another"]


@pytest.mark.parametrize(
    "text, message",
    [
        ("[1]", "entry 0 must be"),
        ("[{]", "not JSON"),
        ("[]", "no conversation"),
        ('[{"conversations": 5}]', "entry 0: conversations must be a list"),
        (json.dumps([talk("a", 3)]), "entry 0: a turn must look like"),
    ],
)
def test_a_broken_sharegpt_file_is_refused(tmp_path, text, message):
    path = tmp_path / "s.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        sharegpt_prompts(work("sharegpt", path, output_len=0))


TRACE = [
    {"timestamp": 4000, "input_length": 11, "output_length": 2, "hash_ids": [7, 8, 9]},
    {"timestamp": 1000, "input_length": 10, "output_length": 5, "hash_ids": [7, 8, 3]},
    {"timestamp": 1500, "input_length": 6, "output_length": 1},
]


def test_traces_share_what_their_hashes_share(tmp_path):
    path = lines(tmp_path / "t.jsonl", *TRACE)
    known = work("timed_trace", path, num_prompts=9, block=4)
    made = trace_prompts(IDS, known)
    assert [(p.at, p.input_len, p.output_len) for p in made] == [(0.0, 10, 5), (0.5, 6, 1), (3.0, 11, 2)]
    assert all(len(p.content) == p.input_len for p in made)
    assert made[0].content[:8] == made[2].content[:8] and made[0].content[8:] != made[2].content[8:10]
    assert trace_prompts(IDS, known) == made != trace_prompts(IDS, replace(known, seed=1))
    assert [p.at for p in trace_prompts(IDS, replace(known, num_prompts=2, self_timed=False))] == [None, None]
    assert trace_prompts(IDS, replace(known, seconds_per_tick=1.0))[-1].at == 3000.0


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
        trace_prompts(IDS, work("timed_trace", path))
