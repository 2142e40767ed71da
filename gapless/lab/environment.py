"""The machine under a measurement: its parts, whether it is quiet, and the state of its GPU."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

from gapless.base.host import memory, processor_says, usable_cores

_STAT = Path("/proc/stat")
_GPU_FIELDS = "name,clocks.sm,temperature.gpu,power.draw,power.limit,clocks_throttle_reasons.active"
BUSY_LOOK_SECONDS = 0.5
_VECTOR = (
    *("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx_vnni", "amx_int8", "amx_bf16", "amx_fp16"),
    *("asimd", "asimddp", "sve", "i8mm", "bf16"),
)
"""Instruction sets that decide how fast a model runs, as Linux names them on x86 and on ARM."""
_ALL_KEPT = ", kept to AVX2"
_LIBRARIES = {"oneDNN": "ONEDNN_MAX_CPU_ISA", "MKL": "MKL_ENABLE_INSTRUCTIONS"}
"""Parts of torch that choose instructions by themselves, with the variable that bounds each."""


def describe_host() -> dict[str, Any]:
    """Facts about this machine that matter to figures. No names: reports are published."""
    has = (processor_says("flags") or processor_says("Features")).split()
    kept = _kept_to_avx2() if "avx512f" in has else ""
    left = [name for name in has if not (kept == _ALL_KEPT and name.startswith(("avx512", "amx")))]
    return {
        "cpu": (processor_says("model name") or platform.processor() or platform.machine()) + kept,
        "vector": [name for name in _VECTOR if name in left],
        "cores": usable_cores(),
        "memory_bytes": memory()[1],
        "system": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        "python": platform.python_version(),
        "gpus": [state["name"] for state in gpu_states()],
    }


def _kept_to_avx2() -> str:
    """Return what the environment keeps from AVX-512 and AMX, to follow the processor's name; empty for nothing."""
    if os.environ.get("ATEN_CPU_CAPABILITY") != "avx2":  # which torch obeys, and with it our C++
        return ""
    free = [name for name, variable in _LIBRARIES.items() if os.environ.get(variable, "").upper() != "AVX2"]
    return f"{_ALL_KEPT} but for {' and '.join(free)}" if free else _ALL_KEPT


def load_average() -> float | None:
    """Processes that ran or wanted to, over the last minute; None where the system does not count."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def wait_until_quiet(busy: float, seconds: float) -> float | None:
    """Wait until at most a share `busy` of the machine's processors works, `seconds` at most.

    Returns the share in the last half second; None, at once, if the system does not report it.
    """
    end = time.monotonic() + seconds
    while True:
        share = _busy_share()
        if share is None or share <= busy or time.monotonic() >= end:
            return share


def gpu_states() -> list[dict[str, str]]:
    """Clock, temperature, power and throttling of each NVIDIA GPU, in nvidia-smi's words; none without that tool."""
    command = ["nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []  # no such tool, or one without a driver: the report has no GPUs then
    names = _GPU_FIELDS.split(",")
    return [dict(zip(names, map(str.strip, line.split(",")), strict=False)) for line in said.strip().splitlines()]


def _busy_share() -> float | None:
    before = _ticks()
    if before is None:
        return None
    time.sleep(BUSY_LOOK_SECONDS)
    after = _ticks()
    assert after is not None
    passed = after[1] - before[1]
    return round((after[0] - before[0]) / passed, 3) if passed else None


def _ticks() -> tuple[int, int] | None:
    """(busy, all) clock ticks of all processors since boot."""
    try:
        words = _STAT.read_text().splitlines()[0].split()[1:9]
    except OSError:
        return None
    ticks = [int(word) for word in words]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)
