"""The spec of a loop: its sizes and features."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from gapless.base.part import Part
from gapless.comm.alone import ONE_RANK
from gapless.comm.seam import Group
from gapless.kernels.seam import Kernels
from gapless.offload.host import LATE_NS
from gapless.offload.waits import LEAST_TOKENS
from gapless.pace.controllers import CONTROLLERS, Controllers
from gapless.step.adapters import Adapters
from gapless.step.graphs import MISSES_BEFORE_CAPTURE, MixedSizes
from gapless.step.orders import Ranks
from gapless.step.processors import Processor
from gapless.step.program import StepProgram
from gapless.step.speculation import Speculation


class Sizes(NamedTuple):
    """Bounds of everything that an engine allocates."""

    rows: int
    """Requests running at once."""
    max_len: int
    """Tokens of the longest sequence, prompt and output."""
    pages: int
    """KV pages, the null page included."""
    page_size: int
    step_tokens: int
    """Token budget of one step; at least `rows`."""
    queue: int
    """Waiting requests."""
    slots: int = 0
    """Running requests with adjusted logits."""


class HostSizes(NamedTuple):
    """Bounds of the host tier."""

    nbytes: int
    """Host memory for copies of pages"""
    least_tokens: int = LEAST_TOKENS
    """Least tokens of a load."""
    late_ns: int = LATE_NS
    """Longest wait for a load before a request computes its prompt."""
    weighs: bool = False
    """Whether a load begins only if it takes no longer than computing, by measured rates"""
    given: int = 0
    """Further host memory, for copies that peers may take; they can then map all of it"""


class LoopSpec(NamedTuple):
    """A loop's sizes and features."""

    sizes: Sizes
    depth: int | None = None
    """Steps in flight; None: as measurements ask for."""
    chain: int | None = None
    """Most steps that one visit enqueues; None: measured, or 1 at a fixed depth."""
    model_name: str = ""
    """Everything that KV depends on: equal names share pages."""
    prefix_caching: bool = True
    by_priority: bool = False
    bounds_stalls: bool = False
    """Whether prompt tokens that share a step with decoding rows are limited if they take long."""
    max_itl_ns: int = 0
    """Longest time of such a step; 0: no bound."""
    kernels: Kernels | None = None
    """None: the best for the device."""
    buckets: Iterable[int] | None = None
    """Row counts of captured steps; None: the usual ones."""
    mixed: MixedSizes | None = None
    """Captured steps with chunks; None: the usual ones if the device pads."""
    patience: int = MISSES_BEFORE_CAPTURE
    """Misses of a program before it is captured."""
    program: type[StepProgram] = StepProgram
    """A test's own gives rows several tokens in a step."""
    ranks: Ranks | None = None
    """The ranks that follow this one"""
    group: Group = ONE_RANK
    """This rank's group"""
    adapters: Adapters | None = None
    speculation: Speculation | None = None
    processors: tuple[Processor, ...] = ()
    """Logits processors, by the numbers that requests name."""
    host: HostSizes | None = None
    """Host memory for copies of pages, if prefixes are shared."""
    mask_polls: bool | None = None
    """Whether the threads of native matchers look for tokens by themselves; None: no such threads."""
    controllers: Controllers = CONTROLLERS
    parts: tuple[Part, ...] = ()
    """Further parts, called after the loop's own."""
