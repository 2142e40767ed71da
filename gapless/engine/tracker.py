"""Open requests: a step's tokens go to their completions, become text, and wait there for their reader.

Nothing here knows asyncio or a core; AsyncLLM and LLM both stand on it. One thread uses a Tracker.
"""

from __future__ import annotations

from collections.abc import Callable

from gapless.base.clock import Clock, monotonic
from gapless.base.params import SamplingParams
from gapless.base.records import Flag, StepLogprobs, StepTokens
from gapless.engine.history import History, RequestRecord
from gapless.engine.inputs import Resolved
from gapless.engine.logprobs import entry
from gapless.engine.outputs import CompletionOutput, Delta, FinishReason, RequestMetrics, RequestOutput, TokenLogprobs
from gapless.engine.seam import Started
from gapless.text.incremental import Detokenizer
from gapless.text.stops import StopMatcher
from gapless.text.tokenizer import Tokenizer

_LIVE, _STOP, _LENGTH, _ERROR, _INERT = (int(flag) for flag in Flag)


class OpenRequest:
    """One request and its completions. The reader takes what is new with `take`; until then it gathers here.

    What gathers is at most what the request may generate, so a slow reader costs no more memory than a fast one.
    """

    def __init__(
        self, request_id: str, resolved: Resolved, tokenizer: Tokenizer, now: int, wake: Callable[[], None]
    ) -> None:
        self.request_id = request_id
        self.resolved = resolved
        self.prompt_token_ids: list[int] = resolved.tokens.tolist()
        self.cached = 0
        self.arrival, self.started, self.first_token, self.last_token = now, 0, 0, 0
        self.error: Exception | None = None
        self.failed = False
        """It ended with an exception."""
        self.preemptions = 0
        self.wake = wake
        self._tokenizer = tokenizer
        self._lines: list[tuple[StepLogprobs, int]] = []
        """Where the log-probabilities of the prompt stand, from its second token on."""
        self._entries: list[TokenLogprobs | None] = [None]
        asked = resolved.params.prompt_logprobs is not None
        self._scoring = asked and len(self.prompt_token_ids) > 1
        """Log-probabilities of the prompt are to come, and nothing is news before them."""
        self.sequences = [
            Sequence(self, index, request.key, tokenizer) for index, request in enumerate(resolved.requests)
        ]
        self.open = len(self.sequences)
        """Completions that have not ended."""
        self._new: dict[int, Sequence] = {}

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """One entry a prompt token, as far as they have come; None when not asked for.

        They are made here, on the reader's thread: a step may score thousands, and everybody's tokens would wait.
        """
        top = self.resolved.params.prompt_logprobs
        if top is None:
            return None
        made = self._entries
        for scored, row in self._lines[len(made) - 1 :]:
            made.append(entry(scored, row, self.prompt_token_ids[len(made)], top, self._tokenizer))
        return made

    @property
    def metrics(self) -> RequestMetrics:
        generated = sum(len(sequence.token_ids) for sequence in self.sequences)
        times = (self.arrival, self.started, self.first_token, self.last_token)
        return RequestMetrics(*times, generated, self.preemptions)

    @property
    def finished(self) -> bool:
        """Every completion has ended; what they gathered may still wait in `take`."""
        return self.open == 0

    @property
    def has_news(self) -> bool:
        return (bool(self._new) and not self._scoring) or self.error is not None

    def touch(self, sequence: Sequence) -> None:
        """This completion has something new; `announce` tells the reader when all of it is there."""
        self._new[sequence.index] = sequence

    def announce(self) -> None:
        """Wake the reader, if there is something for it."""
        if self.has_news:
            self.wake()

    def scored(self, position: int, scored: StepLogprobs, row: int) -> None:
        """Line `row` is of the prompt token at `position`, which must be the next one."""
        assert position == len(self._lines) + 1, f"prompt position {position} is scored out of turn"
        self._lines.append((scored, row))
        if position == len(self.prompt_token_ids) - 1:
            self.release()

    def release(self) -> None:
        """No more of the prompt will be scored: what waited for it is news now."""
        if self._scoring:
            self._scoring = False
            self._new = dict(sorted(self._new.items()))  # if the scored one failed, that comes first

    def fail(self, error: Exception) -> None:
        """End with an exception, which the reader gets after what it has not read yet."""
        if self._scoring:
            self._new.clear()  # never was news: a reader counts on the whole prompt's log-probabilities
        self.error = error
        self.failed = True
        self.open = 0
        self.announce()

    def take(self) -> list[Delta]:
        """What is new in each completion since the last take."""
        news, self._new = self._new, {}
        return [sequence.take() for sequence in news.values()]

    def snapshot(self) -> RequestOutput:
        """Everything so far, what is not taken yet included."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.resolved.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[sequence.snapshot() for sequence in self.sequences],
            finished=self.finished,
            num_cached_tokens=self.cached,
            metrics=self.metrics,
            prompt_logprobs=None if (entries := self.prompt_logprobs) is None else entries.copy(),
        )


class Sequence:
    """One completion: its tokens, its text, and how it ended."""

    __slots__ = (
        "_detokenizer",
        "_parts",
        "_stops",
        "_taken_parts",
        "_taken_tokens",
        "cumulative_logprob",
        "finish_reason",
        "index",
        "key",
        "logprobs",
        "min_tokens",
        "owner",
        "started",
        "stop_reason",
        "token_ids",
    )

    def __init__(self, owner: OpenRequest, index: int, key: int, tokenizer: Tokenizer) -> None:
        params = owner.resolved.params
        self.owner = owner
        self.index = index
        self.key = key
        self.min_tokens = params.min_tokens
        self.started = False
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self.cumulative_logprob: float | None = None if params.logprobs is None else 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._parts: list[str] = []
        self._taken_parts = 0
        self._taken_tokens = 0
        self._detokenizer = _detokenizer(owner, params, tokenizer)
        self._stops = StopMatcher(params.stop_strings, params.include_stop_str_in_output) if params.stop else None

    def score(self, position: int, sampled: int | None, scored: StepLogprobs, row: int, tokenizer: Tokenizer) -> None:
        """Line `row` of a step's log-probabilities is of this completion: of its prompt, or of its next token."""
        owner, params = self.owner, self.owner.resolved.params
        new = position - len(owner.prompt_token_ids)
        if new < 0:
            assert params.prompt_logprobs is not None
            owner.scored(position, scored, row)
            return
        assert self.logprobs is not None and params.logprobs is not None and sampled is not None
        assert new == len(self.logprobs) == len(self.token_ids), f"token {new} is scored out of turn"
        self.logprobs.append(entry(scored, row, sampled, params.logprobs, tokenizer))
        self.cumulative_logprob = (self.cumulative_logprob or 0.0) + self.logprobs[-1][sampled].logprob

    def push(self, token: int, flag: int) -> bool:
        """One settled token. True when a stop string ended the completion, which the engine does not know."""
        if flag == _INERT:
            return False
        if flag == _ERROR:
            self._end("error", None)
            return False
        self.token_ids.append(token)
        hidden = flag == _STOP and not self.owner.resolved.params.include_stop_str_in_output
        stopped = self._detokenizer is not None and not hidden and self._text(self._detokenizer.push((token,)))
        if not stopped and flag != _LIVE:
            stopped = self._flush()
        if not stopped and flag == _STOP:
            self._end("stop", token if token in self.owner.resolved.params.stop_ids else None)
        elif not stopped and flag == _LENGTH:
            self._end("length", None)
        self.owner.touch(self)
        return stopped and flag == _LIVE

    def _text(self, text: str) -> bool:
        """Add text that the tokens settled; True when it completed a stop string."""
        if self._stops is None or len(self.token_ids) <= self.min_tokens:
            if text:
                self._parts.append(text)
            return False
        shown, found = self._stops.push(text)
        if shown:
            self._parts.append(shown)
        if found is not None:
            self._end("stop", found)
        return found is not None

    def _flush(self) -> bool:
        """The last token has come: what was held back is text now. True when even that completed a stop string."""
        if self._detokenizer is not None and self._text(self._detokenizer.finish()):
            return True
        rest = self._stops.finish() if self._stops is not None else ""
        if rest:
            self._parts.append(rest)
        return False

    def _end(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self.owner.open -= 1
        self.owner.touch(self)
        if self.index == 0:
            self.owner.release()  # the first completion is the one whose prompt is scored

    def abort(self) -> None:
        """End without further tokens; what was held back is given out."""
        if not self._flush():
            self._end("abort", None)

    def take(self) -> Delta:
        text = "".join(self._parts[self._taken_parts :])
        tokens = self.token_ids[self._taken_tokens :]
        logprobs = None if self.logprobs is None else self.logprobs[self._taken_tokens : len(self.token_ids)]
        self._taken_parts, self._taken_tokens = len(self._parts), len(self.token_ids)
        return Delta(self.index, text, tokens, self.finish_reason, self.stop_reason, logprobs)

    def snapshot(self) -> CompletionOutput:
        # One joined part instead of many: the next snapshot joins little.
        whole = "".join(self._parts)
        if self._taken_parts == len(self._parts):
            self._parts, self._taken_parts = [whole], 1
        return CompletionOutput(
            self.index,
            whole,
            self.token_ids.copy(),
            self.finish_reason,
            self.stop_reason,
            self.cumulative_logprob,
            None if self.logprobs is None else self.logprobs.copy(),
        )


def _detokenizer(owner: OpenRequest, params: SamplingParams, tokenizer: Tokenizer) -> Detokenizer | None:
    if not params.detokenize:
        return None
    return Detokenizer(tokenizer, params.skip_special_tokens, owner.prompt_token_ids)


class Tracker:
    """All open completions by key. `abort(key)` tells the engine to stop one that ended here; `idle()` is called
    whenever the last open request has ended.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        abort: Callable[[int], None],
        idle: Callable[[], None] = lambda: None,
        clock: Clock = monotonic,
    ) -> None:
        self._tokenizer = tokenizer
        self._abort = abort
        self._idle = idle
        self._clock = clock
        self._open: dict[int, Sequence] = {}
        self.requests: dict[str, OpenRequest] = {}
        """Requests with at least one open completion, by request id."""
        self.detok_ns = 0
        """Time spent on making text of tokens."""
        self._history = History()

    def open(self, request_id: str, resolved: Resolved, wake: Callable[[], None]) -> OpenRequest:
        """Begin to follow a request; its id must not be open."""
        assert request_id not in self.requests, "the caller refuses an id that is open"
        request = OpenRequest(request_id, resolved, self._tokenizer, self._clock(), wake)
        self.requests[request_id] = request
        for sequence in request.sequences:
            self._open[sequence.key] = sequence
        return request

    def on_started(self, item: Started) -> None:
        sequence = self._open.get(item.key)
        if sequence is None:
            return
        request = sequence.owner
        request.preemptions += sequence.started
        sequence.started = True
        if not request.started:  # a later completion, or one that was preempted, finds its own prompt cached
            request.started, request.cached = self._clock(), item.cached

    def on_tokens(self, item: StepTokens) -> None:
        """Hand each token to its completion. Tokens of completions that have ended are dropped."""
        touched: dict[OpenRequest, None] = {}
        if item.logprobs is not None:
            self._on_logprobs(item.logprobs, item, touched)
        now = self._clock()
        find = self._open.get
        for key, token, flag in zip(item.keys.tolist(), item.tokens.tolist(), item.flags.tolist(), strict=True):
            sequence = find(key)
            if sequence is None:
                continue
            request = sequence.owner
            touched[request] = None
            request.first_token = request.first_token or now
            request.last_token = now
            stopped = sequence.push(token, flag)
            if sequence.finish_reason is not None:
                self._close(sequence)
            if stopped:
                self._abort(key)
        self.detok_ns += self._clock() - now
        for request in touched:
            request.announce()

    def latest(self, limit: int) -> list[RequestRecord]:
        """The newest requests, open and ended, newest last."""
        return self._history.latest(list(self.requests.values()), limit)

    def _on_logprobs(self, scored: StepLogprobs, item: StepTokens, touched: dict[OpenRequest, None]) -> None:
        """Hand the log-probabilities of a step to its completions, ahead of the tokens that they belong to."""
        sampled = dict(zip(item.keys.tolist(), item.tokens.tolist(), strict=True))
        for row, (key, position) in enumerate(zip(scored.keys.tolist(), scored.positions.tolist(), strict=True)):
            sequence = self._open.get(key)
            if sequence is not None:
                touched[sequence.owner] = None
                sequence.score(position, sampled.get(key), scored, row, self._tokenizer)

    def _close(self, sequence: Sequence) -> None:
        del self._open[sequence.key]
        if sequence.owner.finished:
            self._drop(sequence.owner)

    def _drop(self, request: OpenRequest) -> None:
        del self.requests[request.request_id]
        self._history.add(request)
        if not self.requests:
            self._idle()

    def abort(self, request_id: str) -> bool:
        """End what is open of a request with finish reason "abort", here and in the engine. False when unknown."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                sequence.abort()
                self._close(sequence)
                self._abort(sequence.key)
        request.announce()
        return True

    def fail(self, key: int, error: Exception) -> None:
        """The engine would not take this key: its whole request ends with the error."""
        sequence = self._open.get(key)
        if sequence is None:
            return
        for sibling in self._forget(sequence.owner, error):
            if sibling.key != key:
                self._abort(sibling.key)

    def break_off(self, request: OpenRequest, error: Exception) -> None:
        """Its reader failed: the request ends with the error, here and in the engine."""
        if request.finished:
            request.error = request.error or error
            return
        for sequence in self._forget(request, error):
            self._abort(sequence.key)

    def fail_all(self, error: Callable[[], Exception]) -> None:
        """The engine is gone: every open request ends with an error of its own."""
        for request in list(self.requests.values()):
            self._forget(request, error())

    def _forget(self, request: OpenRequest, error: Exception) -> list[Sequence]:
        """End a request with an error; the completions of it that were open."""
        request.fail(error)
        self._drop(request)
        return [s for s in request.sequences if self._open.pop(s.key, None) is not None]
