"""A tiny server that speaks like Redis, in one of several moods."""

from __future__ import annotations

import socket
import socketserver
import ssl
import threading
import time
from typing import Any


class FakeResp:
    """Values by key. `mood` is what happens to the next commands: sound, closed, short, silent, error or noise."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.values: dict[bytes, bytes] = {}
        self.mood = "sound"
        self.calls: list[bytes] = []
        """The names of the commands that came"""
        self.open = 0
        """How many connections there are"""
        fake = self

        class Handler(socketserver.StreamRequestHandler):
            disable_nagle_algorithm = True

            def handle(self) -> None:
                fake.open += 1
                try:
                    self.talk()
                finally:
                    fake.open -= 1

            def talk(self) -> None:
                while fake.mood != "closed" and (words := fake.words(self.rfile)):
                    fake.calls.append(words[0])
                    answer = fake.answer(words)
                    if fake.mood == "closed":
                        return
                    while fake.mood == "silent":
                        time.sleep(0.01)
                    if fake.mood == "short":
                        self.wfile.write(answer[: max(1, len(answer) // 2)])
                        return
                    self.wfile.write({"error": b"-OOM no room\r\n", "noise": b"?!\r\n"}.get(fake.mood, answer))

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            allow_reuse_address = True

            def get_request(self) -> Any:
                raw, where = super().get_request()
                return (tls.wrap_socket(raw, server_side=True) if tls else raw), where

            def handle_error(self, request: Any, client_address: Any) -> None:
                """The client has gone."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"redis{'s' if tls else ''}://127.0.0.1:{self._server.server_address[1]}/0"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    @staticmethod
    def words(file: Any) -> list[bytes]:
        head = file.readline()
        words = []
        for _ in range(int(head[1:]) if head[:1] == b"*" else 0):
            words.append(file.read(int(file.readline()[1:])))
            file.read(2)
        return words

    def answer(self, words: list[bytes]) -> bytes:
        name, *keys = words
        if name == b"SET":
            self.values[keys[0]] = keys[1]
        if name == b"GET":
            value = self.values.get(keys[0])
            return b"$-1\r\n" if value is None else b"$%d\r\n%s\r\n" % (len(value), value)
        if name in (b"EXISTS", b"TOUCH"):
            return b":%d\r\n" % sum(key in self.values for key in keys)
        if name == b"DEL":
            return b":%d\r\n" % sum(self.values.pop(key, None) is not None for key in keys)
        return b"+PONG\r\n" if name == b"PING" else b"+OK\r\n"

    def stop(self) -> None:
        self.mood = "closed"
        self._server.shutdown()
        self._server.server_close()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
