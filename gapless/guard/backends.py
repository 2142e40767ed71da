"""The kinds of accelerators, as data: which functions wait there, what classes are called, how copies behave.

Torch spells most of it alike for all kinds: `torch.KIND.synchronize`, `torch.KIND.Stream`, `Tensor.KIND`. A row is what
one kind spells otherwise. A kind without a row, such as a backend that a program registers, has the common names alone.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Wait = tuple[str, str, str]
"""A function that waits: its module or class, its name, and the rule that a call breaks."""

_COMMON: tuple[Wait, ...] = (
    ("", "synchronize", "stream-wait"),
    ("", "empty_cache", "empty-cache"),
    ("Stream", "synchronize", "stream-wait"),
    ("Event", "synchronize", "event-wait"),
    ("Event", "query", "event-poll"),
)
"""Waits in the module of every kind: the interface that torch asks of a device's module."""

GENERIC: tuple[Wait, ...] = (
    ("torch.accelerator", "synchronize", "stream-wait"),
    ("torch.accelerator", "empty_cache", "empty-cache"),
    ("torch.accelerator", "empty_host_cache", "empty-cache"),
    ("torch.accelerator.Graph", "capture_begin", "graph-capture"),
    # It synchronises and empties the cache before it begins the capture: one cause, one finding.
    ("torch.accelerator.Graph", "__enter__", "graph-capture"),
    ("torch.Stream", "synchronize", "stream-wait"),
    ("torch.Event", "synchronize", "event-wait"),
    ("torch.Event", "query", "event-poll"),
)
"""Waits on any kind (torch/accelerator/__init__.py, memory.py and graphs.py; torch/csrc/Stream.cpp, Event.cpp)."""


class DeviceKind(NamedTuple):
    """One kind of accelerator."""

    type: str
    """Torch's device type, which is also the name of its module in torch and of the method of tensors."""
    waits: tuple[Wait, ...] = ()
    """The functions that wait beside the common ones; modules and classes by their names inside of torch.TYPE."""
    also: tuple[str, ...] = ()
    """Other names that users have for it."""
    streams: tuple[str, ...] = ("Stream",)
    events: tuple[str, ...] = ("Event",)
    graphs: tuple[str, ...] = ()
    """Classes of graphs, beside torch.accelerator.Graph."""
    package: str = ""
    """The package that registers the kind, if torch itself does not have it; `import torch` imports it."""
    warns: bool = False
    """Whether `set_sync_debug_mode("warn")` has torch warn of each call that waits."""
    times: bool = True
    """Whether a call that takes long is a finding."""
    pageable: Literal["driver", "staged", "shared"] = "driver"
    """How a non-blocking copy treats host memory that is not pinned: the driver decides, and may wait; torch packs it
    into pinned memory before an upload, without a wait; or the device reaches it, so that nothing waits."""

    def all_waits(self) -> list[Wait]:
        """Return everything of this kind that waits, by full names."""
        module = f"torch.{self.type}"
        return [(f"{module}.{owner}".rstrip("."), name, rule) for owner, name, rule in (*_COMMON, *self.waits)]


def _captures(graph: str) -> tuple[Wait, ...]:
    return ((graph, "capture_begin", "graph-capture"), ("graph", "__enter__", "graph-capture"))


KINDS_OF_DEVICES: dict[str, DeviceKind] = {one.type: one for one in (
    # torch/cuda/__init__.py, streams.py, graphs.py; c10/cuda/CUDAFunctions.cpp has the warning.
    DeviceKind("cuda", _captures("CUDAGraph"), also=("rocm",), graphs=("CUDAGraph",), warns=True),
    # torch/xpu/__init__.py, streams.py, graphs.py (XPUGraph since torch 2.12). A non-blocking upload of pageable memory
    # goes through pinned memory that torch allocates: intel/torch-xpu-ops, src/ATen/native/xpu/Copy.cpp, _copy_xpu.
    DeviceKind("xpu", _captures("XPUGraph"), graphs=("XPUGraph",), pageable="staged"),
    # Ascend/pytorch: torch_npu/npu/__init__.py, streams.py, graphs.py; utils.py: get_npu_overflow_flag reads a
    # tensor; csrc/core/npu/NPUFunctions.cpp has the warning. Blocking copies begin with aclrtSynchronizeStream
    # (csrc/aten/ops/op_api/CopyKernelOpApi.cpp). ExternalEvent orders streams and has nothing that waits.
    DeviceKind(
        "npu", (
            *_captures("NPUGraph"), ("SyncLaunchStream", "synchronize", "stream-wait"),
            ("", "host_empty_cache", "empty-cache"), ("", "empty_virt_addr_cache", "empty-cache"),
            ("", "get_npu_overflow_flag", "host-read"),
            # Both wait for torch_npu's queue and for the events (csrc/core/npu/NPUEvent.cpp).
            ("Event", "elapsed_time", "event-wait"), ("Event", "recorded_time", "event-wait"),
        ),
        also=("ascend",), streams=("Stream", "SyncLaunchStream"), events=("Event", "ExternalEvent"),
        graphs=("NPUGraph",), package="torch_npu", warns=True,
    ),
    # HabanaAI/gaudi-pytorch-bridge: python_packages/habana_frameworks/torch/hpu/__init__.py, streams.py, events.py,
    # graphs.py. Its set_sync_debug_mode is another thing: it turns asynchronous streams on or off. mark_step launches
    # and waits for no device (docs.habana.ai, PyTorch/Reference/mark_step), so it is not here.
    DeviceKind(
        "hpu", (("HPUGraph", "capture_begin", "graph-capture"),), also=("gaudi",), graphs=("HPUGraph",),
        package="habana_frameworks.torch",
    ),
    # torch/mps/__init__.py and event.py: one stream, which has no class. elapsed_time waits for both events
    # (aten/src/ATen/mps/MPSEvent.mm, elapsedTime), empty_cache for the stream (MPSAllocator.mm,
    # release_cached_buffers). Copies wrap the host's own pages (native/mps/operations/Copy.mm).
    DeviceKind("mps", (("Event", "elapsed_time", "event-wait"),), streams=(), pageable="shared"),
    # gapless/testing/native: operators run on the host's own cores, and launching one may take long.
    DeviceKind("fake", (("Graph", "capture_begin", "graph-capture"),), graphs=("Graph",), package="gapless",
               times=False),
)}  # fmt: skip
"""The kinds with a row of their own. Each names the files that it was read from."""

HOST_TYPES = ("cpu", "meta")


def type_of(name: str) -> str:
    """Return torch's device type for a name that users have: it, another name of it, or accelerator:TYPE."""
    name = name.removeprefix("accelerator:")
    return next((row.type for row in KINDS_OF_DEVICES.values() if name in row.also), name)


def backend(kind: str) -> DeviceKind:
    """Return the row of a device type, or one with the common names alone."""
    return KINDS_OF_DEVICES.get(kind) or DeviceKind(kind)
