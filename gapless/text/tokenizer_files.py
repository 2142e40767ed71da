"""The files of a tokenizer, as transformers reads them: vocabulary, special tokens and chat templates.

A setting that another file overrules is warned of, by file and field.
"""

from __future__ import annotations

import logging
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from gapless.base.errors import CheckpointError
from gapless.base.files import read_json, read_text
from gapless.text.chat import SPECIAL_NAMES

log = logging.getLogger("gapless.text")
TEMPLATES_FOLDER = "additional_chat_templates"
_CONFIG, _MAP, _ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_OTHERS = ("tokenizer.model", "tekken.json", "vocab.json", "merges.txt", "vocab.txt", "spiece.model", "tiktoken.model")
"""Files that hold a vocabulary in forms that are not read"""
_NAMED = ("extra_special_tokens", "model_specific_special_tokens")
"""Settings that may be an object of more special tokens, by name"""
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


class TokenizerFiles(NamedTuple):
    """The settings of all files of a directory."""

    backend: Backend
    config: Mapping[str, Any]
    special: Mapping[str, str]
    """Special tokens by name"""


def read_files(root: Path) -> TokenizerFiles:
    """Read all but the chat templates. Raises CheckpointError naming the file that is missing or broken."""
    backend = _backend(root / "tokenizer.json")
    config = read_json(root / _CONFIG) or {}
    if others := [name for name in _listed(config, "fast_tokenizer_files") if name != "tokenizer.json"]:
        raise CheckpointError(f"{root / _CONFIG}: fast_tokenizer_files names {others[0]}, and tokenizer.json is read")
    declared = _declared(root, config)
    _check_tokens(root, declared)
    named = {name: token for name, value in declared.items() if _is_name(name) and (token := _token(value))}
    for field in _NAMED:
        extra = declared.get(field)
        if isinstance(extra, Mapping):
            named |= {name: token for name, value in extra.items() if (token := _token(value))}
    special = {name: token.content for name, token in named.items()}
    special |= {name: "" for name in SPECIAL_NAMES if declared.get(name) == ""}  # templates may add it to a text
    numbered = _numbered(root, config, special.values())
    _add(backend, [token for _, token in sorted(numbered.items(), key=lambda entry: entry[0])], again=True)
    more = [_token(value) for name in ("extra_special_tokens", "additional_special_tokens")
            for value in _listed(declared, name)]  # fmt: skip
    _add(backend, [token for token in (*named.values(), *more) if token])
    for number, token in numbered.items():
        if (own := backend.token_to_id(token.content)) != number:
            log.warning("%s: token %r has the id %s in tokenizer.json, not %s", root, token.content, own, number)
    backend.encode_special_tokens = bool(config.get("split_special_tokens"))
    if config.get("clean_up_tokenization_spaces") and not isinstance(backend.model, BPE):
        log.warning("%s: clean_up_tokenization_spaces = True is not used: texts keep their spaces", root / _CONFIG)
    return TokenizerFiles(backend, config, special)


def _backend(path: Path) -> Backend:
    text = read_text(path)
    if text is None:
        others = ", ".join(name for name in _OTHERS if (path.parent / name).exists())
        there = f" (it has {others}, which are not read: AutoTokenizer's save_pretrained makes one)" if others else ""
        raise CheckpointError(
            f"{path} does not exist; the directory must hold a tokenizer.json{there}, or name another one"
        )
    try:
        return Backend.from_str(text)
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{path} is not a tokenizer: {error}") from error


def _declared(root: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of tokenizer_config.json with special_tokens_map.json's, which count only if the
    first has no added_tokens_decoder.
    """
    older = {name: value for name, value in (read_json(root / _MAP) or {}).items() if value is not None}
    alone = "added_tokens_decoder" in config
    first, second = (config, older) if alone else (older, config)
    for name in SPECIAL_NAMES:
        used, other = (_content(one.get(name)) for one in (first, second))
        if other and other != used and (used or alone):
            here, there = (_MAP, _CONFIG) if alone else (_CONFIG, _MAP)
            log.warning("%s: %s %r is not used: in %s it is %r", root / here, name, other, there, used)
    return dict(config) if alone else {**config, **older}


def _check_tokens(root: Path, declared: Mapping[str, Any]) -> None:
    """Refuse anything but a special token or a list of them."""
    for name in (*SPECIAL_NAMES, *_NAMED, "additional_special_tokens"):
        value = declared.get(name)
        if not value or (name in _NAMED and isinstance(value, Mapping)):
            continue
        tokens = [value] if name in SPECIAL_NAMES else value if isinstance(value, list) else [None]
        if not all(map(_content, tokens)):
            raise CheckpointError(f"{root}: {name} of {_CONFIG} or {_MAP} must give the text of tokens, got {value!r}")


def _numbered(root: Path, config: Mapping[str, Any], special: Iterable[str]) -> dict[int, AddedToken]:
    """Return the tokens that are declared with their ids; added_tokens.json counts as special_tokens_map.json does."""
    listed = config.get("added_tokens_decoder")
    if listed is None:
        older, known = read_json(root / _ADDED) or {}, set(special)
        if wrong := [text for text, number in older.items() if type(number) is not int]:
            raise CheckpointError(f"{root / _ADDED}: {wrong[0]!r} must have a whole number, its id")
        return {number: AddedToken(text, normalized=text not in known, special=text in known)
                for text, number in older.items()}  # fmt: skip
    if not isinstance(listed, dict):
        raise CheckpointError(f"{root / _CONFIG}: added_tokens_decoder must be an object")
    found = {}
    for number, entry in listed.items():
        token = _token({"special": False, **entry}) if isinstance(entry, dict) else None
        if token is None or not str(number).isdecimal():
            raise CheckpointError(f"{root / _CONFIG}: added_tokens_decoder entry {number} has no content")
        found[int(number)] = token
    return found


def _add(backend: Backend, tokens: Iterable[AddedToken], again: bool = False) -> None:
    """Add the tokens that the vocabulary lacks as added ones; `again` also tokens that it has with other flags."""
    known = {token.content: repr(token) for token in backend.get_added_tokens_decoder().values()}
    new = [one for one in tokens if known.get(one.content) != repr(one) and (again or one.content not in known)]
    if new:
        backend.add_tokens(new)


def _token(value: Any) -> AddedToken | None:
    """Return a token that is written as a string, or as an object with its flags; None where it is neither."""
    text = _content(value)
    if text is None:
        return None
    flags = {flag: bool(value[flag]) for flag in _FLAGS if flag in value} if isinstance(value, dict) else {}
    return AddedToken(text, **{"special": True, **flags})


def _content(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text else None


def _is_name(name: str) -> bool:
    return name in SPECIAL_NAMES or name.endswith("_token")


def _listed(config: Mapping[str, Any], name: str) -> list[Any]:
    found = config.get(name)
    return found if isinstance(found, list) else []


def template_sources(root: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by name: from files of their own, else chat_template.json's, else the config's."""
    files = {path.stem: read_text(path) or "" for path in sorted((root / TEMPLATES_FOLDER).glob("*.jinja"))}
    text = read_text(root / "chat_template.jinja")
    if text is not None:
        files = {"default": text, **files}
    older = [(_CONFIG, config.get("chat_template"))]
    older.append(("chat_template.json", (read_json(root / "chat_template.json") or {}).get("chat_template")))
    found: dict[str, str] = {}
    for file, given in older:
        found = _named_templates(root, given) or found
        if text is not None and given and found.items() - files.items():
            log.warning("%s: its chat_template is not used: chat_template.jinja has another one", root / file)
    found = files if text is not None else {**found, **files}
    if found and "default" not in found:
        raise _no_default(root)
    return found


def _named_templates(root: Path, given: Any) -> dict[str, str]:
    if isinstance(given, list):
        given = {entry.get("name"): entry.get("template") for entry in given if isinstance(entry, dict)}
    found = {"default": given} if isinstance(given, str) and given else given or {}
    if not isinstance(found, dict) or not all(isinstance(one, str) for pair in found.items() for one in pair):
        raise _no_default(root)
    return found


def _no_default(root: Path) -> CheckpointError:
    return CheckpointError(
        f"{root}: chat_template must be a string, or a list of name and template with a default; files of "
        f"{TEMPLATES_FOLDER} need a chat_template.jinja beside them"
    )


def files_read(root: Path, special: Mapping[str, str], templates: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the files that a tokenizer with these special tokens and templates was read from, each with what it says,
    and then those that are not read.
    """
    yield "tokenizer.json", "read: the vocabulary"
    listed = {name: read_json(root / name) or {} for name in (_CONFIG, _MAP)}
    for file, values in listed.items():
        extra = [values[field] for field in _NAMED if isinstance(values.get(field), Mapping)]
        flat = dict(ChainMap(values, *extra))
        said = [f"{name} = {text!r}" for name, text in special.items() if _content(flat.get(name)) == text]
        said += ["added_tokens_decoder"] if values.get("added_tokens_decoder") else []
        if said:
            yield file, f"read: {', '.join(said)}"
    if (root / _ADDED).exists() and listed[_CONFIG].get("added_tokens_decoder") is None:
        yield _ADDED, "read: ids of tokens"
    for name in templates:
        own = "chat_template.jinja" if name == "default" else f"{TEMPLATES_FOLDER}/{name}.jinja"
        file = next(one for one in (own, "chat_template.json", _CONFIG) if (root / one).exists())
        yield file, f"read: template {name!r}"
    if rest := [name for name in _OTHERS if (root / name).exists()]:
        yield "tokenizer", f"not read, tokenizer.json counts: {', '.join(rest)}"
