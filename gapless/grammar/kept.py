"""Grammars: compiled grammars by their source, and the limits of their compilation and masks."""

from __future__ import annotations

import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from gapless.base.errors import RequestError
from gapless.base.records import Matcher
from gapless.base.structured import StructuredOutputs
from gapless.grammar.budget import BudgetMatcher
from gapless.grammar.library import LlgMatcher, warnings
from gapless.grammar.matcher import FormMatcher, Grammar
from gapless.grammar.source import fault, write_grammar
from gapless.grammar.thinking import after_thinking, is_counted
from gapless.grammar.trial import FURTHER_LIMITS, LIMITS, Trial, is_small
from gapless.grammar.vocabulary import Vocabulary

KEPT_GRAMMARS, KEPT_BYTES = 128, 256 << 20
"""Compiled grammars that are kept, and what these may take; the least recently used ones are dropped first."""
GRAMMAR_BYTES, BYTES_A_CHARACTER = 128 << 10, 150
"""Bytes of a compiled grammar, and more for each character of its text: measured for forms of several kinds; the
most was 143, of optional properties. The library does not report it."""
MOST_LEXERS, GROWS_NS = 8, 50_000_000
"""Lexers of a form, which is compiled once for each, unless that takes a processor longer: one thread at a time uses a
lexer, and a mask may take a millisecond."""
WALKS, WALK_TOKENS, WALK_SECONDS = 2, 40, 0.01
"""Outputs that are drawn at random when a grammar has been compiled, tokens of each, and processor time for all."""


class KeptForm:
    """A compiled form: one grammar or more, each with a lexer of its own, or the reason for none."""

    def __init__(self, made: Grammar | RequestError, nbytes: int) -> None:
        self.grammars = [made] if isinstance(made, Grammar) else []
        self.refusal = None if isinstance(made, Grammar) else made
        self.each = nbytes
        """Bytes of a grammar, by estimate"""
        self._grows = isinstance(made, Grammar) and made.compile_ns < GROWS_NS
        """Whether there may be another one"""
        self.growing = False
        """Whether one has been asked for"""

    @property
    def nbytes(self) -> int:
        return self.each * max(1, len(self.grammars))

    @property
    def crowded(self) -> bool:
        """Whether its users would be served sooner by more lexers."""
        users, lexers = sum([len(one.users) for one in self.grammars]), len(self.grammars)
        return self._grows and 0 < lexers < min(users, MOST_LEXERS)

    def add(self, made: Grammar | RequestError) -> None:
        """Add a grammar; what cannot be compiled once more is not tried again."""
        if isinstance(made, Grammar):
            made.lexer = self.grammars[0].lexer[0], len(self.grammars)
            self.grammars.append(made)
        else:
            self._grows = False

    @property
    def least_used(self) -> Grammar | None:
        """The grammar with the fewest users; None without one, or where that has failed."""
        least = min(self.grammars, key=lambda one: len(one.users), default=None)
        return None if least is None or least.failed else least


class Grammars:
    """Makes matchers, and keeps compiled grammars for later requests. One thread compiles; any may ask for one."""

    def __init__(self, vocabulary: Vocabulary, want: Callable[[StructuredOutputs], None] | None = None) -> None:
        """`want` has `grow` called, when that thread has nothing else to do; None: forms have one lexer each."""
        self.compiled = self.compile_ns = self.hits = 0
        self._vocabulary = vocabulary
        self._want = want
        self._scratch = np.empty(-(-vocabulary.tokens.size // 32), np.int32)
        marks = [vocabulary.tokens.tokenize(mark) for mark in '"]},:']
        self._marks = [tokens[0] for tokens in marks if len(tokens) == 1]
        self._lock = threading.Lock()
        self.forms: OrderedDict[tuple[str, StructuredOutputs], KeptForm] = OrderedDict()
        self._trial = Trial(vocabulary.tokens.size, vocabulary.added, vocabulary.ends)

    def close(self) -> None:
        """End what compiles grammars first."""
        self._trial.close()

    def matcher(self, form: StructuredOutputs, stop_ids: tuple[int, ...]) -> FormMatcher:
        """Return a matcher of a request's own. Raises RequestError."""
        found = self.kept(form, stop_ids)
        if found is None:
            self._keep(form)
            found = self.kept(form, stop_ids, hit=False)
        assert found is not None, "what was compiled last is kept"
        if not form.begun or found.begin(self._vocabulary.tokenized(form.begun, form.marks)):
            return found
        if form.parts or form.kind.startswith("json"):
            text = "the final message begins an output that is not of this form"
            raise RequestError(f"{form.where}: {text}: end that message before it", form.where)
        found = self.kept(form, stop_ids, hit=False)
        assert found is not None, "a text before it changes nothing"
        return found

    def within_budget(self, matcher: FormMatcher, form: StructuredOutputs) -> Matcher:
        """Return the matcher, or one around it that keeps the budget of a thinking whose marks are text."""
        if form.thinking is None or form.thinking.budget is None or is_counted(form.thinking, self._vocabulary):
            return matcher
        inner = None if form.thinking.free else matcher
        return BudgetMatcher(form.thinking, self._vocabulary.texts, inner, form.begun)

    def kept(self, form: StructuredOutputs, stop_ids: tuple[int, ...], hit: bool = True) -> FormMatcher | None:
        """Return a matcher if the form's grammar is kept, else None. Raises RequestError."""
        key = (form.where, form)
        with self._lock:
            found = self.forms.get(key)
            if found is None:
                return None
            least, refusal = found.least_used, found.refusal
            if least is None and refusal is None:
                return None
            self.forms.move_to_end(key)
            self.hits += hit
            if least is None:
                raise RequestError(str(refusal), refusal.param if refusal else None)
            matcher = FormMatcher(least, form, stop_ids)
            if self._want is not None and not found.growing and found.crowded:
                found.growing = True
                self._want(form)
            return matcher

    def grow(self, form: StructuredOutputs) -> None:
        """Compile a form once more, for another lexer, unless other forms would have to go for it. Then ask for the
        next, if there are users for it."""
        with self._lock:
            found = self.forms.get((form.where, form))
            if found is None or not found.crowded or self._nbytes + found.each > KEPT_BYTES:
                if found is not None:
                    found.growing = False
                return
        made = self.compile_form(form, first=False)
        with self._lock:
            found.add(made)
            found.growing = found.crowded
        if found.growing and self._want is not None:
            self._want(form)

    def _keep(self, form: StructuredOutputs) -> None:
        began = time.perf_counter_ns()
        made = self.compile_form(form)
        self.compiled += 1
        self.compile_ns += time.perf_counter_ns() - began
        kept = KeptForm(made, GRAMMAR_BYTES + BYTES_A_CHARACTER * len(form.text))
        with self._lock:
            self.forms[form.where, form] = kept
            self.forms.move_to_end((form.where, form))
            # The latest grammar stays, whatever it takes.
            while len(self.forms) > KEPT_GRAMMARS or (len(self.forms) > 1 and self._nbytes > KEPT_BYTES):
                self.forms.popitem(last=False)

    @property
    def _nbytes(self) -> int:
        return sum(one.nbytes for one in self.forms.values())

    def compile_form(self, form: StructuredOutputs, first: bool = True) -> Grammar | RequestError:
        """Compile a form. What is not the first grammar of it has passed all checks before."""
        try:
            text = write_grammar(form, self._vocabulary.special)
            if form.thinking is not None:
                text = after_thinking(text, form.thinking, self._vocabulary, form.marks)
            if first and not is_small(form) and (reason := self._trial.refusal(text)):
                return fault(form, reason)
            tokens = self._vocabulary.marked(form.marks)
            limits, began = LIMITS if first else FURTHER_LIMITS, time.thread_time_ns()
            made = LlgMatcher.compile(tokens, text, limits)
            reason = made.error or (first and warnings(tokens, text, limits)) or self._rehearse(made)
            if reason:
                return fault(form, reason)
            return Grammar(made, self._vocabulary.texts, time.thread_time_ns() - began)
        except RequestError as error:
            return error

    def _rehearse(self, matcher: LlgMatcher) -> str:
        """Draw outputs at random, which also fills the caches of masks. Returns the reason why one cannot continue."""
        end = time.thread_time() + WALK_SECONDS
        for seed in range(WALKS):
            walk, rng = matcher.copy(), random.Random(seed)
            for _ in range(WALK_TOKENS):
                if not walk.write_mask(self._scratch):
                    return walk.error
                if walk.stopped or time.thread_time() > end:
                    break
                walk.consume(self._draw(rng))
        return ""

    def _draw(self, rng: random.Random) -> int:
        """Draw a token that the latest mask allows: often one that ends a part of JSON, else any."""
        marks = [mark for mark in self._marks if self._scratch[mark // 32] >> mark % 32 & 1]
        if marks and rng.random() < 0.5:
            return int(rng.choice(marks))
        place = int(rng.choice(np.flatnonzero(self._scratch)))
        word = int(self._scratch[place])
        return 32 * place + rng.choice([bit for bit in range(32) if word >> bit & 1])
