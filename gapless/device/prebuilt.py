"""Libraries that a wheel brings along: for levels of processors, one minor version of torch and some of Python.

torch's C++ changes between minor versions, and promises nothing between them: where none fits, `build` compiles.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from gapless.base.host import processor_says
from gapless.device import compiling

PREBUILT = Path(__file__).parent / "prebuilt"
SWITCH = "GAPLESS_PREBUILT"
"""0 in this environment variable: what a wheel brings is not used."""
V2 = frozenset({"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"})
V3_FLAGS = V2 | compiling.V3_NEEDS
AMX_FLAGS = "-mamx-tile", "-mamx-bf16", "-mamx-int8"
V4 = V3_FLAGS | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


class Variant(NamedTuple):
    """A level of processors."""

    name: str
    machine: str
    flags: tuple[str, ...]
    """The compiler's"""
    needs: frozenset[str] = frozenset()
    """Flags that /proc/cpuinfo must have"""


VARIANTS = (
    Variant(
        # AMX serves where processor and Linux have it: kernels/native/amx.cpp asks both.
        "x86-64-v4-amx",
        "x86_64",
        ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", *AMX_FLAGS, "-mtune=sapphirerapids"),
        V4 | {"avx512_vnni", "avx512_bf16"},
    ),
    Variant("x86-64-v4", "x86_64", ("-march=x86-64-v4", "-mtune=skylake-avx512"), V4),
    Variant("x86-64-v3", "x86_64", ("-march=x86-64-v3", "-mtune=haswell"), V3_FLAGS),
    Variant("x86-64-v2", "x86_64", ("-march=x86-64-v2",), V2),
    Variant(
        "armv8.2-bf16",
        "aarch64",
        ("-march=armv8.2-a+dotprod+bf16+i8mm",),
        frozenset({"asimddp", "asimdrdm", "atomics", "bf16", "crc32", "i8mm"}),
    ),
    Variant("armv8", "aarch64", ("-march=armv8-a",)),
)
"""Levels of processors, the best of each machine first"""


def find(name: str) -> tuple[Path, Variant] | None:
    """Return the library of this name that is the best for this processor and fits this torch."""
    release = minor(torch.__version__)
    if not release or os.environ.get(SWITCH) == "0" or not PREBUILT.is_dir():
        return None
    fitting = ((PREBUILT / file_name(name, release, variant), variant) for variant in VARIANTS if serves_here(variant))
    return next((found for found in fitting if found[0].exists()), None)


def serves_here(variant: Variant) -> bool:
    """Whether this processor is of the level, and torch may use all of that: see `compiling.is_capped`."""
    if variant.machine != platform.machine() or (variant.needs >= V4 and compiling.is_capped()):
        return False
    return variant.needs <= set((processor_says("flags") or processor_says("Features")).split())


def minor(version: str) -> str:
    """Return `2.13` of `2.13.0+cpu`; empty for anything but a release."""
    found = re.fullmatch(r"(\d+\.\d+)\.\d+(\+\w+)?", version)
    return found[1] if found else ""


def file_name(name: str, release: str, variant: Variant) -> str:
    return f"{name}.torch{release}.{variant.name}.so"


def of_python(name: str, tag: str = sys.implementation.cache_tag + getattr(sys, "abiflags", "")) -> str:
    """Return the name of a Python extension: such a library serves one version of Python, with its lock or without."""
    return f"{name}.{tag}"
