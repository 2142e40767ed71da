"""Adapters loaded and unloaded while an engine runs. One thread reads their files."""

from __future__ import annotations

import logging
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from gapless.base.config import EngineConfig
from gapless.base.errors import CheckpointError, ConfigError, GaplessError, RequestError
from gapless.device import Device
from gapless.engine.seam import AdapterChange, Answer
from gapless.loop.loop import Loop
from gapless.memory.slots import NO_SLOT
from gapless.model.adapters import Adapter, AdapterTables
from gapless.model.config import ModelConfig
from gapless.step.adapters import AdapterContents
from gapless.step.orders import AdapterOrder

log = logging.getLogger("gapless.engine")


class AdapterFiles(NamedTuple):
    """Reads adapters into memory that the device copies from. From any thread."""

    config: EngineConfig
    model: ModelConfig
    tables: AdapterTables
    device: Device

    def read(self, directory: Path) -> AdapterContents:
        """Raises CheckpointError."""
        adapter = Adapter.read(directory, self.model, self.config.max_lora_rank)
        parts = self.tables.slot(NO_SLOT)
        sizes = [part.nbytes for part in parts]
        memory = torch.split(self.device.ring(1, sum(sizes)).slots[0].tensor, sizes)
        own = [piece.view(part.dtype).view(part.shape) for piece, part in zip(memory, parts, strict=True)]
        adapter.fill(own, self.model, self.tables.rank, self.tables.share)
        return AdapterContents(own, adapter.digest, str(directory.resolve()))

    def named(self) -> dict[str, AdapterContents]:
        """Read the adapters of the config."""
        return {name: self.read(Path(path).expanduser()) for name, path in self.config.adapters.items()}


class FollowingAdapters:
    """The adapters of a following rank. The config's are read at once: steps would wait while memory is pinned."""

    def __init__(self, files: AdapterFiles) -> None:
        self._files = files
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="gapless-adapters")
        self._held: dict[str, Future[AdapterContents]] = {}
        """Digest -> adapter, which may still be read"""
        for contents in files.named().values():
            self._held[contents.digest] = Future()
            self._held[contents.digest].set_result(contents)

    def obey(self, order: AdapterOrder) -> None:
        """Begin to read an adapter, forget it, or load it and wait for that. Raises CheckpointError."""
        digest, path, slot = order
        if not path:
            del self._held[digest]
            return
        if digest not in self._held:
            self._held[digest] = self._pool.submit(self._read, digest, path)
        if slot != NO_SLOT:
            stream, parts = self._files.device.bulk_in, self._held[digest].result().parts
            for target, source in zip(self._files.tables.slot(slot), parts, strict=True):
                stream.upload(target, source)
            stream.record().wait()  # later steps read it

    def _read(self, digest: str, path: str) -> AdapterContents:
        found = self._files.read(Path(path))
        if found.digest != digest:
            raise CheckpointError(f"{path}: its files changed while the ranks read them: write them elsewhere")
        return found


class AdapterChanges:
    """Loads and unloads the adapters of a loop, on its thread. The bell rings after files have been read.

    Files are read from below one directory, so that the operator's key gives no access to others.
    """

    def __init__(self, root: str, files: AdapterFiles, loop: Loop) -> None:
        """Raises ConfigError if the directory is missing."""
        self._root = Path(root).expanduser().resolve()
        if not self._root.is_dir():
            raise ConfigError(f"lora_dir: {root} is no directory: make it, or leave lora_dir out")
        self._files = files
        assert loop.parts.adapters is not None, "a loop without adapters"
        self._loader = loop.parts.adapters
        self._bell = loop.bell
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="gapless-adapters")
        self._reads: deque[tuple[AdapterChange, Future[AdapterContents], Answer]] = deque()

    @property
    def waiting(self) -> int:
        """Number of unfinished changes."""
        return len(self._reads)

    def begin(self, change: AdapterChange, answer: Answer) -> None:
        """Begin to load, or unload at once. `answer` gets the result, here or in `take`."""
        if change.path:
            read = self._pool.submit(self._read, change.path)
            self._reads.append((change, read, answer))
            read.add_done_callback(lambda _: self._bell.ring())
        elif change.name in self._loader.names:
            self._loader.drop(change.name)
            answer(None)
        else:
            answer(RequestError(f"there is no adapter {change.name!r}", "lora_name", "model_not_found"))

    def take(self) -> bool:
        """Finish changes whose files are read. Returns whether there was one."""
        before = self.waiting
        while self._reads and self._reads[0][1].done():
            change, read, answer = self._reads.popleft()
            answer(self._finish(change, read))
        return self.waiting < before

    def close(self) -> None:
        """End the thread, after its current file."""
        self._pool.shutdown(cancel_futures=True)

    def _finish(self, change: AdapterChange, read: Future[AdapterContents]) -> GaplessError | None:
        name, error = change.name, read.exception()
        if isinstance(error, GaplessError):
            return error
        if error is not None:
            log.error("an adapter could not be read", exc_info=error)
            return RequestError(f"lora_path cannot be read: {type(error).__name__}", "lora_path")
        contents = read.result()
        if self._loader.names.get(name, contents.digest) != contents.digest and not change.in_place:
            why = "is loaded with other files: set load_inplace to replace them, or choose another name"
            return RequestError(f"adapter {name!r} {why}", "lora_name")
        self._loader.put(name, contents)
        return None

    def _read(self, path: str) -> AdapterContents:
        directory = (self._root / path).resolve()
        if not directory.is_relative_to(self._root):
            raise RequestError("lora_path must lie below the directory of --lora-dir", "lora_path")
        try:
            return self._files.read(directory)
        except CheckpointError as error:
            raise RequestError(str(error).replace(f"{self._root}/", ""), "lora_path") from error
