"""A process that compiles grammars first, and may die of them.

llguidance recurses as deep as a grammar nests, and its fuel does not bound what it builds of a regular expression: a
form of 100 KB can overflow a stack, or take gigabytes. So a grammar that is not plainly small is compiled here before
the engine does, with less stack, memory and time than the engine's thread has. What passes is safe there.
"""

from __future__ import annotations

import json
import logging
import resource
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path

import numpy as np

from gapless.base.structured import StructuredOutputs
from gapless.grammar.library import LlgLimits, LlgMatcher, LlgTokens

log = logging.getLogger("gapless.grammar")

LIMITS = LlgLimits(
    max_grammar_size=10_000,  # symbols: 8 for an optional property, 4 for a required one
    max_lexer_states=250_000,  # of one lexer, over all requests that use it: 1 to 2 KB each
    initial_lexer_fuel=1_000_000,  # lexer work of a compilation: 50,000 a ms
    step_lexer_fuel=200_000,  # and of one mask: 14,000 a ms
    max_items_in_row=2_000,  # of the parser, at one place of the output: 4 for each optional property of an object
    step_max_items=50_000,  # and for one mask
    precompute_large_lexemes=True,
    verbose_errors=False,
)
FURTHER_LIMITS = LlgLimits.from_buffer_copy(LIMITS)
"""Limits of a form's lexers after the first, up to seven"""
FURTHER_LIMITS.max_lexer_states = LIMITS.max_lexer_states // 4
STACK_BYTES = 4 << 20
"""Half of what the threads have that make masks"""
TRIAL_MEMORY_BYTES = 256 << 20
TRIAL_SECONDS = 4.0
START_SECONDS = 30.0
CPU_SECONDS = 600
"""Seconds of one process at most: a killed engine leaves none behind"""
SMALL = {"json": 8 << 10, "choice": 8 << 10, "json_object": 1 << 10, "regex": 200, "grammar": 300}
"""Bytes of forms, by kind, that need no trial. What a pattern costs has little to do with its length."""


def is_small(form: StructuredOutputs) -> bool:
    """Return whether a form is compiled without a trial."""
    text = form.text
    patterned = form.kind == "json" and "pattern" in text
    return len(text) <= SMALL.get(form.kind, 0) and not patterned and form.whitespace_pattern is None


class Trial:
    """The process, started when it is needed, and again after each grammar that it died of. One thread uses it."""

    def __init__(self, size: int, special: dict[str, int], ends: tuple[int, ...]) -> None:
        """`special` are the tokens of a vocabulary of `size` that grammars may name, by text."""
        self._setup = {"size": size, "special": special, "ends": ends}
        self._process: subprocess.Popen[str] | None = None
        self._answered = False
        """Whether this process has answered anything: it takes a moment to start."""
        self._end: weakref.finalize[..., Trial] | None = None

    def refusal(self, grammar: str) -> str:
        """Return why a grammar cannot be compiled; empty when it can."""
        process = self._process or self._start()
        if process is None:
            return "no process can be started to try it in, as all but small forms are"
        assert process.stdin is not None and process.stdout is not None
        began, seconds = time.monotonic(), TRIAL_SECONDS + (0 if self._answered else START_SECONDS)
        timer = threading.Timer(seconds, process.kill)
        timer.daemon = True
        timer.start()
        try:
            questions = [grammar] if self._answered else [self._setup, grammar]
            process.stdin.writelines(f"{json.dumps(question)}\n" for question in questions)
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            timer.cancel()
        slow = time.monotonic() - began >= seconds
        if slow or not answer.endswith("\n"):  # it died, perhaps while it wrote
            self.close()
            return "compiling it takes more " + (
                f"than {TRIAL_SECONDS:g} s" if slow else "stack or memory than there is"
            )
        self._answered = True
        return str(json.loads(answer))

    def close(self) -> None:
        """End the process."""
        if self._end is not None:
            self._end()
        self._process = None

    def _start(self) -> subprocess.Popen[str] | None:
        command, pipe = [sys.executable, "-m", "gapless.grammar.trial"], subprocess.PIPE
        try:
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        except OSError:
            log.warning("forms of output that are not small are refused: no process can be started", exc_info=True)
            return None
        self._answered = False
        self._end = weakref.finalize(self, _ended, self._process)
        return self._process


def _ended(process: subprocess.Popen[str]) -> None:
    process.kill()
    with suppress(BrokenPipeError):  # the unread rest of the last question
        process.communicate()


# The process.


def tokens_of(size: int, special: dict[str, int], ends: list[int]) -> LlgTokens:
    """Return a vocabulary of single bytes, with the special tokens of another one at their places."""
    texts = [b""] * size
    for text, token in special.items():
        texts[token] = text.encode()
    free = (token for token in range(size) if not texts[token] and token not in ends)
    for byte, token in zip(range(256), free, strict=False):
        texts[token] = bytes([byte])
    return LlgTokens(texts, frozenset(special.values()) | frozenset(ends), ends)


def _answer() -> None:
    setup = json.loads(sys.stdin.readline())
    tokens = tokens_of(setup["size"], setup["special"], setup["ends"])
    words = np.empty(-(-tokens.size // 32), np.int32)
    _limit_memory()
    for line in sys.stdin:
        made = LlgMatcher.compile(tokens, json.loads(line), LIMITS)
        reason = made.error
        if not reason and not made.write_mask(words):
            reason = made.error
        print(json.dumps(reason), flush=True)


def _limit_memory() -> None:
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except OSError:
        return  # only Linux reports the address space in use
    limit = pages * resource.getpagesize() + TRIAL_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    """Compile grammars, one a line as JSON, on a small stack, and print the fault of each."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_answer)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
