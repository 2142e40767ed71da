"""Records a program: one eager run under a dispatch mode gives the list of its operators, to be replayed.

Shared by the devices that have no graphs of their own. Tensors that the program makes become numbered places; all
others are outside: the tape keeps them, and their addresses are part of it. Views of outside tensors are resolved
here and now and never again, since their addresses cannot change.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Hashable, Sequence
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gapless.base import observe
from gapless.base.errors import CaptureError
from gapless.device.schemas import OperatorSchema
from gapless.device.seam import Device, Program, Stream

T = TypeVar("T")
_STRIDED = torch.strided
_NOT_THE_PROGRAM = (os.path.dirname(torch.__file__) + os.sep, __file__)
"""Prefixes of the names of files whose frames are not the program's own."""
_MODES = ("__torch_dispatch__", "__torch_function__")


class Place(int):
    """The number of a tensor that the program makes, in the arguments and results of calls."""


class Call(NamedTuple):
    """One operator of a tape."""

    op: Any
    args: tuple[Any, ...]
    """All arguments in the order of the schema. Tensors that the program made are Places, in lists too."""
    named: tuple[str, ...]
    """Names of the last arguments, which are passed by name alone."""
    results: Any
    """A Place for every tensor that is new, None for the others; in the shape of what the operator returns."""
    drops: tuple[int, ...]
    """Places that no later call needs."""


class Tape(NamedTuple):
    name: str
    calls: tuple[Call, ...]
    places: int
    reads: tuple[Tensor, ...]
    """Views of the exact ranges outside the tape that its operators only read"""
    writes: tuple[Tensor, ...]
    """Views of the ranges that they write, or read and write"""

    def replay(self) -> None:
        """Run the operators again, from Python."""
        places: list[Any] = [None] * self.places
        for op, given, named, results, drops in self.calls:
            args = filled(given, places)
            plain = len(args) - len(named)
            made = op(*args[:plain], **dict(zip(named, args[plain:], strict=True))) if named else op(*args)
            keep(places, results, made)
            for place in drops:
                places[place] = None


def record(name: str, program: Program, buffers: Sequence[Any]) -> Tape:
    """Run `program(*buffers)` once, here and now, and return its record. Raises CaptureError if it would wait for a
    device, or moves an outside tensor."""
    recorder, line = Recorder(name), _line()
    for tensor in _all_of(Tensor, buffers):
        recorder.meet(tensor, line)
    with torch.inference_mode(), recorder, observe.capture_check(name), _Assignments(recorder):
        program(*buffers)
    return recorder.tape()


class _Assignments(TorchFunctionMode):
    """A mode that sees `tensor.data = other`, which no operator shows."""

    _SET_DATA: Any = vars(torch._C.TensorBase)["data"].__set__

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == self._SET_DATA:
            self._recorder.refuse("`.data =` gives a tensor another address")
        return func(*args, **kwargs) if kwargs else func(*args)


class _Outside(NamedTuple):
    """A tensor that the program did not make, as it was when it was first used."""

    tensor: Tensor
    address: int
    size: tuple[int, ...]
    line: tuple[str, int]
    """The line of the program that used it."""


class PlainMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that torch does not wrap against its compiler.

    The wrapper would import the compiler at the first operation, and every operation would go through it.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Recorder(PlainMode):
    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name = name
        self._calls: list[tuple[OperatorSchema, tuple[Any, ...], Any]] = []
        self._places: dict[int, Place] = {}
        """The place of each living tensor, by id. The recorder keeps no tensor itself, so a recorded run needs no more
        memory than any other."""
        self._made = 0
        self._watching: dict[int, weakref.ref[Tensor]] = {}
        """Weak references that report the death of a tensor, by its id."""
        self._own: dict[int, int] = {}
        """Storages that the program made, and how many tensors each holds."""
        self._outside: dict[int, _Outside] = {}
        self._reads: dict[tuple[Any, ...], Tensor] = {}
        self._writes: dict[tuple[Any, ...], Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        schema = OperatorSchema.of(func)
        given = schema.in_order(args, kwargs or {})
        if schema.moves and not self._is_own(given[0]):
            self.refuse(f"{func} may give a tensor that was there before another address")
        tensors = _all_of(Tensor, [given[at] for at in schema.places])
        for tensor in tensors:
            self.meet(tensor)
        result = func(*args, **kwargs) if kwargs else func(*args)
        self._note(schema, given, tensors, result)
        return result

    def tape(self) -> Tape:
        """Return the record. Raises CaptureError when an outside tensor has moved."""
        for found in self._outside.values():
            if _address(found.tensor) != found.address or tuple(found.tensor.shape) != found.size:
                self.refuse("a tensor that was there before has another address or size now", found.line)
        calls = tuple(_with_drops(self._calls))
        return Tape(self._name, calls, self._made, (*self._reads.values(),), (*self._writes.values(),))

    def _note(self, schema: OperatorSchema, given: tuple[Any, ...], tensors: list[Tensor], result: Any) -> None:
        made = [tensor for tensor in _all_of(Tensor, result) if id(tensor) not in self._places]
        new = [tensor for tensor in made if id(tensor) not in self._outside]
        outside = {storage for storage in map(_storage, tensors) if storage not in self._own}
        if outside and not schema.changes and made and all(_storage(tensor) in outside for tensor in made):
            for tensor in new:
                self.meet(tensor)
            return
        if not isinstance(result, (Tensor, list, tuple, type(None))):
            return  # a fact about shape or type: what reads memory was refused before it ran
        for tensor in new:
            self._number(tensor, own=_storage(tensor) not in outside)
        if outside:
            self._touch(schema, given)
        self._calls.append((schema, tuple(map(self._numbered, given)), self._results(result, set(map(id, new)))))

    def _number(self, tensor: Tensor, own: bool) -> None:
        """Give a new tensor its place, until it is freed and its id may be given again."""
        key, storage = id(tensor), _storage(tensor)
        self._places[key] = Place(self._made)
        self._made += 1
        self._own[storage] = self._own.get(storage, 0) + own

        def gone(_: object) -> None:
            del self._places[key], self._watching[key]
            if left := self._own.pop(storage, 0) - own:
                self._own[storage] = left

        self._watching[key] = weakref.ref(tensor, gone)

    def meet(self, tensor: Tensor, line: tuple[str, int] | None = None) -> None:
        """Note an argument, which may be an outside tensor that is seen for the first time; `line` as in `refuse`."""
        if id(tensor) not in self._places and id(tensor) not in self._outside:
            if self._is_own(tensor):
                self.refuse("a tensor is in the program's own memory and was not made by an operator")
            self._outside[id(tensor)] = _Outside(tensor, _address(tensor), tuple(tensor.shape), line or _line())

    def _is_own(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and _storage(tensor) in self._own

    def _touch(self, schema: OperatorSchema, given: tuple[Any, ...]) -> None:
        for tensor, written in schema.uses(given):
            if not self._is_own(tensor):
                where = (_storage(tensor), _address(tensor), tuple(tensor.shape), _stride(tensor), tensor.dtype)
                (self._writes if written else self._reads).setdefault(where, tensor)

    def _numbered(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._places.get(id(value), value)
        return [self._numbered(item) for item in value] if isinstance(value, (list, tuple)) else value

    def _results(self, result: Any, fresh: set[int]) -> Any:
        if isinstance(result, (list, tuple)):
            return tuple(self._results(item, fresh) for item in result)
        return self._places[id(result)] if id(result) in fresh else None

    def refuse(self, what: str, line: tuple[str, int] | None = None) -> None:
        """Raise CaptureError with this line of the program; by default the one that runs."""
        file, number = line or _line()
        below = os.path.relpath(file)
        shown = file if below.startswith(os.pardir) else below
        raise CaptureError(f"{self._name} cannot be captured: {shown}:{number}: {what}")


def _line() -> tuple[str, int]:
    """The file and line of the program that the calling thread is in."""
    line: tuple[str, int] | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not (line and frame.f_code is record.__code__):
        code = frame.f_code
        if code.co_name in _MODES:
            line = None  # calls from here are the mode's, not the program's
        elif line is None and not code.co_filename.startswith(_NOT_THE_PROGRAM):
            line = code.co_filename, frame.f_lineno
        frame = frame.f_back
    return line or ("<unknown>", 0)


def _all_of(kind: type[T], value: Any) -> list[T]:
    """Return the objects of this kind in a value: itself, or parts of lists and tuples, which may be nested."""
    if isinstance(value, kind):
        return [value]
    return [part for item in value for part in _all_of(kind, item)] if isinstance(value, (list, tuple)) else []


def _storage(tensor: Tensor) -> int:
    """Return an identity of a tensor's memory. An opaque tensor, such as a weight in oneDNN's layout, has its own."""
    if tensor.layout is _STRIDED:
        return int(tensor.untyped_storage()._cdata)
    return -id(tensor)


def _stride(tensor: Tensor) -> tuple[int, ...]:
    return tensor.stride() if tensor.layout is _STRIDED else ()


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr() if tensor.layout is _STRIDED else 0


def _with_drops(calls: Sequence[tuple[OperatorSchema, tuple[Any, ...], Any]]) -> list[Call]:
    """Return the calls. The last one that names a place drops it."""
    seen: set[int] = set()
    found: list[Call] = []
    for schema, args, results in reversed(calls):
        last = {*_all_of(Place, [args[at] for at in schema.places]), *_all_of(Place, results)} - seen
        seen |= last
        found.append(Call(schema.op, args, schema.named, results, tuple(sorted(last))))
    return found[::-1]


def filled(args: Sequence[Any], places: list[Any]) -> list[Any]:
    """Return the arguments with tensors for places. Compares exact types, the cheapest test: every replay calls it."""
    found = []
    for value in args:
        kind = type(value)
        found.append(places[value] if kind is Place else filled(value, places) if kind is list else value)
    return found


def keep(places: list[Any], results: Any, value: Any) -> None:
    """Put what an operator returned at the places that `results` has for it."""
    if type(results) is Place:
        places[results] = value
    elif type(results) is tuple:
        for one, item in zip(results, value, strict=True):
            keep(places, one, item)


class TapeGraph:
    """A graph whose replay is the tape's, run as one program of the stream."""

    def __init__(self, key: Hashable, tape: Tape) -> None:
        self.key = key
        self.tape = tape
        observe.built(self)

    def launch(self, stream: Stream, parts: Sequence[Tensor] = ()) -> None:
        stream.launch(self.tape.replay)


def record_on(device: Device, key: Hashable, program: Program, buffers: Sequence[Any]) -> Tape:
    """Record a program on the compute stream. Raises CaptureError as `record`, and where the program raises any other
    error, such as one of memory: the device continues. Raises DeviceError if it has failed."""
    name = f"{getattr(program, '__qualname__', type(program).__name__)} {key}"
    outcome: list[Tape | Exception] = []

    def attempt() -> None:
        try:
            outcome.append(record(name, program, buffers))
        except Exception as error:
            outcome.append(error)

    device.run(attempt)
    if isinstance(outcome[0], CaptureError):
        raise outcome[0]
    if isinstance(outcome[0], Exception):
        raise failed(name, outcome[0]) from outcome[0]
    return outcome[0]


def failed(name: str, error: Exception) -> CaptureError:
    return CaptureError(f"{name} cannot be captured: {type(error).__name__}: {error}")
