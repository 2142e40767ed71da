"""Clients that ask a server all the time, and compare each answer with the one that is right."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx

from gapless import LLM, SamplingParams

JOIN_SECONDS = 120
PAUSE_SECONDS = 0.2
"""How long a client waits after a failure before it asks again"""


class Question(NamedTuple):
    """A prompt whose greedy answer is known."""

    prompt: str
    tokens: int
    right: str
    reason: str


class Reply(NamedTuple):
    """What a client got: the whole answer, or, with `trouble`, what came before it broke off."""

    question: Question
    began: float
    ended: float
    text: str
    reason: str | None
    trouble: str


class Outage(NamedTuple):
    """The time from a kill until the service was back, in which requests may fail."""

    began: float
    ended: float

    def covers(self, reply: Reply) -> bool:
        """Return whether the request ran at any time during the outage."""
        return reply.began < self.ended and reply.ended > self.began


def questions(count: int = 12, length: int = 40, least: int = 8, **options: Any) -> list[Question]:
    """Prompts of some hundred tokens, or of `length` sums, with the answers of an engine that nothing interrupts, a
    plain one or one with these options: `least` tokens and more."""
    prompts = [
        " ".join(f"{number + place} + {place} = {number + 2 * place}." for place in range(length))
        for number in range(0, 10 * count, 10)
    ]
    tokens = [least + 4 * place for place in range(count)]
    with LLM(**{"model": "demo", "batch_invariant": True, **options}) as llm:
        answers = llm.generate(prompts, [SamplingParams(temperature=0, max_tokens=most) for most in tokens])
    ends = [answer.outputs[0] for answer in answers]
    return [
        Question(prompt, most, end.text, str(end.finish_reason))
        for prompt, most, end in zip(prompts, tokens, ends, strict=True)
    ]


class Clients:
    """Threads that ask the server at `base`, half of the answers streamed, while `running` lasts.

    The same prompt has `salts` names, whose pages are not shared: with few of them pages come again, with many they
    are computed. Each client waits for `pause` seconds between two requests.
    """

    def __init__(
        self, base: str, asked: Sequence[Question], salts: int, seed: int = 0, count: int = 6, pause: float = 0.0
    ) -> None:
        self.base, self.asked, self.salts, self.count, self.pause = base, asked, salts, count, pause
        self.replies: list[Reply] = []
        self.outages: list[Outage] = []
        self._random = random.Random(seed)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Ask all the time. At the end every request has ended, and every connection is closed."""
        stop = threading.Event()
        threads = [
            threading.Thread(target=self._client, args=(stop, random.Random(self._random.random())), daemon=True)
            for _ in range(self.count)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join(JOIN_SECONDS)
        assert not any(thread.is_alive() for thread in threads), "a request does not end"

    def wait(self, more: int, seconds: float = 60) -> None:
        """Wait for further complete answers."""
        until, most = time.monotonic() + seconds, self.complete + more
        while self.complete < most:
            assert time.monotonic() < until, f"{most - self.complete} answers were meant to come: {self.replies[-1:]}"
            time.sleep(0.01)

    @property
    def complete(self) -> int:
        return sum(not reply.trouble for reply in self.replies)

    @property
    def failed(self) -> list[Reply]:
        return [reply for reply in self.replies if reply.trouble]

    def faults(self) -> list[str]:
        """Return what is wrong with the replies so far: other tokens, and failures outside of all outages."""
        return [fault for reply in [*self.replies] if (fault := fault_of(reply, self.outages))]

    def _client(self, stop: threading.Event, rng: random.Random) -> None:
        with httpx.Client(base_url=self.base, timeout=60) as client:
            while not stop.is_set():
                salt = f"salt {rng.randrange(self.salts)}"
                self.replies.append(ask(client, rng.choice(self.asked), salt, rng.random() < 0.5))
                stop.wait(PAUSE_SECONDS if self.replies[-1].trouble else self.pause)


def fault_of(reply: Reply, outages: Sequence[Outage]) -> str:
    """Return what is wrong with a reply, or nothing."""
    right = reply.question.right
    if not reply.trouble:
        exact = (reply.text, reply.reason) == (right, reply.question.reason)
        return "" if exact else f"an answer is {reply.text!r}, {reply.reason}, and not {right!r}"
    if not right.startswith(reply.text):
        return f"an answer began with {reply.text!r}, and not as {right!r}"
    known = reply.trouble.startswith(("503", "broken"))
    covered = any(outage.covers(reply) for outage in outages)
    return "" if known and covered else f"a request failed {'with' if covered else 'without need:'} {reply.trouble}"


def ask(client: httpx.Client, question: Question, salt: str, streamed: bool) -> Reply:
    """Ask once. A request that fails says how: its status, or that the connection was broken."""
    body = {
        "model": "demo", "prompt": question.prompt, "max_tokens": question.tokens, "temperature": 0,
        "cache_salt": salt, "stream": streamed,
    }  # fmt: skip
    began, parts, reason, trouble = time.monotonic(), [], None, ""
    try:
        with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                trouble = f"{answer.status_code} {answer.read().decode()}"
            for choice in _choices(answer) if not trouble else ():
                parts.append(choice["text"])
                reason = choice["finish_reason"] or reason
    except (httpx.TransportError, BrokenAnswer) as error:
        trouble = f"broken: {error!r}"
    return Reply(question, began, time.monotonic(), "".join(parts), reason, trouble)


class BrokenAnswer(Exception):
    """The server itself said that an answer broke off, or its stream had no end."""


def _choices(answer: httpx.Response) -> Iterator[dict]:
    """Yield the choices of an answer, whole or streamed, as they come."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        yield from json.loads(answer.read())["choices"]
        return
    for line in answer.iter_lines():
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            return
        if line.startswith("data: "):
            event = json.loads(data)
            if "error" in event:
                raise BrokenAnswer(data)
            yield from event["choices"]
    raise BrokenAnswer("a stream without [DONE]")
