"""What the checker asks of CUDA's streams; `race_cuda` answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from .clocks import Agent
from .race_agents import Launched
from .race_buffers import Buffer, Checksum
from .race_ops import OperatorPlan


class CudaStreams(Protocol):
    """The streams of CUDA, or of its emulation, as agents of a checker."""

    def agent_of(self, stream: Any, name: str = "") -> Agent:
        """The agent of a torch stream, or of the current one for None. The first name that it is given stays."""
        ...

    def stream_for(self, tensor: Tensor, together: Iterable[tuple[Tensor, int]]) -> Agent | Launched | None:
        """The stream as which `tensor` is touched by an operator on these tensors; None when the host does it."""
        ...

    def captures(self) -> bool:
        """Return whether the calling thread captures a graph: then operators are recorded and do not run."""
        ...

    def is_device(self, tensor: Tensor) -> bool:
        """Return whether the tensor is on a device."""
        ...

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether copies from and to this host tensor can run beside the host."""
        ...

    def now(self, host: Agent | Launched, tensor: Tensor) -> Agent | Launched:
        """The stream as which an operator touches this device tensor; it comes after what `host`, the caller, did."""
        ...

    def made(self, plan: OperatorPlan, buffer: Buffer, actor: Agent | Launched, site: int) -> bool:
        """`actor` made this device memory; returns whether it wrote it: an allocation alone writes nothing."""
        ...

    def lent(self, buffer: Buffer, pool: Agent, tensor: Tensor) -> None:
        """Another than the stream that allocated this memory is about to use it."""
        ...

    def ran(self, plan: OperatorPlan, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """An operator that may wait ran: if the host had to wait for it, it has learnt what the stream knows."""
        ...

    def reads_on_host(self, tensor: Tensor) -> bool:
        """`tolist` or `numpy` is about to read the tensor; returns whether nothing is left to note."""
        ...

    def hold(self, stream: Agent, checksum: Checksum, tensor: Tensor, site: int) -> None:
        """The stream uses host memory: look at it again when the host learns that the stream is done with it."""
        ...
