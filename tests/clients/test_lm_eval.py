"""lm-eval's `local-completions`: what it asked is asked again, and its numbers must come out, by its own rules.
Log-likelihoods are held against transformers on the same weights, answers against the rules of `gapless eval`."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import transformers

from gapless.demo import weights_dir
from gapless.lab.eval_questions import Question, completion_prompt, find, is_right
from gapless.lab.eval_report import RightShare

pytestmark = pytest.mark.net
RECORDING = json.loads((Path(__file__).with_name("recorded") / "lm-eval.json").read_text(encoding="utf-8"))
EXCHANGES, SAMPLES, RESULTS = (RECORDING[name] for name in ("exchanges", "samples", "results"))
SCORING = [exchange for exchange in EXCHANGES if (exchange["body"] or {}).get("echo")]
GENERATING = [exchange for exchange in EXCHANGES if "stop" in (exchange["body"] or {})]
FILTERS = {"strict-match": "strict", "flexible-extract": "flexible"}
CLOSE = {"abs": 5e-3, "rel": 1e-4}
"""Of a sum of log-probabilities: another machine may add up in another order."""


def ask(demo, exchange):
    method, path, headers = (exchange[name] for name in ("method", "path", "headers"))
    response = demo.request(method, path, headers=headers, json=exchange["body"] or None)
    assert response.status_code == exchange["status"] == 200, response.text
    return response.json()


class Scored(NamedTuple):
    """A continuation: `tokens` from `context` on."""

    tokens: tuple[int, ...]
    context: int
    score: float
    greedy: bool | None
    """Whether it is what greedy decoding gives; None where lm-eval did not keep that."""


@pytest.fixture(scope="module")
def tokens(demo):
    """Every text that lm-eval had made into tokens, with its tokens."""
    asked = [exchange for exchange in EXCHANGES if exchange["path"] == "/tokenize"]
    return {exchange["body"]["prompt"]: ask(demo, exchange)["tokens"] for exchange in asked}


@pytest.fixture(scope="module")
def reported(tokens):
    """What lm-eval told of every choice, and of every text as a whole."""
    found = []
    for sample in SAMPLES["gapless_choices"]:
        context = sample["doc"]["context"]
        for choice, [[score, greedy]] in zip(sample["doc"]["choices"], sample["resps"], strict=True):
            whole = tuple(tokens[f"{context} {choice}"])
            found.append(Scored(whole, len(tokens[context]), float(score), greedy == "True"))
    (start,) = tokens["<|im_end|>"]
    for sample in SAMPLES["gapless_texts"]:
        [[score]] = sample["resps"]
        found.append(Scored((start, *tokens[sample["doc"]["text"]]), 1, float(score), None))
    assert len(found) == 10
    return found


def test_the_harness_gets_the_scores_that_it_has_reported(demo, reported):
    """The sum over the continuation, and whether its tokens are the likeliest. The last entry is of the token that the
    server had to generate."""
    known = {one.tokens: one for one in reported}
    for exchange in SCORING:
        choices = ask(demo, exchange)["choices"]
        for prompt, choice in zip(exchange["body"]["prompt"], choices, strict=True):
            one, scores = known.pop(tuple(prompt)), choice["logprobs"]
            assert len(scores["tokens"]) == len(prompt) + 1
            own, tops = (scores[name][one.context : -1] for name in ("token_logprobs", "top_logprobs"))
            assert sum(own) == pytest.approx(one.score, **CLOSE)
            greedy = all(score == max(top.values()) for score, top in zip(own, tops, strict=True))
            assert one.greedy in (None, greedy)
    assert not known


def test_the_scores_are_those_of_transformers(reported):
    model = transformers.AutoModelForCausalLM.from_pretrained(weights_dir(), dtype=torch.float32).eval()
    for one in reported:
        with torch.no_grad():
            scores = model(torch.tensor([one.tokens])).logits[0].log_softmax(-1)[one.context - 1 : -1]
        wanted = torch.tensor(one.tokens[one.context :])
        assert scores.gather(1, wanted[:, None]).sum().item() == pytest.approx(one.score, **CLOSE)
        assert one.greedy in (None, bool((scores.argmax(-1) == wanted).all()))


def test_answers_and_marks_are_those_of_gapless_eval(demo):
    """The prompts, what either rule finds, who is right, and the standard error."""
    texts = {}
    for exchange in GENERATING:
        for prompt, choice in zip(exchange["body"]["prompt"], ask(demo, exchange)["choices"], strict=True):
            texts[tuple(prompt)] = choice["text"]
    asked = {e["body"]["prompt"]: tuple(ask(demo, e)["tokens"]) for e in EXCHANGES if e["path"] == "/tokenize"}
    right = dict.fromkeys(FILTERS, 0)
    for sample in SAMPLES["gapless_worked"]:
        [[text]], [extracted], name = sample["resps"], sample["filtered_resps"], sample["filter"]
        worked = sample["doc"]["answer"]
        question = Question("", "", sample["doc"]["question"], worked.rpartition("#### ")[2], worked)
        assert texts[asked[completion_prompt(question, ())]] == text
        found = find(question, text)[FILTERS[name]]
        assert (found or "[invalid]") == extracted
        assert is_right(found, question.gold) == bool(sample["metrics"]["exact_match"])
        right[name] += is_right(found, question.gold)
    for name, count in right.items():
        share = RightShare(count, len(SAMPLES["gapless_worked"]) // 2)
        assert RESULTS["gapless_worked"][f"exact_match,{name}"] == pytest.approx(share.accuracy)
        assert RESULTS["gapless_worked"][f"exact_match_stderr,{name}"] == pytest.approx(share.stderr)
