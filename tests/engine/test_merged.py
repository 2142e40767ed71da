"""Steps that are delivered together give a request the same as steps that come one by one."""

from contextlib import asynccontextmanager

import numpy as np
import pytest
from fronts import EOS, FRONT, TOKENIZER, core, says
from merging import together

from gapless.base.errors import EngineDeadError, QueueFullError
from gapless.base.params import SamplingParams
from gapless.base.records import Flag, PageChange, PageEvent, Request, StepTokens
from gapless.engine import messages as m
from gapless.engine.async_llm import AsyncLLM
from gapless.engine.backend import MessageBackend
from gapless.engine.inputs import Resolved
from gapless.engine.outputs import Logprob
from gapless.engine.seam import Sink
from gapless.engine.stream import OutputStream
from gapless.engine.thread_backend import ThreadBackend
from gapless.engine.tracker import Tracker
from gapless.testing.core import FakeCore, next_token

VOCAB = TOKENIZER.vocab_size
SIZES = (1, 2, 3, 5, 40)
"""How many steps come together. Between them, a delivery ends before and inside every word of the texts below."""
SAID = "one, two, thrée."


@asynccontextmanager
async def running(fake):
    async with AsyncLLM(ThreadBackend(lambda: fake), FRONT) as llm:
        yield llm


class Taker:
    """A sink that takes every second delta."""

    def __init__(self, deltas):
        self.deltas, self.offered = deltas, 0

    def put(self, delta):
        self.offered += 1
        taken = self.offered % 2 == 0
        if taken:
            self.deltas.append(delta)
        return taken


async def all_of(llm, params, sink=False):
    """What each completion of [1, 2] gets: text, tokens, log-probabilities, and how it ended."""
    deltas = []
    stream = await llm.open([1, 2], params, sink=Taker(deltas) if sink else None)
    while not stream.finished:
        deltas += await stream.next()
    return [whole([delta for delta in deltas if delta.index == index]) for index in range(params.n)]


def whole(deltas):
    tokens = [token for delta in deltas for token in delta.token_ids]
    logprobs = [entry for delta in deltas for entry in delta.logprobs or ()]
    assert not any(delta.finish_reason for delta in deltas[:-1])
    return "".join(delta.text for delta in deltas), tokens, logprobs, deltas[-1].finish_reason, deltas[-1].stop_reason


def likely(token, top):
    """What FakeCore thinks of a token: the second, after its predecessor in the vocabulary."""
    own = Logprob(-2.0, 2, TOKENIZER.text_of[token])
    others = [(rank, (token - 2 + rank) % VOCAB) for rank in range(1, top + 1)]
    return {token: own} | {other: Logprob(-rank, rank, TOKENIZER.text_of[other]) for rank, other in others if rank != 2}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize(
    ("stop", "include", "shown", "settled", "end"),
    [
        (" two", False, "one,", "one, two", ("stop", " two")),
        (" two", True, "one, two", "one, two", ("stop", " two")),
        (["thrée!", "e, t"], False, "on", "one, t", ("stop", "e, t")),
        ("é", False, "one, two, thr", "one, two, thré", ("stop", "é")),
        ("two, four", False, SAID, SAID, ("stop", None)),
    ],
)
async def test_a_stop_string_that_straddles_steps(size, sink, stop, include, shown, settled, end):
    """What follows it in the same delivery is dropped, and the engine is asked once to stop."""
    params = SamplingParams(max_tokens=50, stop=stop, include_stop_str_in_output=include, logprobs=2)
    fake = together(says(SAID, lag=3), size)
    async with running(fake) as llm:
        ((text, tokens, logprobs, *ended),) = await all_of(llm, params, sink)
    assert (text, *ended) == (shown, *end)
    assert tokens == letters(settled) + [EOS] * (end[1] is None)
    assert logprobs == [likely(token, 2) for token in tokens]
    assert len(fake.aborted) <= 1  # none where the core ended it in the same delivery


def letters(text):
    """The token of each byte."""
    by_bytes = {TOKENIZER.token_bytes(token): token for token in range(256)}
    return [by_bytes[bytes([byte])] for byte in text.encode()]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("sink", [False, True])
async def test_two_merged_completions_have_their_own_log_probabilities(size, sink):
    """Against what the core makes of each of the requests, without a front."""
    params = SamplingParams(n=2, seed=1, max_tokens=23, ignore_eos=True, logprobs=3)
    async with running(together(core(), size)) as llm:
        found = await all_of(llm, params, sink)
        requests = llm.resolver.resolve([1, 2], params).requests
    for request, (text, tokens, logprobs, *ended) in zip(requests, found, strict=True):
        assert tokens == [next_token(request, at, VOCAB) for at in range(23)]
        assert text == TOKENIZER.decode(tokens)
        assert logprobs == [likely(token, 3) for token in tokens]
        assert ended == ["length", None]
    assert found[0] != found[1]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("last", "fields", "end"),
    [
        (EOS, {}, ("stop", None)),
        (7, {"stop_token_ids": [7]}, ("stop", 7)),
        (8, {"max_tokens": 6}, ("length", None)),
        (-1, {}, ("error", None)),
    ],
)
async def test_completions_end_each_in_its_own_way_and_step(size, last, fields, end):
    """The second completion goes on for three steps after the first, in the same delivery or in others."""
    seeds = {}

    def script(request, count):
        first = seeds.setdefault(request.key, len(seeds)) == 0
        return last if count == 5 and first else EOS if count == 8 else 20 + count

    params = SamplingParams(**{"n": 2, "seed": 1, "max_tokens": 50, **fields})
    async with running(together(core(script=script), size)) as llm:
        found = await all_of(llm, params)
    tokens = [*range(20, 25), *([last] if last >= 0 else [])]
    assert (found[0][1], found[0][3:]) == (tokens, end)
    if "max_tokens" not in fields:
        assert (found[1][1], found[1][3:]) == ([*range(20, 28), EOS], ("stop", None))


class Delivered(MessageBackend):
    """A backend to which messages come by hand."""

    def __init__(self):
        super().__init__()
        self.posted = []
        self.tracker = Tracker(TOKENIZER, self.abort)
        self.page_events = []
        takes = self.tracker.on_started, self.tracker.on_tokens, self.tracker.fail, None
        self.sink = Sink(
            *takes, page_events=lambda events, _: self.page_events.append(events), died=None, broke=None, came_up=list
        )

    def _post(self, message):
        self.posted.append(message)
        return True

    def open(self, keys):
        tokens, params = np.array([1], np.int32), SamplingParams(max_tokens=9, n=len(keys))
        requests = tuple(Request(key, tokens, params, 0, (), 0, 10) for key in keys)
        stream = OutputStream(f"r{keys}", Resolved(None, tokens, params, requests), self.tracker, arrival=0)
        self.tracker.open(stream)
        return stream


def step(*keys):
    column = np.full(len(keys), 20, np.int32)
    return m.Tokens(StepTokens(1, np.array(keys), column, np.full_like(column, Flag.LIVE)))


async def test_a_refusal_comes_after_the_tokens_before_it():
    """The first completion of a request runs while the second is refused, all in one delivery."""
    backend = Delivered()
    both, other = backend.open((1, 2)), backend.open((3,))
    backend.receive([step(1, 3), step(1, 3), m.Refused(2, QueueFullError("full")), step(1, 3)])
    (delta,) = await both.next()
    assert delta.token_ids == [20, 20] and backend.posted == [m.Abort(1)]
    with pytest.raises(QueueFullError, match="full"):
        await both.next()
    (delta,) = await other.next()
    assert delta.token_ids == [20] * 3


async def test_tokens_that_cannot_be_handed_out_are_not_handed_out_again():
    backend = Delivered()
    seen = []

    def tokens(*steps):
        seen.extend(steps)
        raise EngineDeadError("on purpose")

    backend.sink = backend.sink._replace(tokens=tokens)
    with pytest.raises(EngineDeadError):
        backend.receive([step(1), m.Refused(2, QueueFullError("full"))])
    assert len(seen) == 1


def test_page_events_go_to_who_asked_and_are_asked_for_again_of_every_new_engine():
    backend = Delivered()
    backend.send_page_events()
    events = (PageEvent(PageChange.CLEARED),)
    backend.receive([m.Ready(FakeCore().info), m.PageEventList(events)])
    assert backend.posted == [m.SendPageEvents()] * 2 and backend.page_events == [events]
