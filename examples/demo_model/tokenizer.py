"""The demo model's byte-level BPE, its chat template, and the same rendering in Python for training."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from examples.demo_model.documents import Conversation

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Marks that a client must be able to see, so they are whole tokens but not special ones.
MARKS = ("<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
WORDS = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

TOOLS_HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_TAIL = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)

CHAT_TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}"
    "{{- HEAD }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{{- TAIL + '<|im_end|>\\n' }}"
    "{%- elif messages[0].role == 'system' %}"
    "{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- set content = message.content if message.content is string else '' %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}"
    "{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\\n' + content }}"
    "{%- for call in message.tool_calls or [] %}"
    "{%- set function = call.function if call.function else call %}"
    "{%- if content or not loop.first %}{{- '\\n' }}{%- endif %}"
    "{{- '<tool_call>\\n{\"name\": \"' + function.name + '\", \"arguments\": ' }}"
    "{{- function.arguments if function.arguments is string else function.arguments | tojson }}"
    "{{- '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}"
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- elif message.role != 'system' %}{{- raise_exception('unknown role ' + message.role) }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
).replace("HEAD", json.dumps(TOOLS_HEAD)).replace("TAIL", json.dumps(TOOLS_TAIL))  # fmt: skip

Segment = tuple[str, bool]


def _system_text(conversation: Conversation) -> str:
    role, content = conversation.messages[0]
    parts = [content] if role == "system" else []
    if conversation.tools:
        lines = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in conversation.tools)
        parts.append(TOOLS_HEAD + lines + TOOLS_TAIL)
    return "\n\n".join(parts)


def segments(conversation: Conversation) -> Iterator[Segment]:
    """Pieces of text with a flag: does the model learn to write this piece? Joined they are the templated chat."""
    if conversation.plain:
        (_, prompt), (_, answer) = conversation.messages
        yield prompt, False
        yield answer + "<|endoftext|>", True
        return
    system = _system_text(conversation)
    if system:
        yield f"<|im_start|>system\n{system}<|im_end|>\n", False
    for role, content in conversation.messages:
        if role == "assistant":
            yield "<|im_start|>assistant\n", False
            yield f"{content}<|im_end|>", True
            yield "\n", False
        elif role == "tool":
            yield f"<|im_start|>user\n<tool_response>\n{content}\n</tool_response><|im_end|>\n", False
        elif role == "user":
            yield f"<|im_start|>user\n{content}<|im_end|>\n", False


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE whose vocabulary holds all 256 bytes and in which every digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(MARKS),
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in MARKS])
    assert tokenizer.get_vocab_size() == vocab_size, "a mark was also learned as a merge"
    return tokenizer


def mark_id(tokenizer: Tokenizer, mark: str) -> int:
    """The id of a special token. KeyError if the vocabulary lacks it."""
    return int(tokenizer.get_vocab(with_added_tokens=True)[mark])


def end_ids(tokenizer: Tokenizer) -> list[int]:
    """The ids that end a reply: of a chat turn, of a plain document."""
    return [mark_id(tokenizer, "<|im_end|>"), mark_id(tokenizer, "<|endoftext|>")]


def tokenizer_config(context: int) -> dict[str, Any]:
    """The settings by which transformers loads the directory."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "chat_template": CHAT_TEMPLATE,
    }


def save_tokenizer(tokenizer: Tokenizer, directory: Path, context: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json."""
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = json.dumps(tokenizer_config(context), indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(settings + "\n", encoding="utf-8")
