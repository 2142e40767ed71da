"""Log-probabilities of /v1/responses are those of the tokens of its text, however a reply comes and is read."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
from server_harness import backend
from sharpest import sharpest
from tokenizers import AddedToken

from gapless.base.params import SamplingParams
from gapless.engine.outputs import Delta, Logprob
from gapless.server.dialects.responses.scores import ReplyScores
from gapless.server.logprobs import ChatWriter
from gapless.text.incremental import Detokenizer
from gapless.text.items import ItemKind, Items
from gapless.text.replies import ReplyForms, ReplyReader
from gapless.text.reply_parser import Content
from gapless.text.tokenizer import Tokenizer

PIECES = (
    "<think>", "</think>", "think", "ok", " ", "\n\n", "<", "<th", "</", "ä", "€", "t", '"', "{", "[", "</s>",
    '<tool_call>{"name": "f", "arguments": {"x": "ok"}}</tool_call>', '{"name": "f", "parameters": {}}',
    "<tool_call>\n", "</tool_call>", "<function=f>", "<parameter=x>\nok\n</parameter>", "</function>", '[f(x="ok")]',
)  # fmt: skip
READERS = [
    (tools, reasoning)
    for tools in ("none", "hermes", "qwen3_coder", "llama3_json", "pythonic")
    for reasoning in ("none", "think")
]


def made_tokenizer(*marks: str) -> Tokenizer:
    made = backend()
    made.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    return Tokenizer(made, special={"bos_token": "<s>", "eos_token": "</s>"})


TOKENIZERS = {"tokens": made_tokenizer("<think>", "</think>", "<tool_call>"), "texts": made_tokenizer()}


def deltas(tokenizer: Tokenizer, tokens: list[int], rng: random.Random | None, finish: str = "stop") -> list[Delta]:
    """A reply in one piece, or in random ones; the log-probability of its i-th token is -i."""
    detokenizer = Detokenizer(tokenizer)
    made, begin = [], 0
    for at in range(1, len(tokens) + 1):
        if at == len(tokens) or (rng is not None and rng.random() < 0.4):
            ids = tokens[begin:at]
            scores = [{token: Logprob(-float(begin + i), 1)} for i, token in enumerate(ids)]
            text = "".join(map(detokenizer.push, ids))
            made.append(Delta(0, text, ids, None, None, scores))
            begin = at
    made[-1] = made[-1]._replace(text=made[-1].text + detokenizer.finish(), finish_reason=finish)
    return made


def reader_of(tokenizer: Tokenizer, names: tuple[str, str]) -> ReplyReader | None:
    form = ReplyForms(tokenizer, *names).format(tools=names[0] != "none")
    return None if form is None else ReplyReader(form, {"f": {"type": "object"}}, "")


def shown(tokenizer: Tokenizer, names: tuple[str, str], came: list[Delta]) -> list[tuple[str, list[Any]]]:
    """The texts of a response to which these deltas come, with their log-probabilities."""
    reader, items = reader_of(tokenizer, names), Items()
    stream: Any = SimpleNamespace(prompt_token_ids=[])
    scores = ReplyScores(tokenizer, SamplingParams(logprobs=0), stream, reader)
    for delta in came:
        for tokens, text in scores.split(delta):
            said = reader.feed(tokens, text) if reader else [Content(text)] * bool(text)
            items.take(said, scores.of(said))
    rest = reader.finish() if reader else []
    items.take(rest, scores.of(rest, ended=True))
    return [(item.text, item.scores) for item in items if item.kind is ItemKind.TEXT]


@pytest.mark.parametrize("marks", TOKENIZERS)
@pytest.mark.parametrize(("tools", "reasoning"), sharpest(READERS[::-1], keep=3))
def test_scores_of_a_text_are_those_of_chat_for_its_tokens_however_it_comes(marks, tools, reasoning):
    tokenizer, names = TOKENIZERS[marks], (tools, reasoning)
    for seed in range(40):
        rng = random.Random(seed)
        tokens = [*tokenizer.encode("".join(rng.choices(PIECES, k=rng.randrange(1, 9)))), tokenizer.eos_token_id]
        whole = deltas(tokenizer, tokens, None)
        texts = shown(tokenizer, names, whole)
        assert shown(tokenizer, names, deltas(tokenizer, tokens, rng)) == texts, seed
        chat = ChatWriter(tokenizer, 0).write(tokens, whole[0].logprobs)["content"]
        found = [score for _, scores in texts for score in scores]
        places = [round(-score.logprob) for score in found]
        assert places == sorted(set(places)) and found == [chat[place] for place in places], seed
        for text, scores in texts:
            data = b"".join(bytes(score.bytes) for score in scores).decode()
            # A parser puts a line break of its own between two stretches of content.
            assert [*data.replace("\n", "")] == [*text.replace("\n", "")] and len(data) <= len(text), seed
        reader = reader_of(tokenizer, names)
        if reader is not None:
            plain = Items()
            plain.take(reader.feed(tokens, whole[0].text) + reader.finish())
            assert plain.texts(ItemKind.TEXT) == "".join(text for text, _ in texts), seed


def test_white_space_that_was_held_back_has_its_own_score():
    tokenizer = TOKENIZERS["tokens"]
    tokens = [*tokenizer.encode("ok "), tokenizer.eos_token_id]
    ((text, scores),) = shown(tokenizer, ("none", "think"), deltas(tokenizer, tokens, None))
    assert text == "ok " and [score.token for score in scores] == ["o", "k", " "]


def test_the_line_break_of_a_parser_has_no_score_of_a_mark():
    tokenizer = TOKENIZERS["tokens"]
    tokens = tokenizer.encode("a\n\n</think><b")
    ((text, scores),) = shown(tokenizer, ("none", "think"), deltas(tokenizer, tokens, None))
    assert text == "a\n<b" and [score.token for score in scores] == ["a", "<", "b"]


@pytest.mark.parametrize("marks", TOKENIZERS)
def test_a_text_that_was_thought_before_has_the_scores_of_the_answer(marks):
    tokenizer = TOKENIZERS[marks]
    tokens = tokenizer.encode("<think>think</think>think")
    ((text, scores),) = shown(tokenizer, ("none", "think"), deltas(tokenizer, tokens, None))
    assert text == "think" and [-score.logprob for score in scores] == list(range(len(tokens) - 5, len(tokens)))
