"""The demo model's tokenizer and chat template, as packaged."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gapless.demo import weights_dir

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(weights_dir() / "tokenizer.json"))


@pytest.fixture(scope="module")
def template():
    return transformers.AutoTokenizer.from_pretrained(weights_dir())


TOKENIZER = Tokenizer.from_file(str(weights_dir() / "tokenizer.json"))


@given(st.text())
def test_any_text_comes_back(text):
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    "text", ["你好世界", "👩‍👩‍👧‍👦 🇳🇴", "a\tb\r\n  c", "Zażółć", "\x00\x7f", "e\u0301", "<|im_end|>", "<tool_call>{}"]
)
def test_hard_texts_come_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_every_byte_is_in_the_vocabulary(tokenizer):
    from tokenizers.pre_tokenizers import ByteLevel

    vocabulary = tokenizer.get_vocab()
    assert len(ByteLevel.alphabet()) == 256
    assert set(ByteLevel.alphabet()) <= set(vocabulary)


def test_a_digit_is_always_a_token_of_its_own(tokenizer):
    encoded = tokenizer.encode("I have 1984 apples, 20 pears and x=375.")
    digits = [token for token in encoded.tokens if any(c.isdigit() for c in token)]
    assert digits == list("198420375")
    assert not [t for t in tokenizer.get_vocab() if len(t) > 1 and any(c in "0123456789" for c in t)]


def test_the_vocabulary_is_as_large_as_the_embedding(tokenizer):
    config = json.loads((weights_dir() / "config.json").read_text())
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    assert [tokenizer.id_to_token(i) for i in config["eos_token_id"]] == ["<|im_end|>", "<|endoftext|>"]


def test_the_template_renders_tool_calls_as_trained(template):
    call = {"type": "function", "function": {"name": "clock", "arguments": {"city": "Oslo"}}}
    messages = [
        {"role": "user", "content": "How late is it in Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": '{"time": "12:30"}'},
    ]
    assert template.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>user\nHow late is it in Oslo?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "clock", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>\n'
        '<|im_start|>user\n<tool_response>\n{"time": "12:30"}\n</tool_response><|im_end|>\n'
        "<|im_start|>assistant\n"
    )


def test_transformers_ends_where_the_model_ends(template):
    assert template.eos_token == "<|im_end|>"
    assert template.pad_token == "<|endoftext|>"


def test_an_unknown_role_is_refused():
    from gapless.base.errors import RequestError
    from gapless.text.tokenizer import Tokenizer as ChatTokenizer

    chat = ChatTokenizer.from_dir(weights_dir()).chat
    with pytest.raises(RequestError, match="unknown role wizard"):
        chat([{"role": "wizard", "content": "hello"}])
    assert "hello" in chat([{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}])
