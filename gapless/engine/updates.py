"""Weights replaced while an engine runs. One thread reads their files."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from gapless.base.errors import CheckpointError, GaplessError, RequestError
from gapless.base.share import Share
from gapless.device import Device
from gapless.engine.on_device import on_device
from gapless.engine.seam import Answer
from gapless.loop.loop import Loop
from gapless.model.seam import LoadedModel
from gapless.model.update import NewWeights, put_weights, read_weights
from gapless.step.orders import WeightsOrder

log = logging.getLogger("gapless.engine")


class FollowingWeights:
    """New weights of a rank that follows. One thread reads its share of them while the rank computes steps."""

    def __init__(self, model: LoadedModel, device: Device, share: Share) -> None:
        self._model, self._device, self._share = model, device, share
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="gapless-weights")
        self._read: Future[NewWeights] | None = None
        self._said, self._number = True, 0

    def obey(self, order: WeightsOrder) -> None:
        """Begin to read new weights, drop them, or take them."""
        path, digest = order
        if not digest:
            self._read = None
            if path:
                config, dtype = self._model.config, self._model.dtype
                self._read = self._pool.submit(read_weights, Path(path), config, dtype, self._share)
                self._said, self._number = False, self._number + 1
            return
        assert self._read is not None, "weights are read before they are taken"
        found, self._read = self._read.result(), None
        assert found.digest == digest, "the leader has compared them"
        parts = put_weights(self._model, found.params)
        while on_device(self._device, lambda: next(parts, False)):
            pass

    def read(self) -> tuple[int, str, str] | None:
        """Return the number of a read that has ended, and the digest of its weights, or "" and why there is none; once.
        None if no read has ended."""
        if self._read is None or self._said or not self._read.done():
            return None
        self._said, error = True, self._read.exception()
        digest, why = ("", f"{type(error).__name__}: {error}") if error else (self._read.result().digest, "")
        return self._number, digest, why


class WeightUpdates:
    """Replaces the weights of a loop's model, on its thread. One update at a time.

    Requests run while the files are read. The loop's requests end with their old weights; new ones wait, and then find
    no page of the old weights, in any tier or peer: all pages have new names.
    """

    def __init__(self, loop: Loop, model: LoadedModel, device: Device, name: str) -> None:
        """`name` identifies everything that KV depends on."""
        self.waits = False
        """Whether new requests wait: the weights are read, and the loop's requests are ending."""
        self._loop, self._model, self._device, self._name = loop, model, device, name
        self._path = ""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="gapless-weights")
        self._update: tuple[Future[NewWeights], Answer] | None = None
        self._parts: Iterator[bool] | None = None

    @property
    def under_way(self) -> bool:
        return self._update is not None

    @property
    def placing(self) -> bool:
        """True while some of the weights are new and some old."""
        return self._parts is not None

    def begin(self, path: str, answer: Answer) -> None:
        """Begin to read. `answer` gets the result once the weights are in use or refused; here or in `take`."""
        if self.under_way:
            answer(RequestError("another update of the weights is under way: wait for its answer", "model_path"))
            return
        self._path, share = path, self._loop.launcher.program.group.share
        self._order(path)
        read = self._pool.submit(read_weights, Path(path), self._model.config, self._model.dtype, share)
        self._update = read, answer
        read.add_done_callback(lambda _: self._loop.bell.ring())

    def take(self) -> bool:
        """Take the next possible part of the update; return whether there was one. Raises DeviceError: half the weights
        are new."""
        if self._update is None or not self._update[0].done():
            return False
        read, answer = self._update
        if (error := read.exception() or self._refusal_of_ranks(read.result().digest)) is not None:
            self._order("")
            self._end()
            answer(self._refusal(error))
            return True
        if not self._all_have_read():
            return False
        self.waits = True
        if self._loop.requests or self._loop.in_flight:
            return False
        if self._parts is None:
            self._order(self._path, read.result().digest)
            self._parts = put_weights(self._model, read.result().params)
        parts = self._parts
        if on_device(self._device, lambda: next(parts, False)):
            return True
        if self._loop.planner.index is not None:
            kv = getattr(self._model, "kv_origin", "auto")
            self._loop.planner.index.rename(f"{self._name}|weights {read.result().digest}|{kv}")
        self._end()
        answer(None)
        return True

    def close(self) -> None:
        """End the thread, after its current files."""
        self._pool.shutdown(cancel_futures=True)

    def _all_have_read(self) -> bool:
        ranks = self._loop.launcher.ranks
        return ranks is None or self._parts is not None or ranks.read_weights() is not None

    def _refusal_of_ranks(self, digest: str) -> CheckpointError | None:
        """Return why another rank cannot take the weights of this digest."""
        ranks = self._loop.launcher.ranks
        if ranks is None or self._parts is not None:
            return None
        for rank, (theirs, refusal) in enumerate(ranks.read_weights() or (), 1):
            if theirs != digest:
                why = refusal or "its files changed while the ranks read them: write them elsewhere"
                return CheckpointError(f"{self._path}: rank {rank} cannot take it: {why}")
        return None

    def _order(self, path: str, digest: str = "") -> None:
        """Let the other ranks read a checkpoint, take it, or drop it."""
        if (ranks := self._loop.launcher.ranks) is not None:
            ranks.send(WeightsOrder(str(Path(path).resolve()) if path else "", digest))

    def _end(self) -> None:
        self._update = self._parts = None
        self.waits = False

    @staticmethod
    def _refusal(error: BaseException) -> GaplessError:
        if isinstance(error, CheckpointError):
            return RequestError(str(error), "model_path")
        log.error("weights could not be read", exc_info=error)
        return RequestError(f"model_path cannot be read: {type(error).__name__}: {error}", "model_path")
