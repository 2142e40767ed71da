"""Publishes KV events over ZeroMQ in the form of vLLM 0.26 (vllm/distributed/kv_events.py).

A batch is the msgpack array [time, events, rank]; an event is a map, whose `type` is its name. A message has three
frames: topic, sequence number (8 bytes, big-endian), batch. pyzmq is imported when events are asked for, and only then.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

import msgspec

from gapless.base.config import EngineConfig
from gapless.base.errors import ConfigError
from gapless.base.records import PageChange, PageEvent
from gapless.server.errors import log
from gapless.server.kv_events_config import EVENTS_FIELD, KvEventsConfig, listens

END = (-1).to_bytes(8, "big", signed=True)
"""The sequence number after the last batch of a replay"""
MEDIUM = "GPU"
"""vLLM's word for the memory of the device that runs the steps, whatever it is"""
SEND_CLOSE_SECONDS = 2.0
EventCounts = tuple[Mapping[str, int], Mapping[str, int]]
"""Batches since the start by outcome, and batches held now: in the queue, and for replay"""


def block_hash(digest: bytes) -> int:
    """Return what stands for a page: the last 64 bits of its digest, as in vLLM."""
    return int.from_bytes(digest[-8:], "big")


def as_vllm(event: PageEvent) -> dict[str, Any]:
    """Return the event as its map; optional fields without a value are left out."""
    hashes = [block_hash(digest) for digest in event.digests]
    if event.change is PageChange.CLEARED:
        return {"type": "AllBlocksCleared"}
    if event.change is PageChange.REMOVED:
        return {"type": "BlockRemoved", "block_hashes": hashes, "medium": MEDIUM, "group_idx": event.group}
    # The client's own salt stands with the first block alone, as in vLLM. What our salt has in front of it is made from
    # the client's key, and stays here.
    own = (event.adapter,) if event.adapter else ()
    given = event.salt.partition(":")[2]
    salt = (given,) if event.parent is None and given else ()
    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": event.window}
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None if event.parent is None else block_hash(event.parent),
        "token_ids": event.tokens.tolist(),
        "block_size": len(event.tokens) // len(hashes),
        "lora_id": None,
        "medium": MEDIUM,
        "lora_name": event.adapter or None,
        "extra_keys": [own + salt or None, *[own or None] * (len(hashes) - 1)],
        "group_idx": event.group,
        **(window if event.window else {"kv_cache_spec_kind": "full_attention"}),
    }


class KvEventPublisher:
    """Sends events from a thread of its own: no subscriber, however slow, holds up the caller of `publish`."""

    def __init__(self, config: KvEventsConfig, rank: int = 0) -> None:
        """Raises ConfigError when pyzmq is missing or an endpoint cannot be had."""
        try:
            import zmq
        except ModuleNotFoundError as error:
            raise ConfigError(f"{EVENTS_FIELD} needs pyzmq: pip install pyzmq") from error
        self._zmq, self._rank = zmq, rank
        self._context: Any = zmq.Context()
        self._topic = config.topic.encode()
        self._queue: deque[tuple[float, Sequence[PageEvent]]] = deque()
        self._most = config.max_queue_size
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        """(sequence number, batch) of each batch that can be asked for"""
        self._batches = Counter(sent=0, lost=0, replayed=0)
        self._encode = msgspec.msgpack.Encoder().encode
        self._bell, self._rung = socket.socketpair()
        self._bell.setblocking(False)
        self._closing = False
        self.lost: Callable[[], object] = bool
        """Called when a batch was dropped, to have the events begin again"""
        try:
            self._out = self._open(zmq.PUB, config.hwm, "endpoint", config.endpoint)
            self._replay = None
            if config.replay_endpoint is not None:  # a whole replay must fit: the rest is dropped without notice
                most = config.buffer_steps + 1
                self._replay = self._open(zmq.ROUTER, most, "replay_endpoint", config.replay_endpoint)
        except BaseException:
            self._free()
            raise
        self._thread = threading.Thread(target=self._run, name="gapless-kv-events", daemon=True)
        self._thread.start()
        log.info("KV events at %s", config.endpoint)

    def _open(self, kind: int, most: int, name: str, endpoint: str) -> Any:
        made = self._context.socket(kind)
        made.set_hwm(most)
        made.ipv6 = "[" in endpoint
        try:
            (made.bind if name == "replay_endpoint" or listens(endpoint) else made.connect)(endpoint)
        except self._zmq.ZMQError as error:
            raise ConfigError(f"{EVENTS_FIELD}.{name}: cannot use {endpoint}: {error}; choose another") from error
        return made

    def publish(self, events: Sequence[PageEvent]) -> None:
        """Queue a batch. Never waits: when too many are queued it is dropped, and `lost` is called."""
        if len(self._queue) >= self._most:
            self._batches["lost"] += 1
            self.lost()
            return
        self._queue.append((time.time(), events))
        with suppress(OSError):  # it has been rung often enough, or its thread has ended
            self._bell.send(b"!")

    def counts(self) -> EventCounts:
        return self._batches, {"queue": len(self._queue), "replay": len(self._sent)}

    def close(self) -> None:
        """Send queued batches and end the thread."""
        self._closing = True
        with suppress(OSError):
            self._bell.send(b"!")
        self._thread.join(SEND_CLOSE_SECONDS)

    # The rest runs on the thread.

    def _run(self) -> None:
        try:
            poller = self._zmq.Poller()
            poller.register(self._rung, self._zmq.POLLIN)
            if self._replay is not None:
                poller.register(self._replay, self._zmq.POLLIN)
            while not self._closing:
                ready = dict(poller.poll())
                if self._rung.fileno() in ready:
                    self._rung.recv(4096)
                while self._queue:
                    self._send(*self._queue.popleft())
                if self._replay in ready:
                    self._answer(self._replay)
        except Exception:
            log.critical("the publisher of KV events failed; no more are sent", exc_info=True)
        finally:
            self._free()

    def _send(self, at: float, events: Sequence[PageEvent]) -> None:
        batch = self._encode([at, [as_vllm(event) for event in events], self._rank])
        number = self._batches["sent"].to_bytes(8, "big")
        self._out.send_multipart((self._topic, number, batch))  # a subscriber that does not read loses it
        self._sent.append((number, batch))
        self._batches["sent"] += 1

    def _answer(self, replay: Any) -> None:
        """Send the requested batches, from a number on, and the end."""
        client, *request = replay.recv_multipart()
        if len(request) != 2 or request[0] or len(request[1]) != 8:
            log.warning("a request for KV events must be an empty frame and a number of 8 bytes")
            return
        for number, batch in self._sent:
            if number >= request[1]:
                replay.send_multipart((client, b"", self._topic, number, batch))
                self._batches["replayed"] += 1
        replay.send_multipart((client, b"", b"", END, b""))

    def _free(self) -> None:
        self._context.destroy(linger=0)
        self._bell.close()
        self._rung.close()


@contextmanager
def kv_events(text: str | None, engine: EngineConfig) -> Iterator[Sequence[KvEventPublisher]]:
    """The publisher of each engine, if the flag asks for them. Raises ConfigError."""
    config = KvEventsConfig.parse(text) if text else KvEventsConfig()
    if not config.enable_kv_cache_events or config.publisher == "null":
        yield ()
        return
    if not engine.enable_prefix_caching:
        raise ConfigError(f"{EVENTS_FIELD}: without prefix caching there are no events; leave out one of the two")
    count = engine.data_parallel_size
    configs = [config.of_engine(number) for number in range(count)] if count > 1 else [config]
    if {one.endpoint for one in configs} & {one.replay_endpoint for one in configs}:
        why = f"the {count} engines have ports from each on: leave {count} ports between them"
        raise ConfigError(f"{EVENTS_FIELD}.replay_endpoint meets the ports of endpoint: {why}")
    with ExitStack() as stack:
        yield [stack.enter_context(closing(KvEventPublisher(one, number))) for number, one in enumerate(configs)]


def counts_of(publishers: Sequence[KvEventPublisher]) -> EventCounts:
    """Return the sums of the counts of all publishers."""
    counts = [publisher.counts() for publisher in publishers]
    found = [{name: sum([one[place][name] for one in counts]) for name in counts[0][place]} for place in (0, 1)]
    return found[0], found[1]
