"""A tiny server with the calls of LMCache's engine-driven mode, in one of several moods, and its shared memory."""

from __future__ import annotations

import os
import secrets
import threading
from typing import Any

import msgspec

POOL = 1 << 20


class FakeLMCache:
    """Chunks by their tokens. `mood` is what happens to calls: sound, silent, noise, outside or foreign."""

    def __init__(self, chunk: int = 16) -> None:
        import zmq

        self.mood = "sound"
        self.chunk = chunk
        self.pool_name = f"gapless-fake-{secrets.token_hex(4)}"
        self.held: dict[str, int] = {}
        """Requests whose chunks may not be evicted"""
        self._kept: dict[tuple[Any, ...], int] = {}
        self._began: dict[tuple[Any, ...], int] = {}
        self.calls: list[int] = []
        """The operations that were asked for"""
        self.sizes: dict[str, int] = {}
        """Bytes of a chunk, by the model's name"""
        self._looks: dict[str, int] = {}
        self._free = 0
        self.path = f"/dev/shm/{self.pool_name}"
        self.pool = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(self.pool, POOL)
        # The process's own context: to end one waits for its threads, now and then for ever.
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self.url = f"lmcache://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._closing = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._closing = True
        self._thread.join()
        os.close(self.pool)
        os.unlink(self.path)

    def _run(self) -> None:
        with self._socket:  # closed by its own thread: a socket is not for two
            self._socket.linger = 0
            self._serve()

    def _serve(self) -> None:
        while not self._closing:
            if not self._socket.poll(20):
                continue
            identity, *frames = self._socket.recv_multipart()
            _, operation, *words = map(msgspec.msgpack.decode, frames)
            self.calls.append(operation)
            if self.mood == "silent":
                continue
            known, answer = self._answer(operation, words)
            if self.mood == "noise" and operation != 21:
                answer = {"context": "?", "shm_name": 7}
            if known:
                tail = [] if answer is None else [msgspec.msgpack.encode(answer)]
                self._socket.send_multipart([identity, *frames[:2], *tail])

    def _answer(self, operation: int, words: list[Any]) -> tuple[bool, Any]:
        """Whether it can be done, and what it gives."""
        if operation == 21:
            return True, self.chunk
        if operation == 14:
            (what,) = words
            self.sizes[what["model_name"]] = what["hidden_dim_size"]
            name = "../../etc/passwd" if self.mood == "foreign" else self.pool_name
            return True, {"shm_name": name, "pool_size": POOL}
        if operation in (9, 13):
            return True, self._looks.get(words[0], 0) if operation == 9 else None
        key = words[0]
        chunks = self._chunks(key)
        if operation == 8:
            hits = next((at for at, one in enumerate(chunks) if one not in self._kept), len(chunks))
            self._looks[key["request_id"]] = hits
            self.held[key["request_id"]] = hits
        elif operation == 12:
            self._let_go(key, key["end"] // self.chunk)
        elif operation == 16:
            fits = chunks[0] not in self._kept and self._free + self.sizes[key["model_name"]] <= POOL
            if fits:
                self._began[chunks[0]], self._free = self._free, self._free + self.sizes[key["model_name"]]
            return True, {"context": {"slots": [self._slot(key, self._began[chunks[0]])] if fits else []}}
        elif operation == 17:
            self._kept[chunks[0]] = self._began.pop(chunks[0])
            return True, True
        elif operation == 18:
            good = chunks[0] in self._kept
            slots = [self._slot(key, self._kept[chunks[0]])] if good else []
            return True, {"success": good, "data": b"", "context": {"slots": slots} if good else {}}
        elif operation == 19:
            self._let_go(key, 1)
            return True, True
        return True, None

    def _let_go(self, key: dict[str, Any], count: int) -> None:
        self.held[key["request_id"]] -= count
        assert self.held[key["request_id"]] >= 0
        self.held = {name: held for name, held in self.held.items() if held}

    def _slot(self, key: dict[str, Any], offset: int) -> dict[str, Any]:
        length = self.sizes[key["model_name"]]
        outside = self.mood == "outside"
        return {"offset": POOL - 1 if outside else offset, "length": length, "shape": [1], "dtype": "uint8"}

    def _chunks(self, key: dict[str, Any]) -> list[tuple[Any, ...]]:
        """The identities of the chunks between start and end: the tokens up to the end of each."""
        ends = range(key["start"] + self.chunk, key["end"] + 1, self.chunk)
        return [(key["model_name"], *key["token_ids"][:end]) for end in ends]
