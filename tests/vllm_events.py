"""KV events as vLLM 0.26 decodes them (vllm/distributed/kv_events.py), and clients that receive them."""

from __future__ import annotations

from typing import Any

import msgspec

END = b"\xff" * 8


class Event(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(Event):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(Event):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Event):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


decode = msgspec.msgpack.Decoder(KVEventBatch).decode


class Clients:
    """Subscribers and replays of one context."""

    def __init__(self, endpoint, replay=None):
        import zmq

        self._zmq = zmq
        self._context, self.endpoint, self.again = zmq.Context(), endpoint, replay
        self._made = []

    def subscriber(self, topic="", most=0):
        made = self._open(self._zmq.SUB, most, self.endpoint)
        made.subscribe(topic)
        return made

    def asker(self):
        return self._open(self._zmq.DEALER, 0, self.again)

    def _open(self, kind, most, endpoint):
        made = self._context.socket(kind)
        self._made.append(made)
        made.set_hwm(most)
        made.connect(endpoint)
        return made

    def replay(self, start):
        """Everything that one request is answered with."""
        asker = self.asker()
        asker.send_multipart([b"", start.to_bytes(8, "big")])
        found = []
        while not found or found[-1][1] != END:
            assert asker.poll(60_000), found  # a busy machine takes its time
            delimiter, *frames = asker.recv_multipart()
            assert delimiter == b"" and len(frames) == 3
            found.append(frames)
        assert found.pop() == [b"", END, b""]
        return found

    def close(self):
        self._context.destroy(linger=0)


def router(found):
    """Blocks that are known after these messages; fails for one that is stored twice, or removed unknown."""
    known = set()
    for event in [event for _, _, payload in found for event in decode(payload).events]:
        if isinstance(event, BlockStored):
            assert not known & {*event.block_hashes}
            assert len(event.token_ids) == event.block_size * len(event.block_hashes)
            known |= {*event.block_hashes}
        elif isinstance(event, BlockRemoved):
            assert {*event.block_hashes} <= known
            known -= {*event.block_hashes}
        else:
            known.clear()
    return known


def count(found, kind):
    return sum(isinstance(event, kind) for _, _, payload in found for event in decode(payload).events)
