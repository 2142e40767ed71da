"""What the files of a tokenizer say together: special tokens and templates as transformers has them, or a warning, or a
refusal, by file and field."""

import json
import logging
from pathlib import Path

import pytest
import transformers
from tokenizers import decoders, pre_tokenizers
from vocabularies import byte_fallback, byte_level, wordpiece

from gapless.base.errors import CheckpointError
from gapless.text.tokenizer import Tokenizer
from gapless.text.tokenizer_files import files_read

VOCABULARY = byte_level()
PLAIN, LETTER = (VOCABULARY.token_id(text) for text in ("<plain>", "a"))
BASE = {"bos_token": "<s>", "eos_token": "</s>"}
FLAGS = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
TEXTS = ["a<plain> b</s>  x", "<new> a <more> <pad><boi> a<s>"]


def token(content="<plain>", **flags):
    return {"content": content, **FLAGS, "special": True, **flags}


def decoder(number, content="<plain>", **flags):
    return {**BASE, "added_tokens_decoder": {str(number): token(content, **flags)}}


def write(root: Path, config: dict, **files) -> Path:
    VOCABULARY.backend.save(str(root / "tokenizer.json"))
    (root / "tokenizer_config.json").write_text(json.dumps(config))
    (root / "config.json").write_text('{"model_type": "llama"}')
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text if isinstance(text, str) else json.dumps(text))
    return root


MAP, ADDED = "special_tokens_map_dot_json", "added_tokens_dot_json"
DECLARED = {
    "nothing": ({}, {}),
    "config": (BASE, {}),
    "map": ({}, {MAP: BASE}),
    "map with flags": ({}, {MAP: {"eos_token": {"content": "</s>", **FLAGS, "rstrip": True}}}),
    "map beside decoder": ({"added_tokens_decoder": {str(PLAIN): token()}}, {MAP: BASE}),
    "both, and they differ": (BASE, {MAP: {"eos_token": "<plain>"}}),
    "both, and they differ beside a decoder": (decoder(PLAIN), {MAP: {"eos_token": "<plain>"}}),
    "decoder makes special": (decoder(PLAIN), {}),
    "decoder strips": (decoder(PLAIN, rstrip=True), {}),
    "decoder not special": (decoder(PLAIN, special=False), {}),
    "decoder without flags": ({**BASE, "added_tokens_decoder": {str(PLAIN): {"content": "<plain>"}}}, {}),
    "decoder of a letter": (decoder(LETTER, "a"), {}),
    "decoder of a new token": (decoder(VOCABULARY.vocab_size, "<new>"), {}),
    "pad is added": ({**BASE, "pad_token": "<plain>"}, {}),
    "pad is a letter": ({**BASE, "pad_token": "a"}, {}),
    "pad is new": ({**BASE, "pad_token": "<pad>"}, {}),
    "additional": ({**BASE, "additional_special_tokens": ["<plain>", "<more>"]}, {}),
    "extra list": ({**BASE, "extra_special_tokens": ["<more>", "a"]}, {}),
    "extra names": ({**BASE, "extra_special_tokens": {"image_token": "<plain>", "boi_token": "<boi>"}}, {}),
    "names of the model": ({**BASE, "model_specific_special_tokens": {"image_token": "<boi>"}}, {}),
    "empty": ({**BASE, "bos_token": ""}, {}),
    "names of its own": ({**BASE, "image_token": "a", "boi_token": "<boi>"}, {}),
    "map additional": (BASE, {MAP: {**BASE, "additional_special_tokens": ["<plain>", "<more>"]}}),
    "map extra": (BASE, {MAP: {**BASE, "extra_special_tokens": ["<more>"]}}),
    "added tokens": (BASE, {ADDED: {"<plain>": PLAIN, "<new>": VOCABULARY.vocab_size}}),
    "added special token": ({**BASE, "pad_token": "<new>"}, {ADDED: {"<new>": VOCABULARY.vocab_size}}),
    "null": ({"bos_token": "<s>", "eos_token": None}, {}),
    "object": ({"eos_token": {"__type": "AddedToken", **token("</s>", rstrip=True)}}, {}),
    "not in the vocabulary": ({"eos_token": "<|end|>"}, {}),
    "split": ({**BASE, "split_special_tokens": True}, {}),
}


@pytest.mark.parametrize("name", DECLARED)
def test_special_tokens_are_those_of_transformers_wherever_they_are_declared(tmp_path: Path, name: str) -> None:
    config, files = DECLARED[name]
    write(tmp_path, config, **files)
    ours, theirs = Tokenizer.from_dir(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours.special == theirs.special_tokens_map
    assert (ours.vocab_size, ours.eos_token_id) == (len(theirs), theirs.eos_token_id)
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == ids
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


CHAT, TOOLS = [{"role": "user", "content": "x"}], [{"type": "function", "function": {"name": "f"}}]
NAMED = [{"name": "default", "template": "C"}, {"name": "tool_use", "template": "CT"}]
FILE, TOOL_FILE, RAG = "chat_template_dot_jinja", "additional_chat_templates__tool_use_dot_jinja", \
                       "additional_chat_templates__rag_dot_jinja"  # fmt: skip
WRITTEN = {
    "file": ({}, {FILE: "F"}),
    "files": ({}, {FILE: "F", TOOL_FILE: "FT"}),
    "files, and others that nobody asks for": ({}, {FILE: "F", TOOL_FILE: "FT", RAG: "R"}),
    "files before one in the config": ({"chat_template": "C"}, {FILE: "F", TOOL_FILE: "FT"}),
    "files before those of the config": ({"chat_template": NAMED}, {FILE: "F", TOOL_FILE: "FT"}),
    "one file before those of the config": ({"chat_template": NAMED}, {FILE: "F"}),
    "those of the config": ({"chat_template": NAMED}, {}),
    "an empty folder": ({"chat_template": "C"}, {"additional_chat_templates__readme": "x"}),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_templates_are_those_of_transformers_wherever_they_are_written(tmp_path: Path, name: str) -> None:
    config, files = WRITTEN[name]
    write(tmp_path, config, **files)
    ours, theirs = Tokenizer.from_dir(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for tools in (None, TOOLS):
        assert ours.chat(CHAT, tools=tools) == theirs.apply_chat_template(CHAT, tools=tools, tokenize=False)


@pytest.mark.parametrize(("config", "files"), [
    ({"chat_template": "C"}, {TOOL_FILE: "FT"}),
    ({}, {"chat_template_dot_json": {"chat_template": "C"}, TOOL_FILE: "FT"}),
])  # fmt: skip
def test_a_folder_of_templates_adds_to_an_older_default(tmp_path: Path, config, files) -> None:
    tokenizer = Tokenizer.from_dir(write(tmp_path, config, **files))
    assert (tokenizer.chat(CHAT), tokenizer.chat(CHAT, tools=TOOLS)) == ("C", "FT")


def test_the_form_of_calls_is_found_in_the_template_for_tools(tmp_path: Path) -> None:
    write(tmp_path, {}, **{FILE: "F", TOOL_FILE: "<tool_call>"})
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert "<tool_call>" in tokenizer.template.source and tokenizer.info()["chat_template"] == "F"


@pytest.mark.parametrize(
    ("config", "files", "said"),
    [
        (BASE, {MAP: {"eos_token": "<plain>"}}, ["tokenizer_config.json", "eos_token", "'</s>'", "'<plain>'"]),
        (decoder(PLAIN), {MAP: {"eos_token": "<plain>"}}, ["special_tokens_map.json", "eos_token", "'</s>'"]),
        ({"added_tokens_decoder": {}}, {MAP: {"bos_token": "<s>"}}, ["special_tokens_map.json", "bos_token", "'<s>'"]),
        (decoder(5), {}, ["'<plain>'", str(PLAIN), "5"]),
        (BASE, {ADDED: {"<plain>": 5}}, ["'<plain>'", str(PLAIN), "5"]),
        ({"chat_template": "C"}, {FILE: "F"}, ["tokenizer_config.json", "chat_template", "chat_template.jinja"]),
        ({}, {FILE: "F", "chat_template_dot_json": {"chat_template": "C"}}, ["chat_template.json", "not used"]),
    ],
)  # fmt: skip
def test_a_field_that_another_file_overrules_is_warned_of(tmp_path: Path, caplog, config, files, said) -> None:
    with caplog.at_level(logging.WARNING, "gapless.text"):
        Tokenizer.from_dir(write(tmp_path, config, **files))
    (text,) = caplog.messages
    assert all(word in text for word in said), text


@pytest.mark.parametrize("name", ["nothing", "config", "map", "decoder strips", "pad is new", "null", "object"])
def test_files_that_agree_are_not_warned_of(tmp_path: Path, caplog, name: str) -> None:
    config, files = DECLARED[name]
    same = {"chat_template": "F", **config}
    Tokenizer.from_dir(write(tmp_path, same, **{FILE: "F"}, **files))
    assert not caplog.messages


@pytest.mark.parametrize(("vocabulary", "warned"), [(byte_level, False), (byte_fallback, False), (wordpiece, True)])
def test_spaces_that_transformers_would_clean_up_are_warned_of(tmp_path: Path, caplog, vocabulary, warned) -> None:
    write(tmp_path, {"clean_up_tokenization_spaces": True})
    backend = vocabulary().backend
    if vocabulary is wordpiece:
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece(cleanup=False)
    backend.save(str(tmp_path / "tokenizer.json"))
    ours, theirs = Tokenizer.from_dir(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = theirs.encode("a b .", add_special_tokens=False)
    assert (ours.decode(ids) != theirs.decode(ids)) == warned
    said = [record.getMessage() for record in caplog.records if record.name == "gapless.text"]
    assert ["clean_up_tokenization_spaces" in text for text in said] == [True] * warned


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "tiktoken.model"])
def test_a_vocabulary_in_another_form_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    write(tmp_path, BASE)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError, match=rf"tokenizer\.json does not exist.*{name}.*save_pretrained"):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize(
    ("config", "files", "named"),
    [
        ({"fast_tokenizer_files": ["tokenizer.json", "tokenizer.4.0.json"]}, {}, "tokenizer.4.0.json"),
        ({}, {TOOL_FILE: "T"}, "additional_chat_templates"),
        ({}, {FILE: "F", TOOL_FILE: "{% if %}"}, "does not compile"),
        ({}, {ADDED: {"<new>": "5"}}, "added_tokens.json"),
        ({}, {ADDED: []}, "added_tokens.json"),
        ({"added_tokens_decoder": {"x": token()}}, {}, "added_tokens_decoder"),
        ({"added_tokens_decoder": [1]}, {}, "added_tokens_decoder"),
        ({"eos_token": ["</s>"]}, {}, "eos_token"),
        ({"additional_special_tokens": "<more>"}, {}, "additional_special_tokens"),
        ({"extra_special_tokens": [1]}, {}, "extra_special_tokens"),
    ],
)  # fmt: skip
def test_unreadable_files_are_refused_by_file_and_field(tmp_path: Path, config, files, named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        Tokenizer.from_dir(write(tmp_path, config, **files))


READ_FROM = {
    "nothing": ({}, {}, {}),
    "config": ({**BASE, "chat_template": "C"}, {},
               {"tokenizer_config.json": {"bos_token = '<s>', eos_token = '</s>'", "template 'default'"}}),
    "map": ({"bos_token": "<s>"}, {MAP: {"eos_token": "</s>"}},
            {"tokenizer_config.json": {"bos_token = '<s>'"}, "special_tokens_map.json": {"eos_token = '</s>'"}}),
    "extra": ({"extra_special_tokens": {"image_token": "<plain>"}}, {},
              {"tokenizer_config.json": {"image_token = '<plain>'"}}),
    "added": ({}, {ADDED: {"<plain>": PLAIN}}, {"added_tokens.json": {"ids of tokens"}}),
    "files": ({"chat_template": "F"}, {FILE: "F", TOOL_FILE: "FT"},
              {"chat_template.jinja": {"template 'default'"},
               "additional_chat_templates/tool_use.jinja": {"template 'tool_use'"}}),
    "older": ({}, {"chat_template_dot_json": {"chat_template": "C"}}, {"chat_template.json": {"template 'default'"}}),
    "others": ({}, {"vocab_dot_json": "{}", "merges_dot_txt": ""},
               {"tokenizer": {"not read, tokenizer.json counts: vocab.json, merges.txt"}}),
}  # fmt: skip


@pytest.mark.parametrize("name", READ_FROM)
def test_the_files_that_were_read_are_told_with_what_they_say(tmp_path: Path, name: str) -> None:
    config, files, told = READ_FROM[name]
    tokenizer = Tokenizer.from_dir(write(tmp_path, config, **files))
    found: dict[str, set[str]] = {}
    for file, said in files_read(tmp_path, tokenizer.special, tokenizer.template.names if tokenizer.template else ()):
        found.setdefault(file, set()).add(said.removeprefix("read: "))
    assert found == {"tokenizer.json": {"the vocabulary"}, **told}
