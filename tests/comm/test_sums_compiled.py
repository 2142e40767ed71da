"""sums.cu as NVRTC compiles it for a GPU that is not here: what it takes of one, and how it reaches shared memory."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from gapless.base.errors import ConfigError
from gapless.comm.cuda import SUM_KERNELS, SUMS_SOURCE, THREADS
from gapless.device import nvrtc

triton = pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")
pytestmark = pytest.mark.aot
TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@pytest.fixture(scope="module", params=[(2, 80), (2, 90), (8, 90)], ids=str)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    world, capability = request.param
    try:
        nvrtc.find()
    except ConfigError:
        pytest.skip("needs NVRTC: it comes with torch for CUDA, or as nvidia-cuda-nvrtc")
    options = (f"-DWORLD={world}", f"-arch=sm_{capability}", "-std=c++17")
    path = tmp_path_factory.mktemp("sums") / "sums.cubin"
    path.write_bytes(nvrtc.compiled("sums", SUMS_SOURCE.read_text(encoding="utf-8"), options))
    return path


def dumped(path: Path, what: str) -> str:
    return subprocess.run([TOOL, what, path], capture_output=True, text=True, check=True, timeout=120).stdout


def test_blocks_of_every_kernel_fit_a_multiprocessor_without_spills(compiled: Path):
    """`CudaGroup.connect` counts on a block for each, at least."""
    usage = re.findall(
        r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", dumped(compiled, "-res-usage")
    )
    assert {name for name, *_ in usage} == {*SUM_KERNELS}
    for name, registers, stack, shared, local in usage:
        assert int(registers) * THREADS <= 65536 and int(stack) <= 16 and not int(local) and int(shared) < 2048, name


def test_memory_of_ranks_is_written_and_read_past_all_caches(compiled: Path):
    text = dumped(compiled, "-sass")
    functions = {part.split("\n")[0].strip(): part for part in text.split("Function : ")[1:]}
    for name, code in functions.items():
        if name.startswith("norm"):
            continue
        if name in ("give", "take") or name.startswith("add_large"):
            assert "MEMBAR" in code and re.search(r"LDG?\.E\.STRONG\.SYS", code), f"{name}: flags without order"
        if not name.startswith(("give", "take", "add_large")):
            assert re.search(r"STG?\.E\.128\.STRONG\.SYS", code), f"{name}: cells are not stored whole"
            assert re.search(r"LDG?\.E\.128\.STRONG\.SYS", code), f"{name}: cells are not loaded whole"
