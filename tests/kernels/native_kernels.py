"""The C++ operations for the tests: in the variant that serves here, and in the one without AVX-512."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gapless.device import build
from gapless.kernels import native
from gapless.kernels.seam import Kernels

EMULATED = (
    "amx", "attention", "attention_amx", "attention_floats", "bytes", "bytes_amx", "bytes_pack", "linear_amx",
    "linear_floats", "linear_pack", "parallel",
)  # fmt: skip
"""The sources that emulated tiles are built with"""


@functools.cache
def load_native() -> Kernels:
    kernels = native.load()
    if kernels is None:
        pytest.skip(f"no C++ kernels here: {build.outcomes['kernels'].reason}")
    return kernels


def check_threads(layer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    """One thread and three give the same bits."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = layer(x)
        torch.set_num_threads(3)
        assert torch.equal(layer(x), alone)
    finally:
        torch.set_num_threads(before)


def load_plain_variant(folder: Path) -> SimpleNamespace:
    """The same operators, built without AVX-512, as torch.ops.gapless_plain."""
    for source in native.SOURCES:
        shutil.copy(source, folder)
    (folder / "variant.h").write_text("#pragma once\n#define GAPLESS_PLAIN 1\n#define GAPLESS_LIBRARY gapless_plain\n")
    outcome = build.operators("kernels_plain", sorted(folder.iterdir()))
    if outcome.library is None:
        pytest.skip(f"no C++ kernels here: {outcome.reason}")
    return torch.ops.gapless_plain


def build_emulated(folder: Path) -> Path:
    """Build the kernels for AMX with emulated tiles, as a library of the functions in emulated_amx.cpp."""
    for source in native.SOURCES:
        if source.suffix == ".h" or source.stem in EMULATED:
            shutil.copy(source, folder)
    for name, own in (("emulated_tiles.h", "tiles.h"), ("emulated_amx.cpp", "test.cpp")):
        shutil.copy(Path(__file__).parent / name, folder / own)
    outcome = build.build("amx_emulated", sorted(folder.iterdir()))
    if outcome.library is None:
        pytest.skip(f"no C++ here: {outcome.reason}")
    return Path(outcome.library)
