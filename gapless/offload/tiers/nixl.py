"""The NIXL tier: pages as objects in S3 and what speaks like it, by the storage plug-ins of NVIDIA's NIXL.

NIXL cannot delete, so the objects of a page are its history: stored, dropped, stored again; odd means stored. Nor
can it cancel: transfers are to rows of our own, and rows of a transfer that does not end are never used again.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from threading import Thread
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np

from gapless.base.addresses import hide_password
from gapless.base.errors import ConfigError
from gapless.offload.tiers.blocking import BlockingTier, leading
from gapless.offload.tiers.history import Seen, has_room, most, there
from gapless.offload.tiers.sealed import HEAD_BYTES, checksum_in, head_of
from gapless.offload.tiers.seam import GROUP_BYTES, Found, TierPage, TierSetup

TRANSFER_SECONDS = 2.0
"""How long a question, and the transfers of some pages, may take"""
STORAGE_BACK_OFF_SECONDS = 10.0
"""A storage that has failed is left alone for so long."""
DRAIN_SECONDS = 8.0
LOOKUP_PAGES = 4
"""Pages that are looked up at a time: who asks for many has the first of them soon"""
TRANSFER_PAGES = 16
"""Pages whose transfers are under way at once"""
MOST_STAGES = 4
"""Stages: all but the last may hold transfers that did not end; with one more nothing is moved any longer."""
PLUG_IN = "OBJ"
OBJECT_KIND = "OBJ"
"""NIXL's kind of memory with names"""


class NixlTier(BlockingTier):
    """Keeps pages in object storage. Jobs are done when `store` and `load` return."""

    def __init__(
        self, setup: TierSetup, seconds: float = TRANSFER_SECONDS, back_off: float = STORAGE_BACK_OFF_SECONDS
    ) -> None:
        """Open `nixl://BUCKET/PREFIX?option=value`: with the plug-in's options. Raises ConfigError."""
        super().__init__()
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise ConfigError(f"kv_tiers: nixl needs its client (pip install nixl): {error}") from error
        parts = urlsplit(setup.target)
        options = dict(parse_qsl(parts.query))
        self._plug_in = options.pop("plugin", PLUG_IN)
        self._prefix = f"{parts.path.strip('/')}/".lstrip("/") + setup.namespace.digest.hex()[:32]
        self._namespace, self._seconds, self._back_off = setup.namespace.digest, seconds, back_off
        self._row = HEAD_BYTES + max(setup.slot_bytes)
        self._next_try, self._device = 0.0, 0
        self._seen = Seen()
        self._question = Future[list[Any]]()
        self._question.set_result([])
        self._stages: list[np.ndarray[Any, Any]] = []
        """The last one is used; transfers into the others have never ended."""
        self._name = f"gapless-{secrets.token_hex(8)}"
        self._agent = nixl_agent(self._name, nixl_agent_config(True, False, 0, backends=[]))
        try:
            self._agent.create_backend(self._plug_in, {"bucket": parts.hostname or "", **options})
        except Exception as error:  # NIXL's errors have no base of their own
            raise ConfigError(f"kv_tiers: NIXL has no {self._plug_in} for {parts.hostname}: {error!r}") from error
        self._take_stage()
        if self._move("WRITE", [(f"{self._prefix}/probe", HEAD_BYTES)]) != [True]:
            raise ConfigError(f"kv_tiers: NIXL cannot write to {hide_password(setup.target)}")

    def lookup(self, keys: Sequence[bytes]) -> list[Found]:
        asked = self._seen.unknown(keys, LOOKUP_PAGES)
        self._seen.add(key for key, count in zip(asked, self._histories(asked), strict=True) if there(count))
        return self._seen.found(keys, asked)

    def store(self, job: int, pages: Sequence[TierPage]) -> None:
        self._in_parts(job, pages, TRANSFER_PAGES, self._stored)

    def load(self, job: int, pages: Sequence[TierPage]) -> None:
        self._in_parts(job, pages, TRANSFER_PAGES, self._loaded)

    def touch(self, keys: Sequence[bytes]) -> None:
        """The storage drops pages by rules of its own."""

    def drop(self, keys: Sequence[bytes]) -> None:
        self._seen.forget(keys)
        known = [(key, count) for key, count in zip(keys, self._histories(keys), strict=True) if there(count)]
        for first in range(0, len(known), TRANSFER_PAGES):
            self._move(
                "WRITE",
                [(self._object(key, count), HEAD_BYTES) for key, count in known[first : first + TRANSFER_PAGES]],
            )

    def close(self) -> None:
        """Wait a while for the last question: its thread must not end while the interpreter does. The agent stays."""
        wait([self._question], DRAIN_SECONDS)

    def _stored(self, pages: Sequence[TierPage]) -> list[int]:
        counts = self._histories([page.key for page in pages])
        new = {page.key for page, count in zip(pages, counts, strict=True) if not there(count)}
        room = [(page, count) for page, count in zip(pages, counts, strict=True) if has_room(count)]
        for row, (page, _) in zip(self._stages[-1], room, strict=False):
            row[: len(page.slot)] = np.frombuffer(page.slot, np.uint8)
            _tail(row, page)[:] = np.frombuffer(head_of(self._namespace, page), np.uint8)
        names = [(self._object(page.key, count), HEAD_BYTES + len(page.slot)) for page, count in room]
        kept = {page.key for (page, _), good in zip(room, self._move("WRITE", names), strict=True) if good}
        lost = new - kept
        done = [*leading(None if page.key in lost else page.checksum for page in pages)]
        self._seen.add(page.key for page in pages[: len(done)])
        return done

    def _loaded(self, pages: Sequence[TierPage]) -> list[int]:
        counts = self._histories([page.key for page in pages])
        known = pages[: next((place for place, count in enumerate(counts) if not there(count)), len(pages))]
        stage = self._stages[-1]
        for row, page in zip(stage, known, strict=False):
            _tail(row, page)[:] = 0
        names = [
            (self._object(page.key, count - 1), HEAD_BYTES + len(page.slot))
            for page, count in zip(known, counts, strict=False)
        ]
        done: list[int] = []
        for good, row, page in zip(self._move("READ", names), stage, known, strict=False):
            checksum = checksum_in(_tail(row, page).data, self._namespace, page) if good else None
            if checksum is None:
                break
            page.slot[:] = row[: len(page.slot)].data
            done.append(checksum)
        self._seen.forget(page.key for page in pages[len(done) :])
        return done

    def _histories(self, keys: Sequence[bytes]) -> list[int]:
        """Return how many objects there are of each key; as many as there may be while the storage is left alone."""
        counts, open_ = [0] * len(keys), [*range(len(keys))]
        if time.monotonic() < self._next_try or not self._question.done():
            return [most()] * len(keys)
        while open_:
            names = [(0, 0, 0, self._object(keys[place], counts[place] + more)) for place in open_ for more in (0, 1)]
            found = self._query(names)
            if found is None:
                self._fail()
                return [most()] * len(keys)
            still = []
            for at, place in enumerate(open_):
                first, second = found[2 * at] is not None, found[2 * at + 1] is not None
                counts[place] += first + (first and second)
                if first and second and counts[place] < most():
                    still.append(place)
            open_ = still
        return counts

    def _query(self, names: Sequence[tuple[int, int, int, str]]) -> list[Any] | None:
        """Return what there is of these objects, None when the storage fails or is silent for too long.

        A call takes half a minute for each object that a silent one is asked for, so it has a thread of its own.
        """
        self._question = question = Future[list[Any]]()

        def ask() -> None:
            try:
                question.set_result(self._agent.query_memory(names, self._plug_in, OBJECT_KIND))
            except Exception as error:
                question.set_exception(error)

        Thread(target=ask, name="gapless-nixl", daemon=True).start()
        try:
            return question.result(self._seconds)
        except Exception:
            return None

    def _object(self, key: bytes, generation: int) -> str:
        return f"{self._prefix}/{key[:-GROUP_BYTES].hex()}-{key[-GROUP_BYTES:].hex()}-{generation}"

    def _move(self, way: str, names: Sequence[tuple[str, int]]) -> list[bool]:
        """Write rows of the stage to objects of these names and sizes, or read them; return which came through."""
        moves = [self._begun(way, row, *name) for row, name in zip(self._stages[-1], names, strict=False)]
        until = time.monotonic() + self._seconds
        good: list[bool] = []
        stuck = False
        for handle, registered in moves:
            state = self._ended_as(handle, until)
            stuck = stuck or state == "PROC"
            if state != "PROC":
                _quietly(self._agent.release_xfer_handle, handle)
                _quietly(self._agent.deregister_memory, registered)
            good.append(state == "DONE")
        if not all(good):
            self._fail()
        if stuck and len(self._stages) < MOST_STAGES:
            self._take_stage()
        elif stuck:
            self._next_try = math.inf
        return good

    def _begun(self, way: str, row: np.ndarray[Any, Any], name: str, nbytes: int) -> tuple[Any, Any]:
        """Begin one transfer; return its handle, None if it could not begin, and NIXL's object."""
        self._device += 1
        place = self._agent.get_xfer_descs([(row.ctypes.data, nbytes, 0)], "DRAM")
        registered = handle = None
        try:
            registered = self._agent.register_memory([(0, nbytes, self._device, name)], OBJECT_KIND, [self._plug_in])
            handle = self._agent.initialize_xfer(way, place, registered.trim(), self._name, b"")
            self._agent.transfer(handle)
        except Exception:
            return None, registered
        return handle, registered

    def _ended_as(self, handle: Any, until: float) -> str:
        """Return the state of a transfer that has ended, PROC for one that has not by then."""
        state = "ERR"
        try:
            while handle is not None and (state := self._agent.check_xfer_state(handle)) == "PROC":
                if time.monotonic() > until:
                    break
                time.sleep(2e-4)
        except Exception:
            state = "ERR"
        return state

    def _take_stage(self) -> None:
        stage = np.zeros((TRANSFER_PAGES, self._row), np.uint8)
        self._agent.register_memory([(stage.ctypes.data, stage.nbytes, 0, "")], "DRAM", [self._plug_in])
        self._stages.append(stage)

    def _fail(self) -> None:
        self._next_try = time.monotonic() + self._back_off


def _tail(row: np.ndarray[Any, Any], page: TierPage) -> np.ndarray[Any, Any]:
    """Return the bytes after the page in a row: NIXL does not report a short object, but these are missing then."""
    return row[len(page.slot) : len(page.slot) + HEAD_BYTES]


def _quietly(release: Callable[[Any], None], what: Any) -> None:
    """Parts of a failed transfer may be missing and need no release."""
    try:
        if what is not None:
            release(what)
    except Exception:
        return
