"""The C++ operations for the tests: in the variant that serves here, and in the one without AVX-512."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gapless.device import build
from gapless.kernels import native
from gapless.kernels.seam import Kernels


@functools.cache
def load_native() -> Kernels:
    kernels = native.load()
    if kernels is None:
        pytest.skip(f"no C++ kernels here: {build.outcomes['kernels'].reason}")
    return kernels


def load_plain_variant(folder: Path) -> SimpleNamespace:
    """The same operators, built without AVX-512, as torch.ops.gapless_plain."""
    for source in native.SOURCES:
        shutil.copy(source, folder)
    (folder / "variant.h").write_text("#pragma once\n#define GAPLESS_PLAIN 1\n#define GAPLESS_LIBRARY gapless_plain\n")
    outcome = build.operators("kernels_plain", sorted(folder.iterdir()))
    if outcome.library is None:
        pytest.skip(f"no C++ kernels here: {outcome.reason}")
    return torch.ops.gapless_plain
