"""The error of a program that asks for a part of CUDA that is not emulated: one sentence, with its name."""

from __future__ import annotations


class NotEmulatedError(NotImplementedError, AttributeError):
    """A program asked for a part of CUDA that is not emulated."""


def refuse(name: str) -> NotEmulatedError:
    """Return the error that names the missing part of the emulation."""
    return NotEmulatedError(f"not emulated: {name}")


_ABSENT = (
    ("active drivers", "kernels of Triton"), ("libcuda.so cannot", "kernels of Triton"),
    ("CUDA driver version is insufficient", ""), ("no CUDA-capable device", ""), ("without ATen_cuda", ""),
    ("Graph is not supported on device type", "torch.accelerator.Graph"), ("accelerator device when none is", ""),
    ("not compiled with CUDA", ""), ("not linked with support for cuda", ""), ("NVIDIA driver", ""),
    ("Work::getFuture not implemented", "the future of this collective's work"), ("with Gloo", "this reduction"),
    ("CUDA GPUs are available", ""), ("Legacy CUDA profiling", "the profiler of CUDA"),
    ("Unsupported dtype Half", "FFT of half-precision numbers"),
)  # fmt: skip
"""Words of errors that come of the absence of CUDA, and the part that is absent, if they name it."""


def refusal_of(error: BaseException, name: str) -> NotEmulatedError | None:
    """Return the error to raise in place of torch's "no CUDA"; `name` made it."""
    text = str(error)
    absent = next((what or name for words, what in _ABSENT if words in text), None)
    return None if absent is None or isinstance(error, NotEmulatedError) else refuse(absent)
