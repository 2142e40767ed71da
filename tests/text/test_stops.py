"""Stop strings: every split of a text gives what a search of the whole text gives."""

import time
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.text.stops import StopMatcher

LETTERS = st.text(alphabet="ab你", max_size=14)
STOPS = st.lists(st.text(alphabet="ab你", min_size=1, max_size=4), min_size=1, max_size=4)


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


def feed(matcher: StopMatcher, parts: list[str]) -> tuple[str, str | None]:
    out = ""
    for part in parts:
        text, found = matcher.push(part)
        out += text
        if found is not None:
            return out, found
    return out + matcher.finish(), None


@settings(derandomize=True, max_examples=300, deadline=None)
@given(LETTERS, STOPS, st.booleans(), st.lists(st.integers(0, 14), max_size=6))
def test_any_split_equals_the_naive_search(text: str, stops: list[str], include: bool, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [text[a:b] for a, b in pairwise(edges)]
    assert feed(StopMatcher(stops, include), parts) == naive(text, stops, include)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(LETTERS, STOPS)
def test_only_what_can_still_become_a_stop_is_held(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    out = ""
    for i, char in enumerate(text):
        new, found = matcher.push(char)
        out += new
        if found is not None:
            return
        seen = text[: i + 1]
        held = seen[len(out) :]
        could = [n for stop in stops for n in range(len(stop)) if n and seen.endswith(stop[:n])]
        assert len(held) == max(could, default=0)


def test_stops_that_share_a_beginning_with_the_text_cost_linear_time() -> None:
    matcher = StopMatcher(["a" * 999 + "b", *("a" * (2 + i) + "b" * (990 - i) for i in range(15))])
    began = time.thread_time()
    out = "".join(matcher.push("a")[0] for _ in range(3_000))
    assert len(out) == 3_000 - 999
    assert time.thread_time() - began < 3, "it takes 0.1 s; a search of the held text for each beginning takes 40 s"
