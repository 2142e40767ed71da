"""The implementations of the kernels, by each of which a case runs that is here: torch, C++, Triton in its interpreter
and on CUDA."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from native_kernels import load_native

from gapless.kernels import native, plain
from gapless.kernels.seam import Kernels

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CPU, TRITON = ("torch", "native"), ("interpreter", "cuda")
EVERY = CPU + TRITON
DTYPES = {"torch": (F32, BF16), "native": native.NATIVE_DTYPES, "interpreter": (F32, F16), "cuda": (F32, F16, BF16)}
"""The interpreter computes bfloat16 wrongly."""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
QUIET = ("invalid value encountered", "overflow encountered")
"""What a GPU computes without a word, and NumPy in the interpreter with one: exp of a large number, -inf less -inf."""
MARKS = {
    "interpreter": [pytest.mark.filterwarnings(*(f"ignore:{words}" for words in QUIET))],
    # Triton 3.9 says once how its next version will differ.
    "cuda": [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset")],
}


class Implementation(NamedTuple):
    name: str
    device: str
    kernels: Kernels
    dtypes: tuple[torch.dtype, ...]
    """float32, and the numbers of 16 bits that it computes"""

    @property
    def half(self) -> torch.dtype:
        return F16 if self.name == "interpreter" else BF16


def runs(
    fields: str = "", every: Iterable[Any] = (), on: Iterable[str] = EVERY, keep: int | None = None,
    **more: Iterable[Any],
) -> pytest.MarkDecorator:  # fmt: skip
    """Run a test by each implementation `on`, with every case of `fields` (names between commas) and its own ones.

    `more`: cases of one implementation by its name, or of torch and C++ as `cpu`. `keep`: how many cases of each
    implementation `make test` runs. On CUDA all run.
    """
    names, params = [name.strip() for name in fields.split(",") if name.strip()], []
    for name in on:
        own = more.get(name, more.get("cpu", ()) if name in CPU else ())
        for number, case in enumerate([*every, *own] if names else [()]):
            late = [pytest.mark.seeds] if keep is not None and number >= keep and name != "cuda" else []
            values = case if len(names) != 1 else (case,)
            params.append(pytest.param(name, *values, marks=[*MARKS.get(name, ()), *late]))
    return pytest.mark.parametrize(("implementation", *names), params, indirect=["implementation"])


@pytest.fixture
def implementation(request: pytest.FixtureRequest) -> Implementation:
    return made(request.param)


@pytest.fixture
def new_memory_is_nan(implementation: Implementation) -> Iterator[None]:
    """A place that a kernel ought to write and does not is seen."""
    if implementation.name == "interpreter":
        torch.set_deterministic_debug_mode("error")
    yield
    torch.set_deterministic_debug_mode("default")


@functools.cache
def made(name: str) -> Implementation:
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs CUDA, and torch sees no CUDA device")
    kernels = load_native() if name == "native" else plain.KERNELS
    if name in TRITON:
        pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")
    if name == "cuda" or (name == "interpreter" and INTERPRETED):
        from gapless.kernels import all_triton

        kernels = all_triton.TRITON_KERNELS
    return Implementation(name, "cuda" if name == "cuda" else "cpu", kernels, DTYPES[name])
