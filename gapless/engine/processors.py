"""Imports the operator's logits processors, and tries each one out before the engine is ready."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from gapless.base.errors import CaptureError, ConfigError
from gapless.device import Device
from gapless.engine.on_device import on_device
from gapless.kernels.layout import ADJUST_SLOT, LENGTH
from gapless.kernels.tables import Adjustments, Tables
from gapless.step.processors import CALL_ROWS, LogitsFunction, Processor, ProcessorTables
from gapless.step.program import StepProgram


def import_processors(paths: Mapping[str, str], device: Device) -> tuple[Processor, ...]:
    """Import the functions of `EngineConfig.processors`, and instantiate each class with the torch device.

    Only flags can name them, no request. Raises ConfigError.
    """
    return tuple(Processor(name, on_device(device, partial(_made, path, device))) for name, path in paths.items())


def _made(path: str, device: Device) -> LogitsFunction:
    try:
        found = pkgutil.resolve_name(path)
        function = found(device.torch_device) if isinstance(found, type) else found
    except Exception as error:  # whatever the module raises
        raise ConfigError(
            f"logits_processors: {path} cannot be loaded: {type(error).__name__}: {error}; "
            "name it as module:function, with the module's folder in PYTHONPATH"
        ) from error
    if not callable(function):
        raise ConfigError(f"logits_processors: {path} is a {type(function).__name__}, and must be a function")
    return function  # type: ignore[no-any-return]


def try_out(program: StepProgram, device: Device, exact: bool = False) -> None:
    """Run each logits processor before any request does. Raises ConfigError naming one that no step may run.

    `exact`: a row's logits may not depend on the number of rows, to the bit.
    """
    if not program.processors:
        return
    rehearsal = on_device(device, lambda: Rehearsal(program, exact))
    for number, processor in enumerate(program.processors):
        on_device(device, partial(rehearsal.run, number, processor))
        given = on_device(device, partial(rehearsal.given, number, CALL_ROWS[1], 2))
        try:  # the error has the line that would make the host wait
            device.capture(processor.name, processor, given)  # type: ignore[arg-type]
        except CaptureError as error:
            raise ConfigError(f"logits_processors: {error}") from error


class Rehearsal:
    """Rows of made-up requests, to show that a step may run a processor."""

    def __init__(self, program: StepProgram, exact: bool) -> None:
        self._tolerance = 0.0 if exact else 1e-3
        vocab, at = program.model.vocab_size, program.tables.state.device
        rows, longest = 2 * CALL_ROWS[-1], program.tables.history.shape[1]
        self._tables, self._slots = Tables.new(rows, longest, 1, at), Adjustments.new(rows, vocab, at)
        random = torch.Generator().manual_seed(0)
        self._slots.adjusted.copy_(torch.randn(1, rows + 1, vocab, generator=random))
        self._tables.params[:, ADJUST_SLOT] = torch.arange(rows + 1, dtype=torch.int32).to(at)
        self._tables.history.copy_(torch.randint(vocab, (rows + 1, longest), generator=random))
        self._tables.state[:, LENGTH] = torch.randint(1, longest + 1, (rows + 1,), generator=random).to(at)

    def run(self, number: int, processor: Processor) -> None:
        """Call the processor on 1, 4 and 16 rows. Raises ConfigError for its faults."""
        try:
            alone = processor(*self.given(number, 1, 2))[0].nan_to_num()
            for rows in CALL_ROWS:
                first, again = (processor(*self.given(number, rows, at))[0].nan_to_num() for at in (2, 2 + rows))
                near = torch.allclose(first, alone, rtol=self._tolerance, atol=self._tolerance)
                if not (near and torch.equal(first, again)):
                    raise ConfigError(
                        f"logits_processors: {processor.name} gives a row other logits when it has other neighbours: "
                        "work on each row by itself, and draw no random numbers"
                    )
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"logits_processors: {processor.name} raised {type(error).__name__}: {error}") from error

    def given(self, number: int, rows: int, start: int) -> tuple[Tensor, ProcessorTables]:
        """Return the processor's arguments for the first row and its neighbours from `start` on."""
        chosen = torch.arange(start - 1, start - 1 + rows, device=self._slots.adjusted.device)
        chosen[:1].fill_(1)
        given = ProcessorTables(self._tables, self._slots, chosen, number)
        return self._slots.adjusted[0].index_select(0, chosen), given
