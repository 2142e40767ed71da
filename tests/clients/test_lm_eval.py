"""lm-eval's `local-completions`, played back: what it sent to a server on the demo model, the answers it got, and what
it made of them. `record_lm_eval.py` records anew."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from server_harness import serving

from gapless.base.config import EngineConfig
from gapless.engine.core import build_core
from gapless.engine.frontdoor import open_front
from gapless.server.config import ServerConfig

HEAD, *EXCHANGES = map(json.loads, Path(__file__).with_name("lm_eval.jsonl").read_text().splitlines())
SCORING = [exchange for exchange in EXCHANGES if (exchange["sent"] or {}).get("echo")]
CLOSE = {"abs": 2e-3, "rel": 1e-4}
"""Another machine may add up in another order."""


@pytest.fixture(scope="module")
def client():
    config = EngineConfig(model="demo", device="cpu", max_model_len=2048, max_num_seqs=4)
    named = ServerConfig(port=0, served_model_name=("demo",), disable_uvicorn_access_log=True)
    with serving(named, lambda: build_core(config), open_front(config)) as server, server.client() as client:
        yield client


def ask(client, exchange):
    response = client.request(exchange["method"], exchange["path"], json=exchange["sent"])
    assert response.status_code == exchange["status"] == 200, response.text
    return response.json()


def test_the_recording_holds_what_the_harness_needs():
    paths = {(exchange["method"], exchange["path"]) for exchange in EXCHANGES}
    assert paths == {("GET", "/tokenizer_info"), ("POST", "/tokenize"), ("POST", "/v1/completions")}
    assert SCORING and all(set(map(type, sent["prompt"])) == {list} for sent in (e["sent"] for e in SCORING))
    assert HEAD["results"]["gapless_choices"]["acc,none"] == 1.0
    assert HEAD["results"]["gapless_answers"]["exact_match,last"] == 1.0


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda exchange: exchange["path"])
def test_the_answers_are_those_that_were_recorded(client, exchange):
    answer, recorded = ask(client, exchange), exchange["answer"]
    if exchange["path"] != "/v1/completions":
        assert answer == recorded
        return
    assert answer["usage"] == recorded["usage"]
    for choice, old in zip(answer["choices"], recorded["choices"], strict=True):
        new_scores, old_scores = choice.pop("logprobs"), dict(old)["logprobs"]
        assert choice == {name: value for name, value in old.items() if name != "logprobs"}
        if old_scores is None:
            assert new_scores is None
            continue
        for name in ("tokens", "text_offset"):
            assert new_scores[name] == old_scores[name]
        assert new_scores["token_logprobs"] == [
            None,
            *(pytest.approx(x, **CLOSE) for x in old_scores["token_logprobs"][1:]),
        ]
        for new, was in zip(new_scores["top_logprobs"][1:], old_scores["top_logprobs"][1:], strict=True):
            assert max(new.values()) == pytest.approx(max(was.values()), **CLOSE)


def continuation(scores, context):
    """What lm-eval makes of one choice: the sum over the continuation, and whether greedy decoding would give it. The
    last entry is of the token that the server had to generate."""
    own, tops = scores["token_logprobs"][context:-1], scores["top_logprobs"][context:-1]
    return sum(own), all(one == max(top.values()) for one, top in zip(own, tops, strict=True))


def test_the_harness_gets_its_scores_and_the_right_choice_wins(client):
    """The same sums as lm-eval has reported, from fresh answers, by the rule of its source."""
    reported = {}
    for sample in HEAD["samples"]["gapless_choices"]:
        for choice, [[score, greedy]] in zip(sample["doc"]["choices"], sample["resps"], strict=True):
            reported[sample["doc"]["context"] + " " + choice] = (float(score), greedy == "True")
    lengths = {e["sent"]["prompt"]: e["answer"]["count"] for e in EXCHANGES if e["path"] == "/tokenize"}
    contexts = {sample["doc"]["context"] for sample in HEAD["samples"]["gapless_choices"]}
    found = {}
    for exchange in SCORING:
        for prompt, choice in zip(exchange["sent"]["prompt"], ask(client, exchange)["choices"], strict=True):
            (text,) = [text for text in reported if choice["text"].startswith(text)]
            (context,) = [lengths[context] for context in contexts if text.startswith(context)]
            assert len(choice["logprobs"]["tokens"]) == len(prompt) + 1
            found[text] = continuation(choice["logprobs"], context)
    assert set(found) == set(reported)
    for text, (score, greedy) in reported.items():
        assert found[text] == (pytest.approx(score, abs=0.02), greedy), text
    assert sum(greedy for _, greedy in found.values()) == 3
