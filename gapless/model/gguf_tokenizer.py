"""The tokenizer of a GGUF file's metadata, as the files that Hugging Face has for one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KEYS = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)
"""Types of tokens"""
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_SPACE = "\u2581"
"""SentencePiece's space"""
_LONGEST = 1_000
"""Characters of a token of SentencePiece, whose cuts are all tried"""


def _split(digits: str) -> dict[str, Any]:
    pattern = {"Regex": _WORDS.format(digits=digits)}
    parts = [{"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}, _BYTES]
    return {"type": "Sequence", "pretokenizers": parts}


_SPLITS: dict[str, dict[str, Any]] = {
    "gpt-2": {**_BYTES, "use_regex": True},
    "llama-bpe": _split("{1,3}"),
    "qwen2": _split(""),
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, {**_BYTES, "use_regex": True}],
    },
}
"""How a text is cut into words, by tokenizer.ggml.pre"""


def tokenizer_files(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return tokenizer.json and tokenizer_config.json. Raises ValueError naming the key that is not known."""
    own = {name.removeprefix(_KEYS): value for name, value in values.items() if name.startswith(_KEYS)}
    makers = {"gpt2": _byte_pairs, "llama": _sentence_pieces}
    if own.get("model") not in makers or "tokens" not in own:
        raise ValueError(f"{_KEYS}model must be gpt2 or llama, got {own.get('model')!r}")
    tokens: list[str] = own["tokens"]
    kinds = own.get("token_type") or [_NORMAL] * len(tokens)
    added = [
        {"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": kind != _USER}
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_CONTROL, _USER) or (kind == _UNKNOWN and own["model"] == "llama")
    ]  # fmt: skip
    named = {f"{name}_token": tokens[own[f"{name}_token_id"]] for name in ("bos", "eos") if f"{name}_token_id" in own}
    begins = bool(own.get("add_bos_token", own["model"] == "llama")) and "bos_token" in named
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **named, "add_bos_token": begins}
    if "tokenizer.chat_template" in values:
        config["chat_template"] = values["tokenizer.chat_template"]
    first = (named["bos_token"], own["bos_token_id"]) if begins else None
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    whole |= makers[own["model"]](own, tokens) | {"post_processor": _after(first)}
    return {"tokenizer.json": whole, "tokenizer_config.json": config}


def _after(first: tuple[str, int] | None) -> dict[str, Any] | None:
    """Return the processor that puts a token first."""
    if first is None:
        return None
    token, number = first
    begin, text = {"SpecialToken": {"id": token, "type_id": 0}}, [{"Sequence": {"id": i, "type_id": 0}} for i in "AB"]
    return {
        "type": "TemplateProcessing", "single": [begin, text[0]], "pair": [begin, *text],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }  # fmt: skip


def _model(tokens: list[str], merges: list[list[str]], **fields: Any) -> dict[str, Any]:
    usual = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
    }  # fmt: skip
    return usual | fields | {"vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges}


def _byte_pairs(own: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    pre = own.get("pre")
    if pre not in _SPLITS:
        raise ValueError(f"{_KEYS}pre must be one of {', '.join(_SPLITS)}, got {pre!r}")
    merges = [merge.split(" ", 1) for merge in own["merges"]]
    return {
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": _SPLITS[pre],
        "decoder": _BYTES,
        "model": _model(tokens, merges, ignore_merges=pre == "llama-bpe"),
    }


def _sentence_pieces(own: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    """Return the parts for SentencePiece's pairs, which has scores where others have merges: the higher goes first."""
    ranks, scores = {token: i for i, token in enumerate(tokens)}, own["scores"]
    if (longest := max(map(len, tokens), default=0)) > _LONGEST:
        raise ValueError(f"{_KEYS}tokens has a token of {longest} characters, at most {_LONGEST}")
    merges: list[tuple[float, int, int, list[str]]] = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            pair = [token[:cut], token[cut:]]
            if pair[0] in ranks and pair[1] in ranks:
                merges.append((-score, ranks[pair[0]], ranks[pair[1]], pair))
    space = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    begins = [{"type": "Prepend", "prepend": _SPACE}] if own.get("add_space_prefix", True) else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if begins else []
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    unknown = tokens[own["unknown_token_id"]] if "unknown_token_id" in own else None
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*begins, space]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": _model(
            tokens, [pair for *_, pair in sorted(merges)], unk_token=unknown, fuse_unk=True, byte_fallback=True
        ),
    }
