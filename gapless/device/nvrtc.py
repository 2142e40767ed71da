"""CUDA C++ compiled at a start by NVRTC, which torch brings along; kept in the user's cache folder."""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from gapless.base.errors import ConfigError
from gapless.base.host import cache_folder
from gapless.device.build import CACHE_FOLDER


def compiled(name: str, text: str, options: tuple[str, ...]) -> bytes:
    """Return the binary of a source text, from the cache or compiled now.

    Raises:
        ConfigError: there is no NVRTC here, or it refuses the text for this GPU.
    """
    library = find()
    key = hashlib.sha256("\0".join((text, *options, *map(str, _version(library)))).encode()).hexdigest()[:24]
    try:
        kept = cache_folder(CACHE_FOLDER) / f"{name}-{key}.cubin"
        with suppress(FileNotFoundError):
            return kept.read_bytes()
    except (OSError, RuntimeError):  # no home: every start compiles
        return _compile(library, name, text, options)
    binary = _compile(library, name, text, options)
    with suppress(OSError):
        _keep(kept, binary)
    return binary


def _keep(path: Path, binary: bytes) -> None:
    # Ranks that start together write the same bytes: whole files only take their place.
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(binary)
    os.replace(file.name, path)


def find() -> ctypes.CDLL:
    """Return NVRTC of torch's version of CUDA. Raises ConfigError where there is none."""
    version: Any = torch.version.cuda
    major = (version or "13").split(".")[0]
    packages = Path(torch.__file__).parent.parent
    with suppress(OSError):
        ctypes.CDLL(str(packages / "torch" / "lib" / "libcaffe2_nvrtc.so"))  # it finds and loads torch's own
    places = [f"libnvrtc.so.{major}", *map(str, packages.glob(f"nvidia/*/lib/libnvrtc.so.{major}"))]
    places += map(str, (packages / "torch" / "lib").glob(f"libnvrtc*.so.{major}*"))
    for place in places:
        with suppress(OSError):
            return ctypes.CDLL(place)
    raise ConfigError(
        f"several ranks on CUDA need libnvrtc.so.{major}, which comes with torch: reinstall torch for CUDA"
    )


def _version(library: ctypes.CDLL) -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def _compile(library: ctypes.CDLL, name: str, text: str, options: tuple[str, ...]) -> bytes:
    program = ctypes.c_void_p()
    made = library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), f"{name}.cu".encode(), 0, None, None)
    assert not made, f"nvrtcCreateProgram: {made}"
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), given):
            log = _read(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program).decode(errors="replace")
            raise ConfigError(f"{name}.cu does not compile with {' '.join(options)}: {log.strip()[:500]}")
        return _read(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _read(size_of: Any, read: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    assert not size_of(program, ctypes.byref(size))
    found = ctypes.create_string_buffer(size.value)
    assert not read(program, found)
    return found.raw
