"""All ways to read and to write pinned memory on the host, each while a copy is in flight and after its event."""

from __future__ import annotations

import array
import copy
import ctypes
import hashlib
import io
import os
import pickle
import socket
import struct
import subprocess
import sys
import textwrap
import zlib
from collections.abc import Callable
from multiprocessing import resource_sharer
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing

from gapless.guard.detectors import Detectors

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here, so nothing is emulated"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated", "ignore:Creating a tensor from a list of numpy"),
]
ROOT = Path(__file__).parents[2]

Way = Callable[[torch.Tensor, Any], object]
"""Takes pinned memory, as a tensor and as an array."""


def sends(view: Any) -> None:
    one, other = socket.socketpair()
    with one, other:
        one.sendall(view)


def to_file(view: Any) -> None:
    with open(os.devnull, "wb") as file:
        view.tofile(file)


def descriptor_write(view: Any) -> None:
    with open(os.devnull, "wb", buffering=0) as file:
        os.write(file.fileno(), view)


def send_to_process(tensor: torch.Tensor) -> None:
    ForkingPickler.dumps(tensor)
    resource_sharer.stop()  # its thread would outlive the detectors


def safetensors_save(tensor: torch.Tensor) -> bytes:
    module = pytest.importorskip("safetensors.torch")
    saved: bytes = module.save({"x": tensor})
    return saved


# Every method of numpy's arrays that reads, with arguments that suit 16 floats.
METHODS: dict[str, tuple[Any, ...]] = {
    **{name: () for name in (
        "all", "any", "argmax", "argmin", "argsort", "byteswap", "copy", "cumprod", "cumsum",
        "dumps", "flatten", "max", "mean", "min", "nonzero", "prod", "round", "std", "sum", "tobytes", "tolist", "var",
    )},
    "argpartition": (3,), "astype": ("int32",), "choose": None, "clip": (0, 1), "compress": ([True],), "dot": (1.0,),
    "dump": None, "item": (3,), "repeat": (2,), "searchsorted": (1.0,), "take": ([1],), "tofile": None, "trace": None,
}  # type: ignore[dict-item]  # fmt: skip
READS: dict[str, Way] = {
    **{name: lambda t, v, name=name, args=args: getattr(v, name)(*args)
       for name, args in METHODS.items() if args is not None},
    "choose": lambda t, v: v.view(np.int32).choose([np.zeros(16)], mode="clip"),
    "dump": lambda t, v: v.dump(os.devnull),
    "tofile": lambda t, v: to_file(v),
    "trace": lambda t, v: v.reshape(4, 4).trace(),
    # Operators and functions of numpy.
    "operator": lambda t, v: v + 1,
    "comparison": lambda t, v: v == 1,
    "operand": lambda t, v: np.ones(16, np.float32) - v,
    "matrix product": lambda t, v: v @ np.ones(16),
    "ufunc": lambda t, v: np.exp(v),
    "reduction": lambda t, v: np.add.reduce(v),
    "function": lambda t, v: np.concatenate([v, v]),
    "numpy.sum": lambda t, v: np.sum(v),
    "numpy.save": lambda t, v: np.save(io.BytesIO(), v),
    "numpy.savez": lambda t, v: np.savez(io.BytesIO(), x=v),
    "numpy.array": lambda t, v: np.array(v),
    "numpy.array of rows": lambda t, v: np.array([v, v]),
    "numpy.array of a tensor": lambda t, v: np.array(t),
    "numpy.asarray": lambda t, v: np.asarray(v) + 1,
    "numpy.asarray of a tensor": lambda t, v: np.asarray(t).sum(),
    "numpy.asarray to another type": lambda t, v: np.asarray(v, np.float64),
    "numpy.require": lambda t, v: np.require(v, np.float64),
    "numpy.frombuffer": lambda t, v: np.frombuffer(v, np.uint8).sum(),
    "numpy.fromiter": lambda t, v: np.fromiter(v, np.float32),
    "numpy.from_dlpack": lambda t, v: np.from_dlpack(t).sum(),
    "by address": lambda t, v: np.ctypeslib.as_array((ctypes.c_float * 16).from_address(t.data_ptr())),
    "copyto": lambda t, v: np.copyto(np.zeros(16, np.float32), v),
    "view": lambda t, v: v.reshape(4, 4).T[1:3].sum(),
    "transposed": lambda t, v: v.reshape(4, 4).T.tolist(),
    "contiguous part of a view": lambda t, v: hashlib.sha256(v[::2][:1]),
    "transposed twice": lambda t, v: hashlib.sha256(v.reshape(4, 4).T.T),
    "view of bytes": lambda t, v: v.view(np.uint8)[:4].tolist(),
    "function of a view": lambda t, v: np.split(v, 4)[1].sum(),
    # Elements.
    "element": lambda t, v: v[3],
    "list of elements": lambda t, v: v[[1, 3]],
    "mask": lambda t, v: v[np.arange(16) < 3],
    "iteration": lambda t, v: list(v),
    "iteration over rows": lambda t, v: [row.sum() for row in v.reshape(4, 4)],
    "contains": lambda t, v: 1.0 in v,
    "float": lambda t, v: float(v[:1].reshape(())),
    "bool": lambda t, v: bool(v[:1]),
    "flat": lambda t, v: list(v.flat),
    "repr": lambda t, v: repr(v),
    "str": lambda t, v: str(v),
    "format": lambda t, v: f"{v[0:1].reshape(())}",
    # Copies and files.
    "pickle": lambda t, v: pickle.dumps(v),
    "pickle by reference": lambda t, v: pickle.dumps(v, 5, buffer_callback=[].append),
    "copy.copy": lambda t, v: copy.copy(v),
    "copy.deepcopy": lambda t, v: copy.deepcopy(v),
    "pickle of a tensor": lambda t, v: pickle.dumps(t),
    "deepcopy of a tensor": lambda t, v: copy.deepcopy(t),
    "torch.save": lambda t, v: torch.save(t, io.BytesIO()),
    "torch.save of a state": lambda t, v: torch.save({"model": {"w": t[2:6]}}, io.BytesIO()),
    "torch.save in the old form": lambda t, v: torch.save(t, io.BytesIO(), _use_new_zipfile_serialization=False),
    "safetensors": lambda t, v: safetensors_save(t),
    "sent to a process": lambda t, v: send_to_process(t),
    "array sent to a process": lambda t, v: ForkingPickler.dumps(v),
    # Buffers.
    "bytes": lambda t, v: bytes(v),
    "bytearray": lambda t, v: bytearray(v),
    "memoryview": lambda t, v: memoryview(v).tolist(),
    "data": lambda t, v: v.data.tobytes(),
    "file": lambda t, v: io.BytesIO().write(v),
    "file descriptor": lambda t, v: descriptor_write(v),
    "socket": lambda t, v: sends(v),
    "join": lambda t, v: b"".join([v.view(np.uint8)]),
    "hashlib": lambda t, v: hashlib.sha256(v),
    "hash updated": lambda t, v: hashlib.md5(usedforsecurity=False).update(v[:4]),
    "zlib": lambda t, v: zlib.compress(v),
    "crc": lambda t, v: zlib.crc32(v),
    "struct": lambda t, v: struct.unpack_from("f", v),
    "array.array": lambda t, v: array.array("b").frombytes(v.view(np.uint8)),
    "int": lambda t, v: int.from_bytes(v[:1], "little"),
    # Tensors, which are operators, and storages.
    "tolist of a tensor": lambda t, v: t.tolist(),
    "item of a tensor": lambda t, v: t[3].item(),
    "operator of torch": lambda t, v: t + 1,
    "clone": lambda t, v: t.clone(),
    "torch.tensor": lambda t, v: torch.tensor(v),
    "torch.tensor of rows": lambda t, v: torch.tensor([v, v]),
    "new_tensor": lambda t, v: torch.zeros(1).new_tensor(v),
    "torch.as_tensor": lambda t, v: torch.as_tensor(v).sum(),
    "torch.from_dlpack": lambda t, v: torch.from_dlpack(v).sum(),
    "torch.frombuffer": lambda t, v: torch.frombuffer(v, dtype=torch.uint8).sum(),
    "numpy by force": lambda t, v: t.numpy(force=True).sum(),
    "apply_": lambda t, v: t.apply_(lambda x: x),
    "storage as a list": lambda t, v: t.untyped_storage().tolist(),
    "element of a storage": lambda t, v: t.untyped_storage()[3],
    "bytes of a storage": lambda t, v: bytes(t.untyped_storage()),
    "clone of a storage": lambda t, v: t.untyped_storage().clone(),
    "pickle of a storage": lambda t, v: pickle.dumps(t.untyped_storage()),
    "typed storage": lambda t, v: t.storage()[3],
}  # fmt: skip
WRITES: dict[str, Way] = {
    "element": lambda t, v: v.__setitem__(3, 2),
    "slice": lambda t, v: v.__setitem__(slice(4), 2),
    "list": lambda t, v: v.__setitem__([3, 1], 2),
    "mask": lambda t, v: v.__setitem__(np.arange(16) == 3, 2),
    "in place": lambda t, v: v.__iadd__(1),
    "view": lambda t, v: v.reshape(4, 4)[1:3, 1:3].__imul__(2),
    "row": lambda t, v: next(iter(v.reshape(4, 4))).fill(2),
    "ufunc": lambda t, v: np.add(v, 1, out=v),
    "at": lambda t, v: np.add.at(v, [1], 1),
    "out": lambda t, v: np.stack([np.ones(8), np.ones(8)], out=v.reshape(2, 8)),
    "out of a method": lambda t, v: np.ones(16, np.float32).clip(0, 1, out=v),
    "out of its method": lambda t, v: v.round(out=v),
    "copyto": lambda t, v: np.copyto(v, 3),
    "numpy.put": lambda t, v: np.put(v, [1], 2),
    "place": lambda t, v: np.place(v, np.arange(16) < 3, [2]),
    "putmask": lambda t, v: np.putmask(v, np.arange(16) < 3, 2),
    "fill_diagonal": lambda t, v: np.fill_diagonal(v.reshape(4, 4), 2),
    "put_along_axis": lambda t, v: np.put_along_axis(v, np.array([1]), 2, 0),
    "fill": lambda t, v: v.fill(2),
    "sort": lambda t, v: v.sort(),
    "partition": lambda t, v: v.partition(3),
    "put": lambda t, v: v.put([1], 2),
    "byteswap": lambda t, v: v.byteswap(True),
    "setfield": lambda t, v: v.setfield(2, np.float32),
    "flat": lambda t, v: setattr(v, "flat", 2),
    "real": lambda t, v: setattr(v, "real", 2),
    "readinto": lambda t, v: io.BytesIO(b"1" * 16).readinto(v),
    "pack_into": lambda t, v: struct.pack_into("f", v, 0, 2.0),
    "asarray": lambda t, v: np.asarray(v).fill(2),
    "asarray of a tensor": lambda t, v: np.asarray(t).fill(2),
    "frombuffer": lambda t, v: np.frombuffer(v, np.uint8).__setitem__(3, 2),
    "from_dlpack": lambda t, v: np.from_dlpack(t).fill(2),
    "fill_ of a tensor": lambda t, v: t.fill_(2),
    "item of a tensor": lambda t, v: t.__setitem__(3, 2),
    "alias": lambda t, v: torch.from_numpy(v).zero_(),
    "torch.frombuffer": lambda t, v: torch.frombuffer(v, dtype=torch.uint8).zero_(),
    "apply_": lambda t, v: t.apply_(lambda x: x),
    "fill_ of a storage": lambda t, v: t.untyped_storage().fill_(2),
    "element of a storage": lambda t, v: t.untyped_storage().__setitem__(3, 2),
    "copy_ of a storage": lambda t, v: t.untyped_storage().copy_(torch.ones(16).untyped_storage()),
    "typed storage": lambda t, v: t.storage().__setitem__(3, 2),
}  # fmt: skip
# None of these reads or writes memory.
ASKS: dict[str, Way] = {
    "shape": lambda t, v: (v.shape, np.shape(v), len(v), v.dtype, v.nbytes, v.flags, v.strides),
    "views": lambda t, v: (
        v[2:4],
        v.reshape(4, 4).T,
        v.view(np.uint8),
        np.split(v, 2),
        np.expand_dims(v, 0),
        v.real,
        v.conj(),
    ),
    "rows": lambda t, v: list(v.reshape(4, 4)),
    "address": lambda t, v: (v.ctypes.data, v.__array_interface__, t.data_ptr()),
    "aliases": lambda t, v: (torch.from_numpy(v), np.asarray(v), t.numpy(), np.asarray(t), np.frombuffer(v)),
    "other arrays": lambda t, v: (np.empty_like(v), np.zeros_like(v), np.may_share_memory(v, v)),
    "storage": lambda t, v: (t.untyped_storage().nbytes(), t.untyped_storage().data_ptr(), t.storage().size()),
    "torch.frombuffer": lambda t, v: torch.frombuffer(v, dtype=torch.uint8),
    "reference": lambda t, v: copy.copy(t),
}


def rules(way: Way, up: bool, waits: bool) -> list[str]:
    """Use pinned memory in one way after a copy of it, and perhaps after the copy's event; returns what is found."""
    detectors = Detectors(["race"], emulate_cuda=True)
    with detectors:
        host, device, done = torch.ones(16, pin_memory=True), torch.zeros(16, device="cuda"), torch.cuda.Event()
        view = host.numpy()
        device.copy_(host, non_blocking=True) if up else host.copy_(device, non_blocking=True)
        done.record()
        if waits:
            done.synchronize()
        way(host, view)
    return [entry.finding.rule for entry in detectors.findings()]


@pytest.mark.parametrize("name", READS)
def test_a_read_of_a_download_waits_for_its_event(name):
    assert rules(READS[name], up=False, waits=False) == ["race"]
    assert rules(READS[name], up=False, waits=True) == []


@pytest.mark.parametrize("name", [name for name in READS if name not in ("apply_", "sent to a process")])
def test_a_read_beside_an_upload_is_no_race(name):
    assert rules(READS[name], up=True, waits=False) == []


def test_a_part_that_has_come_may_be_saved_while_another_is_in_flight():
    def save(host, view):
        host[:4].copy_(torch.zeros(4, device="cuda"), non_blocking=True)
        torch.save(host[8:], io.BytesIO())
        pickle.dumps(host[8:])
        view[8:].tobytes()

    assert rules(save, up=False, waits=True) == []


@pytest.mark.parametrize("name", WRITES)
def test_a_write_waits_for_a_copy_in_either_direction(name):
    for up in (True, False):
        assert rules(WRITES[name], up, waits=False) == ["race"]
        assert rules(WRITES[name], up, waits=True) == []


@pytest.mark.parametrize("name", ASKS)
def test_a_question_about_memory_in_flight_is_no_access(name):
    for up in (True, False):
        assert rules(ASKS[name], up, waits=False) == []


@pytest.mark.parametrize("name", ["array", "asarray", "asanyarray", "ascontiguousarray", "asfortranarray"])
def test_arrays_of_none_and_calls_without_an_array_are_as_numpys(name):
    def makes(tensor, view):
        make = getattr(np, name)
        assert make(None).tolist() in (None, [None])
        assert make(**{"object" if name == "array" else "a": None}).dtype == object
        with pytest.raises(TypeError, match="required"):
            make()

    makes(None, None)
    assert rules(makes, up=False, waits=True) == []


def test_tensors_that_require_gradients_are_refused_as_without_the_guard():
    def makes(tensor, view):
        tensor.requires_grad_()
        with pytest.raises(RuntimeError, match="requires grad"):
            np.asarray(tensor)
        with pytest.raises(BufferError, match="require gradient"):
            np.from_dlpack(tensor)

    assert rules(makes, up=False, waits=True) == []


def test_every_method_of_arrays_is_in_the_tables():
    views = {"conj", "conjugate", "diagonal", "getfield", "ravel", "reshape", "squeeze", "swapaxes", "transpose"}
    views |= {"view", "setflags", "to_device", "resize"}
    public = {name for name, value in vars(np.ndarray).items() if callable(value) and not name.startswith("_")}
    assert public - views <= METHODS.keys() | WRITES.keys()


@pytest.mark.parametrize(
    "take",
    [
        lambda v: hashlib.sha256(v[::2]),
        lambda v: hashlib.sha256(v.reshape(4, 4).T),
        lambda v: io.BytesIO().write(v[::2]),
    ],
)
def test_a_refused_buffer_raises_numpys_error_and_the_array_is_as_before(take):
    detectors = Detectors(["race"], emulate_cuda=True)
    with detectors:
        view = torch.ones(16, pin_memory=True).numpy()
        with pytest.raises((ValueError, BufferError), match="contiguous"):
            take(view)
        assert bytes(view[::2]) == np.ones(8, np.float32).tobytes()
    assert detectors.findings() == []


def test_memory_that_is_read_only_is_given_out_for_reading_alone(capfd):
    def uses(tensor, view):
        view.flags.writeable = False
        with pytest.raises(TypeError):
            io.BytesIO(b"1").readinto(view)
        assert len(memoryview(view)) == len(np.frombuffer(view, np.float32)) == 16

    assert rules(uses, up=True, waits=False) == []
    assert capfd.readouterr().err == ""


def test_a_watched_array_is_named_as_an_array():
    def names(tensor, view):
        assert {str(type(one)) for one in (view, view[::2], view.reshape(4, 4).T)} == {"<class 'numpy.ndarray'>"}
        assert type(view).__qualname__ == "ndarray"

    names(None, np.ones(16))
    assert rules(names, up=True, waits=False) == []


@pytest.mark.process
def test_buffers_are_given_out_beside_threads_and_garbage_collection():
    program = """
        import gc, hashlib, pickle, threading
        import numpy as np
        from gapless.guard.race_arrays import watched

        noted = []
        def give_out(seed):
            for n in range(3000):
                array = watched(np.arange(64.0), lambda region, kind: noted.append(kind))[n % 60 :]
                view = memoryview(array)
                assert bytes(view) == array.tobytes() and len(pickle.dumps(array)) > 20
                hashlib.sha256(array).digest()
                try:
                    hashlib.sha256(array[::2])
                except (ValueError, BufferError):
                    pass
                ring = [array, view]
                ring.append(ring)
                if n % 100 == seed:
                    gc.collect()
        gc.set_threshold(50)
        threads = [threading.Thread(target=give_out, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        kept = memoryview(watched(np.arange(4.0), lambda region, kind: noted.append(kind)))
        print(len(noted) > 30000)
    """
    command = [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(program)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr[-2000:]
