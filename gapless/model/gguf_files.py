"""GGUF files: their metadata as the files of a checkpoint's folder, which is kept in the user's cache. Imports no
torch.

The folder has config.json and a tokenizer made of the metadata, a link to the GGUF file, and a table of its tensors by
the names of Hugging Face. Reading needs the package gguf, once a file.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import sha256
from importlib.util import find_spec
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gapless.base.errors import CheckpointError, ConfigError
from gapless.base.files import GGUF_NAME, GGUF_TABLE, read_json
from gapless.base.host import cache_folder
from gapless.base.progress import announce, warn
from gapless.model.gguf_tokenizer import tokenizer_files

_FORM = 1
"""Changes with the contents of folders"""
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OF_LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FREQUENCIES = "rope_freqs.weight"
"""Divisors of each pair's angle, which llama.cpp's converter makes of Llama 3's rope"""
_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
_NUMBERS = {"attention.layer_norm_rms_epsilon", "rope.freq_base"}
"""Sizes that may have a fraction"""
_MAY_LACK = {"attention.head_count_kv", "attention.key_length", "rope.freq_base"}
_READ = {"attention.value_length", "rope.dimension_count", "vocab_size"}
_SCALING = "rope.scaling."
_STRING, _ARRAY = 8, 9
_WIDTHS = (1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8)
"""Bytes of a value of each type of metadata"""


class GgufTensor(NamedTuple):
    """A tensor of a GGUF file."""

    kind: str
    """Name of its type in ggml, such as Q4_0"""
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def unpacked_folder(path: Path) -> Path:
    """Return a folder with the files of a checkpoint for a GGUF file. Raises CheckpointError naming the file and the
    key, ConfigError without the package gguf."""
    if not find_spec("gguf"):
        raise ConfigError(f"model: {path}: GGUF files are read by the package gguf: pip install 'gapless[gguf]'")
    if "-of-" in path.stem:
        raise ConfigError(f"model: {path} is a part of a split file: join the parts with gguf-split --merge")
    facts, place = path.stat(), path.resolve()
    key = f"{_FORM} {place} {facts.st_size} {facts.st_mtime_ns} {facts.st_ino}"
    try:
        folder = cache_folder("gguf") / sha256(key.encode()).hexdigest()[:32]
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"model: {path}: its metadata needs a folder in the user's cache: {error}") from error
    if not (folder / "config.json").is_file():
        announce(f"reading the metadata of {path.name}")
        made = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            _write(place, made)
            with suppress(OSError):  # another process was first
                os.replace(made, folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return folder


def read_table(directory: Path) -> dict[str, GgufTensor]:
    """Return the tensors of a folder's GGUF file, by the names of Hugging Face."""
    found = read_json(directory / GGUF_TABLE) or {}
    return {name: GgufTensor(kind, tuple(shape), *rest) for name, (kind, shape, *rest) in found.items()}


def _write(path: Path, folder: Path) -> None:
    from gguf import GGUFReader  # an extra

    try:
        _check_lengths(path)
        reader = GGUFReader(path)
        values = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {one.name: one for one in reader.tensors}
    except (ValueError, KeyError, IndexError, OverflowError, OSError, struct.error) as error:
        raise CheckpointError(f"{path}: is truncated or no GGUF file ({error}); fetch it again") from error
    size = path.stat().st_size
    for name, one in tensors.items():
        if one.data_offset + one.n_bytes > size:
            raise CheckpointError(f"{path}: truncated: tensor {name!r} ends beyond the file; fetch it again")
    table = {
        _renamed(path, name): (one.tensor_type.name, one.shape[::-1].tolist(), int(one.data_offset), int(one.n_bytes))
        for name, one in tensors.items()
        if name != _FREQUENCIES
    }
    factors = tensors[_FREQUENCIES].data.tolist() if _FREQUENCIES in tensors else []
    config = _config(path, values, table, factors)
    (folder / GGUF_NAME).symlink_to(path)
    _put(folder / GGUF_TABLE, table)
    try:
        for name, content in tokenizer_files(values).items():
            _put(folder / name, content)
    except ValueError as error:
        warn(f"{path}: its tokenizer is not read: {error}; give another with --tokenizer")
    ends = [values[key] for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if key in values]
    if ends:
        _put(folder / "generation_config.json", {"eos_token_id": sorted({*ends})})
    _put(folder / "config.json", config)


def _check_lengths(path: Path) -> None:
    """Raise ValueError or struct.error for lengths of metadata beyond the file: the package would count them off."""
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        magic, version = struct.unpack_from("<4sI", data)
        order = "<" if version & 0xFFFF else ">"
        version, tensors, keys = struct.unpack_from(f"{order}IQQ", data, 4)
        if magic != b"GGUF" or version not in (2, 3):
            return  # the package refuses it
        if max(tensors, keys) > len(data) // 8:
            raise ValueError(f"{tensors} tensors and {keys} keys in {len(data)} bytes")
        at = 24

        def skip(kind: int) -> None:
            nonlocal at
            if kind == _STRING:
                at += 8 + int(struct.unpack_from(f"{order}Q", data, at)[0])
            elif kind == _ARRAY:
                (kind, many), at = struct.unpack_from(f"{order}IQ", data, at), at + 12
                if kind == _ARRAY or many > len(data) - at:
                    raise ValueError(f"an array of {many} values of type {kind} at byte {at}")
                for _ in range(many if kind == _STRING else 0):
                    skip(kind)
                at += many * _WIDTHS[kind]
            else:
                at += _WIDTHS[kind]
            if at > len(data):
                raise ValueError("its metadata ends beyond the file")

        for _ in range(keys):
            skip(_STRING)
            (kind,), at = struct.unpack_from(f"{order}I", data, at), at + 4
            skip(kind)


def _put(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _renamed(path: Path, name: str) -> str:
    """Return the name that Hugging Face has for a tensor."""
    module, _, kind = name.rpartition(".")
    if module in _TENSORS:
        return f"{_TENSORS[module]}.{kind}"
    first, _, rest = module.partition(".")
    number, _, part = rest.partition(".")
    if first == "blk" and number.isdecimal() and part in _OF_LAYERS:
        return f"model.layers.{number}.{_OF_LAYERS[part]}.{kind}"
    raise CheckpointError(f"{path}: unexpected tensor {name!r}: its model is not one that is computed here")


def _config(path: Path, values: Mapping[str, Any], table: Mapping[str, Any], factors: list[float]) -> dict[str, Any]:
    """Return the config.json of a file with this metadata."""
    architecture = values.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise CheckpointError(f"{path}: general.architecture must be one of {known}, got {architecture!r}")
    prefix = f"{architecture}."
    own = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
    for name, value in own.items():
        if name not in _SIZES and name not in _READ and not name.startswith(_SCALING):
            raise CheckpointError(f"{path}: {prefix}{name} is not known, and may change what is computed: {value!r}")
        if not isinstance(value, (int, float, str)):
            raise CheckpointError(f"{path}: {prefix}{name} must be one number for all layers, got {value!r}")
    for name in _SIZES:
        kinds, rule = ((int, float), "number") if name in _NUMBERS else ((int,), "whole number")
        size: Any = own.get(name)
        if (name in own or name not in _MAY_LACK) and not (type(size) in kinds and 0 < size < math.inf):
            raise CheckpointError(f"{path}: {prefix}{name} must be a {rule} above 0, got {size!r}")
    embedding = table.get("model.embed_tokens.weight", ("", ()))[1]
    if len(embedding) != 2:
        raise CheckpointError(f"{path}: token_embd.weight must have two dimensions, got {len(embedding)}")
    config = {ours: _decimal(own[name]) for name, ours in _SIZES.items() if name in own}
    config |= {
        "architectures": [_ARCHITECTURES[architecture]],
        "model_type": architecture,
        "dtype": "bfloat16",
        "vocab_size": embedding[0],
        "tie_word_embeddings": "lm_head.weight" not in table,
        "quantization_config": {
            "quant_method": "gguf",
            "architecture": architecture,
            "types": {name.removesuffix(".weight"): one[0] for name, one in table.items() if len(one[1]) == 2},
        },
    }
    if architecture == "llama":
        config["quantization_config"]["turned"] = {
            "self_attn.q_proj": config["num_attention_heads"],
            "self_attn.k_proj": config.get("num_key_value_heads", config["num_attention_heads"]),
        }
        if "model.layers.0.self_attn.q_proj.bias" in table:
            raise CheckpointError(f"{path}: has biases of queries, whose order in llama's files is not known")
    head = config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    for name in ("attention.value_length", "rope.dimension_count"):
        if own.get(name, head) != head:
            raise CheckpointError(f"{path}: {prefix}{name} must be the size of a head, {head}, got {own[name]}")
    scaling = {name.removeprefix(_SCALING): value for name, value in own.items() if name.startswith(_SCALING)}
    rope = _rope(path, scaling, factors, config["max_position_embeddings"])
    return config | ({"rope_scaling": rope} if rope else {})


def _decimal(number: Any) -> Any:
    """Return the shortest decimal of a float32, which a config.json would have."""
    return float(str(np.float32(number))) if isinstance(number, float) else number


def _rope(path: Path, scaling: Mapping[str, Any], factors: list[float], longest: int) -> dict[str, Any] | None:
    kind = scaling.get("type", "none")
    if factors:
        if kind != "none":
            raise CheckpointError(
                f"{path}: has {_FREQUENCIES} and a scaled rope ({kind}), which are not known together"
            )
        lists = {"short_factor": factors, "long_factor": factors}
        return {"rope_type": "longrope", **lists, "attention_factor": 1.0, "original_max_position_embeddings": longest}
    makers: dict[str, Callable[[], dict[str, Any] | None]] = {
        "none": lambda: None,
        "linear": lambda: {"rope_type": "linear", "factor": _decimal(scaling["factor"])},
        "yarn": lambda: {
            "rope_type": "yarn",
            "factor": _decimal(scaling["factor"]),
            "original_max_position_embeddings": scaling["original_context_length"],
        },
    }
    known = {"type", "factor", "original_context_length", "finetuned"}
    if kind not in makers or scaling.keys() - known:
        raise CheckpointError(f"{path}: rope.scaling {dict(scaling)} is not known: supported are linear and yarn")
    try:
        return makers[kind]()
    except KeyError as error:
        raise CheckpointError(f"{path}: lacks rope.scaling.{error.args[0]}") from error
