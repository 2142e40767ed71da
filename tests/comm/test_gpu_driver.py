"""The driver's calls, against libraries that note them."""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gapless.base.errors import ConfigError
from gapless.comm.cuda import CallWords
from gapless.device import driver, nvrtc
from gapless.device.driver import HANDLE_BYTES, Driver


class Function:
    """A C function: takes attributes as ctypes' do, notes its calls, and fills in what it gives back."""

    def __init__(self, owner: Library, name: str) -> None:
        self.owner, self.name = owner, name

    def __call__(self, *args: Any) -> Any:
        if self.name.endswith("GetErrorString"):
            return b"peer access is not supported"
        self.owner.calls.append((self.name, args))
        if self.name in ("cudaMalloc", "cudaIpcOpenMemHandle", "cuModuleGetFunction", "cudaHostGetDevicePointer"):
            ctypes.cast(args[0], ctypes.POINTER(ctypes.c_void_p))[0] = 4096 + len(self.owner.calls)
        return self.owner.code


class Library:
    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.code = 0

    def __getattr__(self, name: str) -> Function:
        function = Function(self, name)
        setattr(self, name, function)
        return function


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(driver.torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(driver.torch.cuda, "get_device_capability", lambda device: (9, 0))
    return library


def test_memory_is_zeroed_before_others_map_it(libraries: Library) -> None:
    one = Driver(torch.device("cuda", 0))
    address = one.take(2 << 20)
    assert [name for name, _ in libraries.calls] == ["cudaMalloc", "cudaMemset", "cudaDeviceSynchronize"]
    assert len(one.export(address)) == HANDLE_BYTES and one.open(bytes(HANDLE_BYTES)) > address
    assert one.on_device(1 << 20) > address
    one.fill(address, 1, 4, 7)
    assert libraries.calls[-1] == ("cudaMemsetAsync", (address, 1, 4, 7))
    one.close(address)
    one.free(address)
    libraries.code = 217
    with pytest.raises(RuntimeError, match="CUDA error: peer access is not supported"):
        one.open(bytes(HANDLE_BYTES))


def test_a_text_is_compiled_for_its_gpu_and_launched_with_one_argument(libraries: Library, monkeypatch) -> None:
    asked: list[Any] = []

    def compiled(*args: Any) -> bytes:
        asked.append(args)
        return b"binary"

    monkeypatch.setattr(driver, "compiled", compiled)
    one = Driver(torch.device("cuda", 0))
    kernels = one.kernels("sums", "text", {"WORLD": 2}, ("add", "tell"))
    assert asked == [("sums", "text", ("-DWORLD=2", "-arch=sm_90", "-std=c++17"))] and len({*kernels.values()}) == 2
    call = CallWords()
    one.launch(kernels["add"], 3, 512, call, 7)
    name, (kernel, *grid, shared, stream, places, extra) = libraries.calls[-1]
    assert (name, kernel, grid) == ("cuLaunchKernel", kernels["add"], [3, 1, 1, 512, 1, 1])
    assert (shared, stream, extra) == (0, 7, None) and places[0] == ctypes.addressof(call)


def test_a_torch_without_cuda_is_named() -> None:
    with pytest.raises(ConfigError, match="libcudart"):
        Driver(torch.device("cuda", 0))


def test_nvrtc_compiles_once_and_quotes_its_refusal(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    count, refused = [], SimpleNamespace(now=False)

    class Compiler(Library):
        def __getattr__(self, name: str) -> Any:
            def call(*args: Any) -> int:
                if name == "nvrtcCompileProgram":
                    count.append(args)
                    return int(refused.now)
                if name.endswith("Size"):
                    ctypes.cast(args[1], ctypes.POINTER(ctypes.c_size_t))[0] = 6
                elif name in ("nvrtcGetCUBIN", "nvrtcGetProgramLog"):
                    args[1].raw = b"binary" if name == "nvrtcGetCUBIN" else b"line 3"
                return 0

            return call

    monkeypatch.setattr(nvrtc, "find", Compiler)
    for _ in range(2):
        assert nvrtc.compiled("sums", "text", ("-arch=sm_90",)) == b"binary"
    assert len(count) == 1 and len(list(tmp_path.rglob("sums-*.cubin"))) == 1
    refused.now = True
    with pytest.raises(ConfigError, match=r"sums\.cu does not compile with -arch=sm_20: line 3"):
        nvrtc.compiled("sums", "text", ("-arch=sm_20",))


def test_a_machine_without_nvrtc_is_told_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(nvrtc.ctypes, "CDLL", missing)
    with pytest.raises(ConfigError, match=r"libnvrtc\.so\.\d+, which comes with torch"):
        nvrtc.find()
