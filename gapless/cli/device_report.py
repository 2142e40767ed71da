"""The report of `gapless doctor` about a device: its capabilities, the missing ones, and a trial."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gapless.base.errors import GaplessError
from gapless.cli.rank_report import Line
from gapless.device import AcceleratorDevice, Device, classes_here, open_device

KERNELS_OF = {"torch": "plain torch", "native": "C++", "triton": "Triton"}


def device_rows(asked: str = "auto") -> Iterator[Line]:
    """Yield the lines about the CPU, the accelerator that torch sees, and the device of the name `asked`."""
    for name, found in classes_here(asked).items():
        if issubclass(found, AcceleratorDevice):
            yield from about(found)
        try:
            yield tried(name)
        except (GaplessError, RuntimeError) as error:
            yield f"{found.kind} device", "fail" if name == asked else "warn", str(error)


def about(found: type[AcceleratorDevice]) -> Iterator[Line]:
    """Yield the capabilities of a record, and its sentences about the missing ones."""
    caps = found.caps
    parts = (
        f"kernels: {KERNELS_OF[caps.kernels]}",
        f"graphs: {'yes' if caps.captures else 'no'}",
        f"streams: {'one' if found.one_queue else 'four'}",
        f"times of steps: {'from events' if found.times else 'as the host sees them'}",
        f"several ranks: {'no' if caps.sums == 'none' else 'yes'}",
        f"memory shared by processes: {'yes' if caps.registers else 'no'}",
    )
    yield found.kind, "ok", ", ".join(parts)
    if not found.has_run:
        yield found.kind, "warn", "never run: its record is written from the backend's sources"
    yield from ((found.kind, "warn", sentence) for sentence in found.missing)


def tried(name: str) -> Line:
    """Send numbers to the device and back, over two streams and a fence."""
    device = open_device(name, threads=1)
    try:
        right, (free, total) = _comes_back(device), device.memory()
    finally:
        device.close()
    text = "numbers went out, were changed, and came back over two streams"
    room = f"; {free / 2**30:.1f} of {total / 2**30:.1f} GiB are free" if device.caps.own_memory else ""
    return f"{device.kind} device", "ok" if right else "fail", f"{text}{room}" if right else f"{text}, but wrong"


def _comes_back(device: Device) -> bool:
    there, back = device.ring(2, 64).slots
    there.array[:] = range(64)
    numbers = torch.empty(64, dtype=torch.uint8, device=device.torch_device)
    device.drain()  # torch made them on another stream

    def bump() -> None:
        device.upload(numbers, there.tensor)
        numbers.add_(1)

    device.compute.launch(bump)
    device.token_out.after(device.compute.record())
    device.token_out.launch(lambda: device.download(back.tensor, numbers))
    device.drain()
    return bool(back.array.tolist() == list(range(1, 65)))
