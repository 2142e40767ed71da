"""Weights from a Hugging Face directory of safetensors files, straight into the model's own tensors.

All headers are read and checked first (names, dtypes, shapes, byte ranges), so that a wrong checkpoint is refused
before any weight is read. Then each tensor is mapped, cast and copied to its place once. No pickle is ever opened.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gapless.base.errors import CheckpointError
from gapless.base.files import GGUF_NAME, GGUF_TABLE, INDEX, SINGLE, read_json
from gapless.base.progress import Count, announce, warn
from gapless.model.config import ModelConfig
from gapless.model.family import LLAMA_NAMES, TensorNames
from gapless.model.gguf_files import read_table
from gapless.model.gguf_tensors import GgufTensors
from gapless.model.params import allocate
from gapless.model.slots import StoredRows, TensorSlot
from gapless.model.slots import slots as slots_of

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
BYTES = {"F32": 4, "F16": 2, "BF16": 2}
ALL_BYTES = BYTES | {"I64": 8, "I32": 4, "I8": 1, "U8": 1, "F8_E4M3": 1}
MAX_FILE_HEADER_BYTES = 100_000_000
_ROWS = 8_192
"""Rows of two matrices that are compared at a time"""


class Entry(NamedTuple):
    """A tensor as the header of its file describes it."""

    dtype: str
    shape: tuple[int, ...]
    end: int
    """Bytes of the file up to the tensor's end"""
    nbytes: int


def tensor_names(directory: Path) -> frozenset[str]:
    """Return the names of all tensors of a checkpoint. Raises CheckpointError."""
    return frozenset(_places(directory))


def _places(directory: Path) -> dict[str, Path]:
    """Return which file has each tensor; an index decides between two."""
    files = weight_files(directory)
    found = {tensor: directory / name for name in files for tensor in _header(directory / name)}
    return found | {tensor: directory / name for name, promised in files.items() for tensor in promised}


def own_head(directory: Path, config: ModelConfig, dtype: torch.dtype) -> ModelConfig:
    """Return the config as its weights bear it out: a model is not tied where its files have another head.

    That is compared in `dtype`. Raises CheckpointError.
    """
    places, names, tied = _places(directory), config.names, config.spec.tied
    pair = f"{names.embedding}.weight", f"{names.head}.weight"
    if not tied or not {*pair} <= places.keys() or _are_equal(places, pair, dtype):
        return config
    warn(
        f"{places[pair[1]]}: tensor {pair[1]!r} is not the embedding, as tie_word_embeddings of config.json says, and "
        "is used: set it to false",
        file=str(places[pair[1]]),
    )
    return replace(config, spec=replace(config.spec, tied=False))


def _are_equal(places: dict[str, Path], pair: tuple[str, str], dtype: torch.dtype) -> bool:
    """Return whether the head is the embedding, as far as their files can be compared."""
    with opened(places[pair[0]]) as one, opened(places[pair[1]]) as other:
        first, second = one.get_slice(pair[0]), other.get_slice(pair[1])
        shape = first.get_shape()
        return shape == second.get_shape() and all(
            torch.equal(*(part[start : start + _ROWS].to(dtype) for part in (first, second)))
            for start in range(0, shape[0] if shape else 0, _ROWS)
        )


def load_weights(
    directory: Path, slots: dict[str, TensorSlot], unused: Collection[str] = (), names: TensorNames = LLAMA_NAMES
) -> None:
    """Fill every slot from the checkpoint in `directory`, which may have `unused` tensors beside them. If the head
    has no slot, it is the embedding, and may be there in its place.

    Raises CheckpointError naming the file and the tensor, if anything is missing, left over, truncated or mis-shaped.
    """
    slots, homes, headers = _find(directory, slots, unused, names)
    wanted = [headers[name][tensor] for name, tensors in homes.items() for tensor in tensors]
    count = announce("reading weights", sum(entry.nbytes for entry in wanted), "bytes")
    left = Counter(slots[tensor].part for tensors in homes.values() for tensor in tensors)
    for tensor, slot in slots.items():
        if slot.part is not None and not left[slot.part]:
            raise CheckpointError(f"{directory}: no tensor of {slot.part.module!r} is there, such as {tensor!r}")
    for name, tensors in homes.items():
        _copy(directory / name, tensors, slots, left, count)


def unread_tensors(directory: Path, config: ModelConfig, unused: Collection[str]) -> tuple[int, list[str]]:
    """Look at a checkpoint's headers as `load_weights` does. Returns the number of read tensors, and the unread ones.

    Raises CheckpointError.
    """
    slots = slots_of(config, allocate(config, torch.float32, torch.device("meta")))
    _, homes, headers = _find(directory, slots, unused, config.names)
    read = {(name, tensor) for name, tensors in homes.items() for tensor in tensors}
    rest = [tensor for name, header in headers.items() for tensor in header if (name, tensor) not in read]
    return len(read), rest


def warn_of_strays(directory: Path) -> None:
    """Warn of weights beside the checkpoint's, which nothing reads."""
    read = weight_files(directory)
    for path in sorted(directory.glob("*.safetensors")):
        if path.name not in read and not path.name.startswith("consolidated"):  # the same weights, in Mistral's form
            warn(f"{path}: is not read: {SINGLE if SINGLE in read else INDEX} counts", file=str(path))


def _find(
    directory: Path, slots: dict[str, TensorSlot], unused: Collection[str], names: TensorNames
) -> tuple[dict[str, TensorSlot], dict[str, list[str]], dict[str, dict[str, Entry]]]:
    """Return the slots by the names that the checkpoint has, the files of their tensors, and all headers."""
    files = weight_files(directory)
    headers = {name: _header(directory / name) for name in files}
    for name, promised in files.items():
        for tensor in promised:
            if tensor not in headers[name]:
                raise CheckpointError(f"{directory / name}: lacks tensor {tensor!r}, which {INDEX} says it holds")
    found = {tensor for header in headers.values() for tensor in header}
    embedding, head = f"{names.embedding}.weight", f"{names.head}.weight"
    if not any(tensor.startswith(names.base) for tensor in found):
        slots = {name.removeprefix(names.base): slot for name, slot in slots.items()}
        embedding = embedding.removeprefix(names.base)
    unread = {tensor for tensor in found if tensor.endswith(names.unread)} | {*unused}
    if embedding in slots and head not in slots:  # tied: either name will do
        if head in found and embedding not in found:
            slots = {head if name == embedding else name: slot for name, slot in slots.items()}
        else:
            unread.add(head)
    return slots, _homes(directory, headers, slots, unread, files), headers


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read every tensor of one file. Raises CheckpointError naming the file."""
    for name, entry in _header(path).items():
        if entry.dtype not in BYTES:
            raise CheckpointError(f"{path}: tensor {name!r} is {entry.dtype}; supported are {', '.join(BYTES)}")
    from safetensors import SafetensorError  # as in `opened`
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors ({error}); fetch it again") from error


def mapped_tensors(directory: Path) -> Iterator[tuple[Path, str, torch.Tensor]]:
    """Yield every tensor of a checkpoint, its memory mapped from the file. Raises CheckpointError naming the file."""
    places: dict[Path, list[str]] = defaultdict(list)
    for tensor, path in _places(directory).items():
        places[path].append(tensor)
    for path, tensors in places.items():
        header = _header(path)
        with opened(path) as file:
            for tensor in tensors:
                if tensor not in header:
                    raise CheckpointError(f"{path}: lacks tensor {tensor!r}, which {INDEX} says it holds")
                if header[tensor].dtype not in (*ALL_BYTES, "BOOL"):
                    kind = header[tensor].dtype
                    raise CheckpointError(f"{path}: tensor {tensor!r} is {kind}; supported are {', '.join(BYTES)}")
                yield path, tensor, file.get_tensor(tensor)


def weight_files(directory: Path) -> dict[str, tuple[str, ...]]:
    """Return the names of the weight files, each with the tensors that an index promises of it. Raises
    CheckpointError."""
    if (directory / GGUF_TABLE).exists():
        return {GGUF_NAME: ()}
    if (directory / SINGLE).exists():
        return {SINGLE: ()}
    if (directory / INDEX).exists():
        return _index_files(directory)
    for pattern in PICKLES:
        for path in sorted(directory.glob(pattern)):
            raise CheckpointError(
                f"{path}: pickled weights are not read, since they can run code; "
                f"convert the checkpoint to safetensors (save_pretrained writes {SINGLE})"
            )
    raise CheckpointError(f"{directory}: no weights: neither {SINGLE} nor {INDEX} is there")


def _index_files(directory: Path) -> dict[str, tuple[str, ...]]:
    path = directory / INDEX
    weight_map = (read_json(path) or {}).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map must be an object of tensor names to file names")
    files: dict[str, list[str]] = defaultdict(list)
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{path}: tensor {tensor!r} is said to be in {name!r}, "
                "which is not the plain name of a .safetensors file in this directory"
            )
        files[name].append(tensor)
    for name, tensors in files.items():
        if not (directory / name).is_file():
            raise CheckpointError(
                f"{directory / name}: no such file, but {INDEX} says it holds {tensors[0]!r}"
                + (f" and {len(tensors) - 1} more tensors" if len(tensors) > 1 else "")
                + "; fetch it again"
            )
    return {name: tuple(tensors) for name, tensors in files.items()}


def _header(path: Path) -> dict[str, Entry]:
    """The tensors of one file, with every byte range inside it."""
    if path.name == GGUF_NAME:
        table = read_table(path.parent)
        return {name: Entry(one.kind, one.shape, one.offset + one.nbytes, one.nbytes) for name, one in table.items()}
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, MAX_FILE_HEADER_BYTES):
                raise CheckpointError(f"{path}: truncated or not a safetensors file (no whole header); fetch it again")
            header = json.loads(file.read(length))
        entries = {name: _entry(path, name, e, 8 + length) for name, e in header.items() if name != "__metadata__"}
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: its safetensors header is not valid JSON; fetch it again") from error
    for name, entry in entries.items():
        if entry.end > size:
            raise CheckpointError(
                f"{path}: truncated: tensor {name!r} ends at byte {entry.end} of a file of {size}; fetch it again"
            )
    return entries


def _entry(path: Path, name: str, value: Any, data: int) -> Entry:
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        whole = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        whole = False
    if not whole:
        raise CheckpointError(f"{path}: tensor {name!r} has a malformed header entry; fetch the file again")
    # other dtypes are refused later, and only for tensors that are wanted
    size = ALL_BYTES.get(dtype)
    if size and end - begin != math.prod(shape) * size:
        raise CheckpointError(f"{path}: tensor {name!r} has {end - begin} bytes, which is not {dtype} {list(shape)}")
    return Entry(str(dtype), shape, data + end, end - begin)


def _homes(
    directory: Path, headers: dict[str, dict[str, Entry]], slots: dict[str, TensorSlot], unread: Collection[str],
    promised: dict[str, tuple[str, ...]],
) -> dict[str, list[str]]:  # fmt: skip
    """Return which file has each wanted tensor. Every slot is found once and fits, and nothing is left over."""
    homes: dict[str, list[str]] = defaultdict(list)
    owner: dict[str, str] = {}
    indexed = {tensor: name for name, tensors in promised.items() for tensor in tensors}
    for name, header in headers.items():
        for tensor, entry in header.items():
            if tensor in unread:
                continue
            _check_tensor(directory / name, tensor, entry, slots)
            if indexed.get(tensor, name) != name:
                warn(f"{directory / name}: tensor {tensor!r} is not read: {INDEX} has it in {indexed[tensor]}")
                continue
            if tensor in owner:
                raise CheckpointError(f"{directory / name}: tensor {tensor!r} is also in {owner[tensor]}; keep one")
            owner[tensor] = name
            homes[name].append(tensor)
    for tensor, slot in slots.items():
        if tensor not in owner and not slot.optional:
            where = directory / (INDEX if len(headers) > 1 else next(iter(headers)))
            raise CheckpointError(f"{where}: tensor {tensor!r} is missing; does config.json belong to these weights?")
    return homes


def _check_tensor(path: Path, tensor: str, entry: Entry, slots: dict[str, TensorSlot]) -> None:
    if tensor not in slots:
        raise CheckpointError(
            f"{path}: unexpected tensor {tensor!r}: the model of config.json has no place for it; "
            "does config.json belong to these weights?"
        )
    slot = slots[tensor]
    if entry.dtype not in slot.dtypes:
        raise CheckpointError(f"{path}: tensor {tensor!r} is {entry.dtype}; supported are {', '.join(slot.dtypes)}")
    if entry.shape != slot.shape and entry.shape not in slot.others:
        raise CheckpointError(
            f"{path}: tensor {tensor!r} has shape {list(entry.shape)}, but by config.json it must be {list(slot.shape)}"
        )


def _copy(
    path: Path, tensors: list[str], slots: dict[str, TensorSlot], left: dict[StoredRows | None, int], count: Count
) -> None:
    """Fill slots from a file; `left` counts the tensors of each part that are not read yet."""
    with opened(path) as file, torch.no_grad():
        for tensor in tensors:
            read, part = file.get_tensor(tensor), slots[tensor].part
            slots[tensor].fill(read)
            left[part] -= 1
            if part is not None and not left[part]:
                try:
                    part.put()
                except CheckpointError as error:
                    raise CheckpointError(f"{path}: {error}") from error
            count(read.nbytes)


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a file of weights. Raises CheckpointError naming it."""
    if path.name == GGUF_NAME:
        yield GgufTensors(path)
        return
    # imported here alone: the core needs torch and numpy only, and dummy weights need no file
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors ({error}); fetch it again") from error


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write a file of safetensors."""
    from safetensors.torch import save_file  # as in `opened`

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
