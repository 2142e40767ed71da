"""A checkpoint's recommended sampling, and its end tokens.

generation_config.json has them; without such a file, config.json may, as in older checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gapless.base.errors import CheckpointError, ConfigError, RequestError
from gapless.base.files import read_json
from gapless.base.json_fields import json_object
from gapless.base.params import SamplingParams
from gapless.model.fields import Fields
from gapless.model.known_fields import GENERATION_FIELDS

_PARAMETERS = {
    **{"max_new_tokens": "max_tokens", "stop_strings": "stop"},
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p")},
    **{name: name for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")},
}
"""Parameters that generation_config.json may recommend, by their names there, and ours"""
FILE = "generation_config.json"
_OLD_LENGTH = 20
"""max_length of a checkpoint without one"""


def generation_fields(directory: Path, config: Fields) -> Fields:
    """Return the recommending fields, config.json's if there is no other file."""
    path = directory / FILE
    values = read_json(path)
    if values is None:
        return config
    for name in config.values.keys() & values.keys():
        if config.values[name] == values[name]:
            config.get(name)
    return Fields(path, values, known=GENERATION_FIELDS)


def read_sampling(generation: Fields, length: int) -> dict[str, Any]:
    """Return default sampling parameters of requests, by our names. `length` is the length of the longest sequence.

    Raises CheckpointError naming the file and the field.
    """
    found = {ours: _checked(generation, name, ours) for name, ours in _PARAMETERS.items() if name in generation}
    if not generation.flag("do_sample", True):
        if found.get("temperature"):
            generation.unused("temperature", "do_sample is false")
        found["temperature"] = 0.0
    most = generation.get("max_length")
    if most is not None and most != _OLD_LENGTH and not (type(most) is int and most >= length):
        generation.unused("max_length", "requests limit their new tokens, by max_tokens")
    return found


def sampling_of(source: str, override: str | None, own: dict[str, Any], length: int) -> dict[str, Any]:
    """Return default sampling parameters of requests: of --generation-config, where `own` are the model's, and over
    them --override-generation-config's. Raises ConfigError, or CheckpointError naming the file."""
    found = {"auto": own, "vllm": {}}.get(source)
    if found is None:
        path = Path(source).expanduser() / FILE
        values = read_json(path)
        if values is None:
            raise ConfigError(f"generation_config must be auto, vllm or a folder with {FILE}; there is no {path}")
        found = read_sampling(Fields(path, values, known=GENERATION_FIELDS), length)
    if override is None:
        return found
    name, known = "override_generation_config", [*_PARAMETERS, "do_sample"]
    values = json_object(name, override, '{"temperature": 0.5}')
    if unknown := [key for key in values if key not in known]:
        raise ConfigError(f"{name} has no {unknown[0]!r}; known: {', '.join(known)}")
    return found | read_sampling(Fields(Path(name), values), length)


def _checked(generation: Fields, name: str, ours: str) -> Any:
    value = generation.get(name)
    if ours == "top_k" and type(value) is float and value.is_integer():
        value = int(value)
    try:
        return getattr(SamplingParams(**{ours: value}), ours)
    except RequestError as error:
        text = str(error).removeprefix(ours)
        raise CheckpointError(f"{generation.path}: {name}{text if text != str(error) else f': {error}'}") from error


def read_end_tokens(generation: Fields, config: Fields, vocab: int) -> tuple[int, ...]:
    """Return the end tokens; generation_config.json's win over config.json's. Raises CheckpointError."""
    own = _end_tokens(config, vocab)
    if generation is config or "eos_token_id" not in generation:
        return own
    found = _end_tokens(generation, vocab)
    if not found and generation.values["eos_token_id"] != []:
        return own
    if set(own) - set(found):
        config.unused("eos_token_id", f"{generation.path.name} has other ones")
    return found


def _end_tokens(source: Fields, vocab: int) -> tuple[int, ...]:
    value = source.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int for token in ids):
        raise source.error("eos_token_id", f"must be token ids from 0 to {vocab - 1}")
    found = [token for token in ids if 0 <= token < vocab]
    if len(found) < len(ids):
        source.unused("eos_token_id", f"ids are from 0 to {vocab - 1}; those outside are left out")
    return tuple(dict.fromkeys(found))
