"""Peers for tests: one that gives and one that takes as one tier, and one that does not keep to the protocol."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from functools import partial

from tier_rig import SLOT
from waiting import until

from gapless.base.peers import PeerAddress, PeerPlan
from gapless.base.records import KVTransfer
from gapless.base.shared import SharedMemory
from gapless.offload.tiers import frames
from gapless.offload.tiers.frames import FrameKind, FrameSocket, PeerError, admit, greet, keys_in
from gapless.offload.tiers.peer import PeerTier, open_peer_tier
from gapless.offload.tiers.seam import Found, JobEnd, TierPage, TierSetup
from gapless.offload.tiers.shelf import ShelfPage

KEY = b"a key of the tests, long enough"


class GivenSlots:
    """Slots of a giver, as a host tier has them: a page that is given keeps its own until it is released."""

    def __init__(self, count: int = 256) -> None:
        self.shared = SharedMemory(count * SLOT)
        self.free = list(range(count))
        self._taken: dict[tuple[int, int], int] = {}
        self._jobs = list[int]()
        """The job of each that was stored from here, which has a number of its own"""

    def of(self, slot: int) -> memoryview:
        return self.shared.data[slot * SLOT : (slot + 1) * SLOT].data

    def take(self, data: bytes | memoryview) -> int:
        slot = self.free.pop(0)
        self.of(slot)[: len(data)] = data
        return slot

    def release(self, slot: int) -> None:
        """Other pages may have it now."""
        self.of(slot)[:] = b"\xa5" * SLOT
        self.free.append(slot)

    def page(self, key: bytes, data: bytes, checksum: int) -> ShelfPage:
        slot = self.take(data)
        return ShelfPage(key, self.of(slot), checksum, partial(self.release, slot))

    def stores(self, tier: PeerTier) -> None:
        """Have a tier store pages of other slots from these."""
        store, poll = tier.store, tier.poll

        def copied(job: int, pages: Sequence[TierPage]) -> None:
            slots, number = [self.take(page.slot) for page in pages], -1 - len(self._jobs)
            self._jobs.append(job)
            self._taken |= {(number, place): slot for place, slot in enumerate(slots)}
            store(number, [page._replace(slot=self.of(slot)) for page, slot in zip(pages, slots, strict=True)])

        def ended() -> list[JobEnd]:
            return [end._replace(job=self._jobs[-1 - end.job]) if end.job < 0 else end for end in poll()]

        tier.store, tier.poll = copied, ended
        tier.released = lambda job, place: self.release(self._taken.pop((job, place)))


def open_giver(setup: TierSetup, plan: PeerPlan) -> PeerTier:
    tier = open_peer_tier(setup._replace(shared=(slots := GivenSlots()).shared), plan)
    slots.stores(tier)
    tier.slots = slots
    return tier


def giver_of(setup: TierSetup, path, key: bytes = KEY) -> PeerTier:
    return open_giver(setup, PeerPlan(PeerAddress(path=str(path)), (), key))


def taker_of(setup: TierSetup, *paths, key: bytes = KEY) -> PeerTier:
    return open_peer_tier(
        setup, PeerPlan(None, tuple([PeerAddress(path=str(path)) for path in paths]), key), back_off=0.1
    )


class PeerPair:
    """A tier of two: what one stores the other finds and loads, through a socket between them."""

    def __init__(self, setup: TierSetup) -> None:
        path = f"{setup.target}/peer.sock"
        self.giver, self.taker = giver_of(setup, path), taker_of(setup, path)
        self.store, self.drop, self.touch = self.giver.store, self.giver.drop, self.giver.touch
        self.lookup, self.load, self.cancel = self.taker.lookup, self.taker.load, self.taker.cancel

    def poll(self):
        return self.giver.poll() + self.taker.poll()

    def close(self):
        self.taker.close()
        self.giver.close()


def decided(tier, keys, claim="", peer=""):
    """The answer of a tier when nothing is pending any more."""
    begin = time.monotonic()

    def answer():
        found = tier.lookup_for(begin, keys, KVTransfer(claim=claim, peer=peer), begin + 60)
        return Found.PENDING not in found and found

    return until(answer)


def is_found(tier, *keys, claim="R"):
    """Wait until a tier finds these pages: a peer that has failed is left alone for a while."""
    until(lambda: decided(tier, keys, claim) == [Found.HIT] * len(keys))


def connected(path):
    """A connection on which nothing has been said."""
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    raw.connect(str(path))
    return raw


def greeted(path, setup):
    """A connection to a giver that has proved that it has the key."""
    peer = FrameSocket(connected(path))
    greet(peer, KEY, setup.namespace)
    return peer


def flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


class WrongPeer:
    """A peer that has the key and the given pages, and misbehaves as `mood` names it, until it is closed."""

    def __init__(self, path, namespace, pages, key: bytes = KEY) -> None:
        self.mood = "sound"
        self.pages = pages
        """(bytes, checksum) by key"""
        self.asked = 0
        self.fd, self.lends = -1, False
        """The file of its shared memory, and whether it answers with places in it instead of bytes"""
        self._namespace, self._key, self._closed = namespace, key, threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(8)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self._closed.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self):
        while True:
            try:
                raw, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(raw,), daemon=True).start()

    def _serve(self, raw):
        peer = FrameSocket(raw)
        try:
            if self.mood == "mute":
                self._closed.wait(60)
                return
            admit(peer, self._key, self._namespace)
            while peer.wait():
                kind, body = peer.receive(FrameKind.ASK, FrameKind.FETCH, FrameKind.MAP, FrameKind.RETURN)
                if kind is FrameKind.MAP:
                    peer.send_memory(self.fd)
                elif kind is FrameKind.RETURN:
                    peer.send(FrameKind.RETURNED)
                else:
                    (self._answer if kind is FrameKind.ASK else self._give)(raw, peer, body)
        except (PeerError, OSError):
            pass
        finally:
            peer.close()

    def _answer(self, raw, peer, body):
        self.asked += 1
        length, count = frames.ASK.unpack_from(body)
        keys = keys_in(body[frames.ASK.size + length :], count)
        found = [Found.HIT if key in self.pages else Found.MISS for key in keys]
        answer = bytes([frames.ANSWERS.index(one) for one in found])
        moods = {"short answer": answer[:-1], "nonsense": bytes([9]) * count}
        if self.mood == "closes":
            raise PeerError("closed")
        if self.mood == "silent":
            self._closed.wait(60)
        if self.mood == "huge":
            raw.sendall(bytes([FrameKind.ANSWER]) + (2**31).to_bytes(4, "little"))
            self._closed.wait(60)
        peer.send(FrameKind.ANSWER, moods.get(self.mood, answer))

    def _give(self, raw, peer, body):
        body = body[frames.LEASE.size :]
        keys = keys_in(body, len(body) // frames.KEY_BYTES)
        if self.lends:
            pages, start = [(key, *self.pages[key]) for key in keys], int(self.mood == "outside")
            body = b"".join(
                [frames.LENT.pack(key, checksum, len(data), start * (len(data) + 1)) for key, data, checksum in pages]
            )
            peer.send(FrameKind.LENT, {"torn": body[:-1], "more than asked": 2 * body}.get(self.mood, body))
            return
        for number, key in enumerate(keys):
            data, checksum = self.pages[key]
            head, mood = frames.PAGE_HEAD.pack(key, checksum, len(data)), self.mood if number == 1 else ""
            if mood == "dies":
                raise PeerError("dead")
            if mood in ("torn page", "stuck"):
                peer.send(FrameKind.PAGE, head, page=data[: len(data) // 2 if mood == "torn page" else 9])
                if mood == "stuck":
                    self._closed.wait(60)
                raise PeerError(mood)
            if mood in ("gone", "wrong frame"):
                peer.send(*((FrameKind.GONE,) if mood == "gone" else (FrameKind.WELCOME, b"?")))
                return
            data = {"long page": data + bytes(8), "short page": data[:-8]}.get(mood, data)
            if mood == "another page":
                key = next(other for other in self.pages if other != key)
                data, checksum = self.pages[key]
            if self.mood == "flipped":
                data = flipped(data)
            peer.send(FrameKind.PAGE, frames.PAGE_HEAD.pack(key, checksum, len(data)), page=data)
