"""The compiler: its thread, its cache, its limits, and what becomes of requests that wait for it."""

import logging
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from walks import demo

from gapless.base.errors import QueueFullError, RequestError
from gapless.base.params import SamplingParams
from gapless.base.records import NO_TOKENS, Request
from gapless.base.structured import StructuredOutputs
from gapless.grammar import compiler as compiler_module
from gapless.grammar import kept
from gapless.grammar.compiler import Compiler, GrammarCounts
from gapless.grammar.library import LlgLimits
from gapless.grammar.source import write_grammar

NUMBER = StructuredOutputs(regex="[0-9]+")
BAD = StructuredOutputs(json={"type": "array", "uniqueItems": True})


def request(key, form=NUMBER):
    params = SamplingParams(structured_outputs=form)
    return Request(key, np.zeros(1, np.int32), params, 0, (demo().eos,), 0, 20)


class Gate:
    """A vocabulary that comes when the test says so, and a bell that counts."""

    def __init__(self, open=True, error=None):
        self.asked = threading.Event()
        self.opened = threading.Event()
        self.rung = threading.Semaphore(0)
        self._error = error
        if open:
            self.opened.set()

    def vocabulary(self):
        self.asked.set()
        assert self.opened.wait(10)
        if self._error is not None:
            raise self._error
        return demo().vocabulary


@pytest.fixture
def clock(monkeypatch):
    """The compiler's clock, which a test moves on."""
    moved = SimpleNamespace(seconds=0.0)
    moved.monotonic = lambda: time.monotonic() + moved.seconds
    monkeypatch.setattr(compiler_module, "time", moved)
    return moved


@pytest.fixture
def compiling():
    """Make compilers that end with the test."""
    made = []

    def make(gate, **options):
        made.append(Compiler(gate.vocabulary, gate.rung.release, **{"room": 8, **options}))
        return made[-1]

    yield make
    for compiler in made:
        compiler.close()


def done(compiler, gate, count):
    """What the compiler gives when `count` requests are done: those that are ready, and those that are refused."""
    ready, refused = [], []
    while len(ready) + len(refused) < count:
        assert gate.rung.acquire(timeout=10)
        for found, more in zip((ready, refused), compiler.take(), strict=True):
            found += more
    return ready, refused


def ready(compiler, gate, count):
    """The requests that are ready, when `count` are done and none is refused."""
    found, refused = done(compiler, gate, count)
    assert not refused
    return found


def errors(compiler, gate, count):
    """Why requests are refused, when `count` are done and none is ready."""
    found, refused = done(compiler, gate, count)
    assert not found
    return [error for _, error in refused]


def test_a_request_comes_back_with_a_matcher_of_its_own(compiling):
    gate = Gate()
    compiler = compiling(gate)
    assert not gate.asked.is_set()
    for key in (1, 2, 3):
        compiler.submit(request(key))
    found = ready(compiler, gate, 3)
    assert [one.key for one in found] == [1, 2, 3] and compiler.waiting == 0
    first, second, _ = (one.matcher for one in found)
    digit = demo().tokenizer.encode("7", False)
    first.advance(digit)
    assert demo().eos in demo().allowed(first)
    assert demo().eos not in demo().allowed(second)
    counts = compiler.report()
    assert counts == GrammarCounts(compiled=1, ns=counts.ns, hits=2) and counts.ns > 0


def test_a_request_whose_form_was_compiled_waits_for_no_other_one(compiling):
    gate = Gate()
    compiler = compiling(gate)
    compiler.submit(request(1))
    ready(compiler, gate, 1)
    compiling_thread = threading.Semaphore(0)
    compiler.grammars.compile_form = lambda form: compiling_thread.acquire(timeout=10) and RequestError("never")
    try:
        compiler.submit(request(2, BAD))
        compiler.submit(request(3))
        assert [one.key for one in compiler.take()[0]] == [3] and compiler.waiting == 1
    finally:
        compiling_thread.release()


def test_users_of_one_form_get_lexers_of_their_own_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(kept, "MOST_LEXERS", 3)
    monkeypatch.setattr(kept, "GROWS_NS", 10**12)
    wanted = []
    grammars = kept.Grammars(demo().vocabulary, wanted.append)
    matchers = [grammars.matcher(NUMBER, (demo().eos,)) for _ in range(4)]
    assert wanted == [NUMBER], "it is asked for once"
    while wanted:
        grammars.grow(wanted.pop())
    matchers += [grammars.matcher(NUMBER, (demo().eos,)) for _ in range(4)]
    assert not wanted
    forms, numbers = zip(*(matcher.lexer for matcher in matchers), strict=True)
    assert len({*forms}) == 1 and sorted(numbers) == [0, 0, 0, 0, 1, 1, 2, 2]
    assert (grammars.compiled, grammars.hits) == (1, 7)
    assert len({demo().allowed(matcher).tobytes() for matcher in matchers}) == 1
    matchers = [matcher for matcher in matchers if matcher.lexer[1]]
    assert grammars.matcher(NUMBER, (demo().eos,)).lexer[1] == 0, "whose requests have ended"


def test_no_form_is_dropped_for_another_lexer(monkeypatch):
    monkeypatch.setattr(kept, "KEPT_BYTES", 2 * kept.GRAMMAR_BYTES + 50 * kept.BYTES_A_CHARACTER)
    monkeypatch.setattr(kept, "GROWS_NS", 10**12)
    wanted = []
    grammars = kept.Grammars(demo().vocabulary, wanted.append)
    other = StructuredOutputs(regex="a")
    matchers = [grammars.matcher(form, (demo().eos,)) for form in (other, NUMBER, NUMBER, NUMBER)]
    assert wanted == [NUMBER]
    grammars.grow(NUMBER)
    matchers.append(grammars.matcher(NUMBER, (demo().eos,)))
    assert len({matcher.lexer for matcher in matchers}) == 2 and len(grammars.forms) == 2


def test_a_further_lexer_waits_for_requests_and_a_slow_one_keeps_none_waiting_for_ever(compiling, clock, monkeypatch):
    monkeypatch.setattr(kept, "GROWS_NS", 10**12)
    gate = Gate()
    compiler = compiling(gate, seconds=60)
    compiler.submit(request(1))
    kept_alive = ready(compiler, gate, 1)
    begun, grown, grow = threading.Event(), threading.Semaphore(0), compiler.grammars.grow
    compiler.grammars.grow = lambda form: begun.set() or (grown.acquire(timeout=10) and grow(form))
    for key in (2, 3):
        compiler.submit(request(key))
    kept_alive += ready(compiler, gate, 2)
    assert begun.wait(10)
    compiler.submit(request(4, StructuredOutputs(regex="[a-c]+")))
    clock.seconds += 100
    (refused,) = compiler.take()[1]
    assert "took too long" in str(refused[1]), "it has been refused, though its own form was not begun"
    clock.seconds = 0
    grown.release()
    compiler.submit(request(5, StructuredOutputs(regex="[a-d]+")))
    assert [one.key for one in ready(compiler, gate, 1)] == [5]
    until = time.monotonic() + 60
    while len(compiler.grammars.forms[NUMBER.where, NUMBER].grammars) < 2:
        assert time.monotonic() < until
        grown.release()
        time.sleep(0.01)
    grown.release(100)


def test_a_form_that_takes_long_to_compile_has_one_lexer(monkeypatch):
    monkeypatch.setattr(kept, "GROWS_NS", 0)
    wanted = []
    grammars = kept.Grammars(demo().vocabulary, wanted.append)
    matchers = [grammars.matcher(NUMBER, (demo().eos,)) for _ in range(4)]
    assert not wanted and len({matcher.lexer for matcher in matchers}) == 1


def test_the_same_form_under_another_name_is_named_by_it(compiling):
    gate = Gate()
    compiler = compiling(gate)
    spelled = StructuredOutputs(json=BAD.json, source="guided_json")
    for key, form in enumerate([BAD, spelled, BAD, spelled]):
        compiler.submit(request(key, form))
    found = errors(compiler, gate, 4)
    assert [error.param for error in found] == ["structured_outputs.json", "guided_json"] * 2
    assert all("uniqueItems" in str(error) for error in found)
    counts = compiler.report()
    assert (counts.compiled, counts.hits, counts.refused) == (2, 2, 4)


def test_an_aborted_request_never_comes_back(compiling):
    gate = Gate(open=False)
    compiler = compiling(gate)
    for key in (1, 2, 3):
        compiler.submit(request(key))
    assert gate.asked.wait(10)
    compiler.abort(1)  # being compiled
    compiler.abort(3)  # in the queue
    compiler.abort(99)
    assert compiler.waiting == 1
    gate.opened.set()
    assert [one.key for one in ready(compiler, gate, 1)] == [2]
    compiler.submit(request(4))
    assert [one.key for one in ready(compiler, gate, 1)] == [4]
    assert compiler.take() == ([], [])


def test_more_requests_than_there_is_room_for_are_refused(compiling):
    gate = Gate(open=False)
    compiler = compiling(gate, room=2)
    compiler.submit(request(1))
    compiler.submit(request(2))
    with pytest.raises(QueueFullError, match="2 requests wait for their grammars"):
        compiler.submit(request(3))
    compiler.submit(request(4)._replace(output=NO_TOKENS))  # of an engine that died
    gate.opened.set()
    assert len(ready(compiler, gate, 3)) == 3
    compiler.submit(request(3))
    assert len(ready(compiler, gate, 1)) == 1


def test_a_request_that_waits_too_long_is_refused_and_its_grammar_is_kept(compiling, clock):
    gate = Gate(open=False)
    compiler = compiling(gate, seconds=60)
    compiler.submit(request(1))
    assert gate.asked.wait(10)
    compiler.submit(request(2))
    clock.seconds += 100
    found, ((one, late), (two, behind)) = compiler.take()
    assert isinstance(late, RequestError) and late.param == "structured_outputs.regex"
    assert "not compiled in 60 s" in str(late)
    assert isinstance(behind, QueueFullError) and not found
    assert (one, two, compiler.report().refused) == (1, 2, 2)
    gate.opened.set()
    assert gate.rung.acquire(timeout=10)
    assert compiler.take() == ([], [])
    compiler.submit(request(3))
    assert len(ready(compiler, gate, 1)) == 1
    assert compiler.report().hits == 1


def test_a_request_that_waits_while_others_are_compiled_is_not_refused(compiling, clock, monkeypatch):
    def slow(form, special):
        clock.seconds += 25
        return write_grammar(form, special)

    monkeypatch.setattr(kept, "write_grammar", slow)
    gate = Gate()
    compiler = compiling(gate, seconds=60)
    for key in range(5):
        compiler.submit(request(key, StructuredOutputs(regex=f"a{key}")))
    assert len(ready(compiler, gate, 5)) == 5


def test_a_vocabulary_that_cannot_be_made_refuses_each_request(compiling):
    gate = Gate(error=RequestError("no end-of-sequence token", "structured_outputs"))
    compiler = compiling(gate)
    for key in (1, 2):
        compiler.submit(request(key))
    assert ["end-of-sequence" in str(error) for error in errors(compiler, gate, 2)] == [True, True]


def test_a_fault_of_the_library_refuses_the_request_and_the_thread_goes_on(compiling, monkeypatch, caplog):
    class Panic(BaseException):
        pass

    def fail(form, special):
        raise Panic("index out of bounds")

    gate = Gate()
    compiler = compiling(gate)
    with monkeypatch.context() as patch, caplog.at_level(logging.CRITICAL):
        patch.setattr(kept, "write_grammar", fail)
        compiler.submit(request(1))
        (refused,) = errors(compiler, gate, 1)
    assert "cannot be compiled: Panic" in str(refused)
    compiler.submit(request(2))
    assert len(ready(compiler, gate, 1)) == 1


def test_the_grammars_used_least_recently_are_dropped(monkeypatch):
    monkeypatch.setattr(kept, "KEPT_GRAMMARS", 2)
    grammars = kept.Grammars(demo().vocabulary)
    one, two, three = (StructuredOutputs(regex=text) for text in "abc")
    for form in (one, two, one, three, one):
        grammars.matcher(form, (demo().eos,))
    assert (grammars.compiled, grammars.hits) == (3, 2)
    grammars.matcher(two, (demo().eos,))
    assert grammars.compiled == 4


def test_large_grammars_are_dropped_before_there_are_many(monkeypatch):
    monkeypatch.setattr(kept, "KEPT_BYTES", 2 * kept.GRAMMAR_BYTES + 6_000 * kept.BYTES_A_CHARACTER)
    grammars = kept.Grammars(demo().vocabulary)
    small, large = StructuredOutputs(regex="a"), StructuredOutputs(choice=["b" * 5_000])
    for form in (small, large, small, large):
        grammars.matcher(form, (demo().eos,))
    assert (grammars.compiled, grammars.hits) == (2, 2), "these two may be kept"
    huge = StructuredOutputs(choice=["c" * 60_000])
    for form in (huge, huge, small):
        grammars.matcher(form, (demo().eos,))
    assert (grammars.compiled, grammars.hits) == (4, 3), "the latest is kept whatever it takes, and no other beside it"


def test_a_grammar_that_its_requests_have_grown_to_the_limit_is_compiled_again(monkeypatch):
    limits = LlgLimits.from_buffer_copy(kept.LIMITS)
    limits.max_lexer_states = 240
    monkeypatch.setattr(kept, "LIMITS", limits)
    grammars = kept.Grammars(demo().vocabulary)
    form = StructuredOutputs(regex="([a-z]{2,9}[0-9]{3,7} ){3,40}")
    matcher = grammars.matcher(form, (demo().eos,))
    with pytest.raises(RequestError, match=r"structured_outputs\.regex: the output cannot go on: .*too many states"):
        for _ in range(1_000):
            matcher.advance(demo().allowed(matcher)[-1:].tolist())
    assert grammars.compiled == 1
    again = grammars.matcher(form, (demo().eos,))
    assert grammars.compiled == 2 and len(demo().allowed(again))


@pytest.mark.process
def test_the_library_is_imported_for_the_first_form_and_not_before():
    code = "import sys; import gapless.engine.core, gapless.server.app; assert 'llguidance' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_closing_waits_for_the_compilation_that_runs(compiling):
    gate = Gate(open=False)
    compiler = compiling(gate)
    compiler.submit(request(1))
    assert gate.asked.wait(10)
    threading.Timer(0.1, gate.opened.set).start()
    compiler.close()
    assert compiler.waiting == 0 and compiler.take() == ([], [])
    assert not [thread for thread in threading.enumerate() if thread.name == "gapless-grammar"]
