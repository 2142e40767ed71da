"""Something for the engine to do while a test looks at the page."""

import json
import threading
import urllib.request
from typing import Self


class Load:
    """A number of chats at a time, each followed by another, until stopped."""

    def __init__(self, base: str, key: str, chats: int = 3) -> None:
        self._base = base
        self._key = key
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(chats)]
        self.errors: list[Exception] = []

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        assert self.errors == []

    def _run(self, number: int) -> None:
        turn = 0
        try:
            while not self._stop.is_set():
                turn += 1
                self._chat(f"{number}.{turn}: Mia has 17 pens and buys {turn} more. How many pens does she have?")
        except Exception as error:
            self.errors.append(error)

    def _chat(self, text: str) -> None:
        body = {
            "model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": 150 + 50 * (len(text) % 3),
            "stream": True, "ignore_eos": True, "temperature": 0,
        }  # fmt: skip
        headers = {"content-type": "application/json", "authorization": f"Bearer {self._key}"}
        url = f"{self._base}/v1/chat/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            for _ in answer:
                if self._stop.is_set():
                    return
