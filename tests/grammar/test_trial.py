"""Grammars that would take an engine's stack, memory or time are refused by a process that dies in its place."""

import threading

import pytest
from sharpest import sharpest
from walks import demo

from gapless.base.errors import RequestError
from gapless.base.structured import StructuredOutputs
from gapless.grammar import trial
from gapless.grammar.kept import Grammars

LINKS = {f"d{link}": {"$ref": f"#/$defs/d{link + 1}"} for link in range(2_900)} | {"d2900": {"type": "integer"}}
DEADLY = {
    "chain of references": StructuredOutputs(json={"$ref": "#/$defs/d0", "$defs": LINKS}),
    "chain of rules": StructuredOutputs(
        grammar="start: r0\n" + "\n".join(f"r{rule}: r{rule + 1}" for rule in range(3_000)) + '\nr3000: "a"'
    ),
    "one regex": StructuredOutputs(regex="a?" * 60_000),
    "another": StructuredOutputs(regex="(.*a.*b)?" * 8_000),
    "one terminal": StructuredOutputs(
        grammar="start: A\nA: " + " & ".join(f"/.*a.{{{count}}}N.*/" for count in range(1, 200))
    ),
}
ORDINARY = StructuredOutputs(json={"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}$"})


@pytest.fixture
def grammars():
    made = Grammars(demo().vocabulary)
    yield made
    made.close()


@pytest.mark.parametrize("name", sharpest(DEADLY, mark="process"))
def test_a_form_that_would_kill_the_engine_is_refused_by_name_and_the_next_one_served(grammars, name):
    form = DEADLY[name]
    with pytest.raises(RequestError, match="compiling it takes more") as refused:
        grammars.matcher(form, (demo().eos,))
    assert refused.value.param == form.where
    with pytest.raises(RequestError, match="compiling it takes more"):
        grammars.matcher(form, (demo().eos,))
    assert (grammars.compiled, grammars.hits) == (1, 1), "a refusal is kept as grammars are"
    assert len(demo().allowed(grammars.matcher(ORDINARY, (demo().eos,))))


def test_a_compilation_without_end_is_ended(grammars, monkeypatch):
    monkeypatch.setattr(trial, "TRIAL_SECONDS", 0.05)
    monkeypatch.setattr(trial, "START_SECONDS", 0.0)
    with pytest.raises(RequestError, match=r"more than 0.05 s"):
        grammars.matcher(DEADLY["another"], (demo().eos,))


def test_the_trial_knows_the_names_that_a_grammar_may_use(grammars):
    """Tokens by their ids, and special ones by their texts."""
    text, token = next((text, token) for text, token in demo().vocabulary.added.items() if text.startswith("<|"))
    grammar = f'start: <[{token}]> {text} LONG\nLONG: "{"x" * trial.SMALL["grammar"]}"'
    matcher = grammars.matcher(StructuredOutputs(grammar=grammar), (demo().eos,))
    assert demo().allowed(matcher).tolist() == [token]


@pytest.mark.parametrize("form", [StructuredOutputs(regex="[a-z]+"), StructuredOutputs(json={"type": "integer"})])
def test_a_small_form_needs_no_trial(grammars, monkeypatch, form):
    monkeypatch.setattr(trial.Trial, "refusal", lambda *_: pytest.fail("it was tried"))
    assert len(demo().allowed(grammars.matcher(form, (demo().eos,))))


def test_large_forms_are_refused_when_no_process_can_be_started(monkeypatch):
    def fails(*_, **__):
        raise OSError("no more processes")

    monkeypatch.setattr(trial.subprocess, "Popen", fails)
    grammars = Grammars(demo().vocabulary)
    with pytest.raises(RequestError, match="no process can be started"):
        grammars.matcher(ORDINARY, (demo().eos,))
    assert len(demo().allowed(grammars.matcher(StructuredOutputs(regex="[a-z]+"), (demo().eos,))))
    grammars.close()


def test_the_thread_that_compiles_has_more_stack_than_a_trial():
    from gapless.grammar.compiler import COMPILER_STACK_BYTES

    before = threading.stack_size()
    assert trial.STACK_BYTES * 16 <= COMPILER_STACK_BYTES and threading.stack_size() == before
