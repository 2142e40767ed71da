"""Tokenizer directories: what transformers reads from them, and faults that name the file."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from vocabularies import ALL, byte_fallback, byte_level

from gapless.base.errors import CheckpointError
from gapless.text.tokenizer import Tokenizer

EOS = {"__type": "AddedToken", "content": "</s>", "special": True}
TEXTS = ["hello a b", "你好 <s> ll", "", " a  b\n", "</s>x"]


def write(root: Path, tokenizer: Tokenizer, config: dict | None = None, **files) -> Path:
    tokenizer.backend.save(str(root / "tokenizer.json"))
    (root / "tokenizer_config.json").write_text(json.dumps(config or {}))
    for name, text in files.items():
        (root / name.replace("__", ".")).write_text(text if isinstance(text, str) else json.dumps(text))
    return root


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("bos", [None, True, False])
@pytest.mark.parametrize("eos", [None, True])
def test_ids_and_text_equal_transformers(tmp_path: Path, make, bos, eos) -> None:
    config = {"bos_token": "<s>", "eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"}
    config |= {key: value for key, value in (("add_bos_token", bos), ("add_eos_token", eos)) if value is not None}
    ours = Tokenizer.from_dir(write(tmp_path, make(), config))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        plain = ours.encode(text, add_special_tokens=False)
        assert plain == theirs.encode(text, add_special_tokens=False)
        for skip in (True, False):
            assert ours.decode(ours.encode(text), skip) == theirs.decode(ours.encode(text), skip_special_tokens=skip)
    assert (ours.eos_token, ours.eos_token_id) == (theirs.eos_token, theirs.eos_token_id)
    assert (ours.bos_token, ours.bos_token_id) == (theirs.bos_token, theirs.bos_token_id)
    assert ours.vocab_size == len(theirs)


@pytest.mark.parametrize("name", sorted(ALL))
def test_no_token_is_longer_than_the_longest(name: str) -> None:
    tokenizer = ALL[name]()
    longest = max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))
    assert tokenizer.max_token_bytes >= longest
    assert tokenizer.max_token_bytes <= 7  # "<plain>", or "▁a"


def test_a_special_token_written_out_in_a_message_is_that_token(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"}
    root = write(
        tmp_path, byte_level(), config, chat_template__jinja="{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    ours, theirs = Tokenizer.from_dir(root), transformers.PreTrainedTokenizerFast.from_pretrained(root)
    messages = [{"role": "user", "content": "a</s>b"}]
    ids = ours.encode(ours.chat(messages), add_special_tokens=False)
    assert ours.eos_token_id in ids
    assert ids == theirs.apply_chat_template(messages, return_dict=False)


def test_token_bytes_join_to_the_text() -> None:
    for tokenizer in (byte_level(), byte_fallback()):
        ids = tokenizer.encode("你好 hello ❤", add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, ids)).decode().lstrip() == "你好 hello ❤"
        assert tokenizer.token_bytes(10**6) == b"" and tokenizer.token_str(10**6) == ""


def test_templates_come_from_the_config_or_a_file_beside_it(tmp_path: Path) -> None:
    config = {"chat_template": [{"name": "default", "template": "C"}, {"name": "tool_use", "template": "T"}]}
    write(tmp_path, byte_level(), config)
    chat = [{"role": "user", "content": "x"}]
    assert Tokenizer.from_dir(tmp_path).chat(chat) == "C"
    assert Tokenizer.from_dir(tmp_path).chat(chat, tools=[{}]) == "T"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "J"}')
    assert Tokenizer.from_dir(tmp_path).chat(chat) == "J"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert Tokenizer.from_dir(tmp_path).chat(chat) == "F"
    (tmp_path / "other").write_text("O")
    assert Tokenizer.from_dir(tmp_path, str(tmp_path / "other")).chat(chat) == "O"
    assert Tokenizer.from_dir(tmp_path, "{{ messages[0].content }}!").chat(chat) == "x!"
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        Tokenizer.from_dir(tmp_path, str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", "{"),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", b"\xff\xfe"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"1": 3}}'),
        ("special_tokens_map.json", "no"),
        ("chat_template.json", "{"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, content) -> None:
    write(tmp_path, byte_level())
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError, match=name):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize("template", [[{"name": "x", "template": "y"}], {"default": 3}, 3, "{% if %}"])
def test_a_broken_template_names_the_directory(tmp_path: Path, template) -> None:
    write(tmp_path, byte_level(), {"chat_template": template})
    with pytest.raises(CheckpointError, match=tmp_path.name):
        Tokenizer.from_dir(tmp_path)


def test_the_info_of_a_tokenizer_is_read(tmp_path: Path) -> None:
    config = {"eos_token": "</s>", "tokenizer_class": "X", "chat_template": "C", "model_max_length": 5, "extra": {}}
    info = Tokenizer.from_dir(write(tmp_path, byte_level(), config)).info()
    assert (info["eos_token"], info["bos_token"], info["tokenizer_class"]) == ("</s>", None, "X")
    assert (info["chat_template"], info["model_max_length"]) == ("C", 5)
    assert json.loads(json.dumps(info)) == info


def test_padding_and_truncation_of_the_file_do_not_apply(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.backend.enable_truncation(2)
    tokenizer.backend.enable_padding(length=9)
    assert len(Tokenizer.from_dir(write(tmp_path, tokenizer)).encode("hello a b")) == len(
        byte_level().encode("hello a b")
    )


def test_the_engine_front_imports_no_transformers_and_no_torch() -> None:

    code = (
        "import gapless.engine.async_llm, gapless.engine.llm, sys; print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr
