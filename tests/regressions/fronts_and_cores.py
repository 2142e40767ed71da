"""AsyncLLM over a real loop and the checksum model, with a gate in front of every step."""

from __future__ import annotations

import threading

from harness import VOCAB
from vocabularies import byte_level

from gapless.base.config import EngineConfig
from gapless.device import Device
from gapless.engine.async_llm import AsyncLLM
from gapless.engine.core import CoreParts, EngineCore
from gapless.engine.frontdoor import ModelAssets
from gapless.engine.outputs import Delta
from gapless.engine.seam import EngineInfo
from gapless.engine.stream import OutputStream
from gapless.engine.thread_backend import ThreadBackend
from gapless.engine.tiers import EngineTiers
from gapless.engine.updates import WeightUpdates
from gapless.engine.wiring import watch
from gapless.grammar.compiler import Compiler
from gapless.loop.spec import Sizes
from gapless.testing.checksum import ChecksumModel
from gapless.testing.loops import loop_of
from gapless.testing.sim import SimDevice

SHAPE = Sizes(4, 64, 65, 4, 16, 32)
DEPTH = 8
FRONT = ModelAssets(byte_level())
INFO = EngineInfo(
    "checksum", "sim", "int", VOCAB, SHAPE.max_len, SHAPE.rows, SHAPE.step_tokens, SHAPE.pages, SHAPE.page_size,
    str(DEPTH), 0,
)  # fmt: skip
PRINTABLE = 94
"""Tokens below this are one printable ASCII character each, from '!' on."""


def letter(token: int) -> str:
    return chr(ord("!") + token)


def parts(device: Device, model: ChecksumModel | None = None, watchdog: float = 0.0) -> tuple[CoreParts, EngineInfo]:
    """The arguments of an EngineCore without a tokenizer and without tiers."""
    model = model or ChecksumModel(VOCAB, SHAPE.max_len)
    loop = loop_of(device, model, SHAPE, DEPTH, model_name="checksum", patience=16)
    updates = WeightUpdates(loop, model, device, "checksum")
    compiler = Compiler(lambda: 1 // 0, loop.bell.ring, room=1)
    tiers, dog = EngineTiers(EngineConfig()), watch(loop, watchdog)
    made = CoreParts(device, loop, compiler, tiers, updates, watchdog=dog)
    return made, INFO._replace(watchdog_seconds=watchdog)


def engine_core(device: Device, model: ChecksumModel | None = None, watchdog: float = 0.0) -> EngineCore:
    return EngineCore(*parts(device, model, watchdog))


class Gated(EngineCore):
    """Takes a step only when the test lets it."""

    def __init__(self, seed: int) -> None:
        super().__init__(*parts(SimDevice(seed, "lazy")))
        self._gate, self._arrived = threading.Semaphore(0), threading.Semaphore(0)
        self._waits = False

    def step(self):
        self._arrived.release()
        assert self._gate.acquire(timeout=30)
        # What came at the gate came too late to end this step's wait, as if it had come behind it.
        self.loop.bell.clear()
        return super().step()

    def run(self, steps: int) -> None:
        """Let the engine's thread take these steps and come to the next; the asyncio loop reads nothing meanwhile."""
        self._gate.release(steps)
        for _ in range(steps if self._waits else steps + 1):
            assert self._arrived.acquire(timeout=30)
        self._waits = True

    def open(self) -> None:
        """Hold nothing back any more."""
        self._gate.release(10_000)


def front_of(core: EngineCore) -> AsyncLLM:
    return AsyncLLM(ThreadBackend(lambda: core), FRONT)


async def read_all(stream: OutputStream) -> list[Delta]:
    deltas = []
    while not stream.finished:
        deltas += await stream.next()
    return deltas


def tokens_of(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]
