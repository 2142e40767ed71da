"""An open request and its completions: tokens become text, and wait for their reader.

Nothing here depends on asyncio or a core.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gapless.base.records import Flag, Request, StepLogprobs
from gapless.engine.inputs import Resolved
from gapless.engine.outputs import (
    CompletionOutput,
    Delta,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from gapless.engine.trace import RequestRecord
from gapless.text.incremental import Detokenizer
from gapless.text.stops import StopMatcher
from gapless.text.tokenizer import Tokenizer

_LIVE, _STOP, _LENGTH, _ERROR, _INERT = (
    int(flag) for flag in (Flag.LIVE, Flag.STOP, Flag.LENGTH, Flag.ERROR, Flag.INERT)
)


class OpenRequest:
    """A request and its completions. New output gathers here until the reader calls `take`.

    The request's length bounds the gathered output, so a slow reader costs no more memory than a fast one.
    """

    def __init__(
        self,
        request_id: str,
        resolved: Resolved,
        tokenizer: Tokenizer,
        arrival: int,
        label: str = "",
        interval: int = 0,
    ) -> None:
        """`label` is the client's name for it. `interval`, if not 0, is the most tokens of a Delta, which waits for
        them; the first token and the end of a completion do not wait."""
        self.request_id = request_id
        self.label = label
        self._interval = interval
        self.resolved = resolved
        self.prompt_token_ids: list[int] = resolved.tokens.tolist()
        self.num_cached_tokens = 0
        """Prompt tokens from the prefix cache; known with the first Delta."""
        self.arrival, self.started, self.first_token, self.last_token = arrival, 0, 0, 0
        self.error: Exception | None = None
        self.failed = False
        """Whether it ended with an exception."""
        self.deaths = 0
        """Engines that died while it was open"""
        self.waits = False
        """Whether it waits for another engine"""
        self.preemptions = 0
        self._tokenizer = tokenizer
        self._lines: list[tuple[StepLogprobs, int]] = []
        """Log-probability lines of the prompt, from its second token on."""
        self._entries: list[TokenLogprobs | None] = [None]
        asked = resolved.params.prompt_logprobs is not None
        self._scoring = asked and len(self.prompt_token_ids) > 1
        """Whether log-probabilities of the prompt are missing; nothing is news before them."""
        self.completions = [
            Completion(self, index, request.key, tokenizer, interval) for index, request in enumerate(resolved.requests)
        ]
        self.open = len(self.completions)
        """Number of unfinished completions."""
        self._new: dict[int, Completion] = {}

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """Return an entry for each scored prompt token so far; None if not requested.

        They are made here, on the reader's thread: a step may score thousands, and would delay all tokens.
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
        generated = sum(len(completion.token_ids) for completion in self.completions)
        times = (self.arrival, self.started, self.first_token, self.last_token)
        return RequestMetrics(*times, generated, self.preemptions)

    @property
    def record(self) -> RequestRecord:
        reason = "error" if self.failed else self.completions[0].finish_reason
        return RequestRecord(
            self.request_id,
            tuple(completion.key for completion in self.completions),
            self.arrival,
            self.started,
            self.first_token,
            self.last_token,
            len(self.prompt_token_ids),
            self.num_cached_tokens,
            self.metrics.generation_tokens,
            "done" if self.ended else "running" if self.started else "waiting",
            reason,
            self.label,
        )

    @property
    def ended(self) -> bool:
        """Whether every completion has ended; their output may still wait in `take`."""
        return self.open == 0

    @property
    def has_news(self) -> bool:
        return (bool(self._new) and not self._scoring) or self.error is not None

    def for_another(self) -> list[Request]:
        """Return the requests of unfinished completions for another engine to continue after their last tokens."""
        if self._scoring:  # it scores the prompt again
            del self._lines[:], self._entries[1:]
        left = []
        for completion, request in zip(self.completions, self.resolved.requests, strict=True):
            if completion.finish_reason is None:
                if request.params.prompt_logprobs is not None and not self._scoring:
                    request = request._replace(params=request.params.replace(prompt_logprobs=None))
                left.append(request._replace(output=np.array(completion.token_ids, np.int32)))
        return left

    def touch(self, completion: Completion) -> None:
        """Mark a completion as having news; `announce` wakes the reader when all of it is in."""
        if self._interval < 2 or completion.due:
            self._new[completion.index] = completion

    def announce(self) -> None:
        if self.has_news:
            self.wake()

    def wake(self) -> None:
        """Wake the reader. A reader that does not poll overrides this."""

    def offer(self, put: Callable[[Delta], bool]) -> bool:
        """Give each completion's news to `put` until it declines one; True if it took all."""
        for index, completion in tuple(self._new.items()):
            if not put(completion.news()):
                return False
            completion.mark_taken()
            del self._new[index]
        return True

    def scored(self, position: int, scored: StepLogprobs, row: int) -> None:
        """Take line `row` for the prompt token at `position`, which must be the next one."""
        assert position == len(self._lines) + 1, f"prompt position {position} is scored out of turn"
        self._lines.append((scored, row))
        if position == len(self.prompt_token_ids) - 1:
            self.release()

    def release(self) -> None:
        """Release the news that waited for the prompt's scores."""
        if self._scoring:
            self._scoring = False
            self._new = dict(sorted(self._new.items()))  # if the scored one failed, it comes first

    def fail(self, error: Exception) -> None:
        """End with an exception, which the reader gets after all unread output."""
        if self._scoring:
            self._new.clear()  # not yet news: a reader expects the whole prompt's log-probabilities
        self.error = error
        self.failed = True
        self.open = 0
        self.announce()

    def take(self) -> list[Delta]:
        """Return the news of each completion since the last take."""
        deltas = [piece for completion in self._new.values() for piece in completion.pieces()]
        for completion in self._new.values():
            completion.mark_taken()
        self._new.clear()
        return deltas

    def snapshot(self) -> RequestOutput:
        """Return the whole output so far, untaken news included."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.resolved.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[completion.snapshot() for completion in self.completions],
            finished=self.ended,
            num_cached_tokens=self.num_cached_tokens,
            metrics=self.metrics,
            prompt_logprobs=None if (entries := self.prompt_logprobs) is None else entries.copy(),
        )


class Completion:
    """A completion: its tokens, its text, and how it ended."""

    def __init__(self, owner: OpenRequest, index: int, key: int, tokenizer: Tokenizer, interval: int = 0) -> None:
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
        self._interval = interval
        self._ends: list[int] | None = [] if interval else None
        """Number of text parts after each token, with an interval"""
        self._detokenizer: Detokenizer | None = None
        if params.detokenize:
            self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens, owner.prompt_token_ids)
        self._stops = StopMatcher(params.stop_strings, params.include_stop_str_in_output) if params.stop else None

    @property
    def length(self) -> int:
        """Number of prompt and output tokens: the position of the next one."""
        return len(self.owner.prompt_token_ids) + len(self.token_ids)

    def score(self, token: int, scored: StepLogprobs, row: int, tokenizer: Tokenizer) -> None:
        """Take line `row` of a step's log-probabilities for `token`, the next one."""
        top = self.owner.resolved.params.logprobs
        assert self.logprobs is not None and top is not None
        assert len(self.logprobs) == len(self.token_ids), f"token {len(self.token_ids)} is scored out of turn"
        self.logprobs.append(entry(scored, row, token, top, tokenizer))
        self.cumulative_logprob = (self.cumulative_logprob or 0.0) + self.logprobs[-1][token].logprob

    def push(self, token: int, flag: int) -> bool:
        """Append a settled token. Returns whether a stop string ended the completion, which the engine cannot see."""
        if flag != _LIVE:
            self._push_last(token, flag)
            return False
        self.token_ids.append(token)
        stopped = self._detokenizer is not None and self._text(self._detokenizer.push(token))
        if self._ends is not None:
            self._ends.append(len(self._parts))
        self.owner.touch(self)
        return stopped

    def _push_last(self, token: int, flag: int) -> None:
        """Append the last token of a completion ended by the engine."""
        if flag == _INERT:
            return
        if flag == _ERROR:
            self._end("error", None)
            return
        self.token_ids.append(token)
        params = self.owner.resolved.params
        hidden = flag == _STOP and not params.include_stop_str_in_output
        stopped = self._detokenizer is not None and not hidden and self._text(self._detokenizer.push(token))
        if not stopped and not self._flush():
            if flag == _STOP:
                self._end("stop", token if token in params.stop_ids else None)
            elif flag == _LENGTH:
                self._end("length", None)
        self.owner.touch(self)

    def _text(self, text: str) -> bool:
        """Add settled text; True if it completed a stop string."""
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
        """Emit held-back text after the last token; True if it completed a stop string."""
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
            self.owner.release()  # the first completion's prompt is the scored one

    def abort(self) -> None:
        """End without further tokens, and emit held-back text."""
        if not self._flush():
            self._end("abort", None)

    def news(self) -> Delta:
        """Return the output since `mark_taken`."""
        parts = self._parts[self._taken_parts :]
        text = parts[0] if len(parts) == 1 else "".join(parts)
        tokens = self.token_ids[self._taken_tokens :]
        logprobs = None if self.logprobs is None else self.logprobs[self._taken_tokens : len(self.token_ids)]
        return Delta(self.index, text, tokens, self.finish_reason, self.stop_reason, logprobs)

    @property
    def due(self) -> bool:
        """Return whether the news need not wait for more tokens."""
        new = len(self.token_ids) - self._taken_tokens
        return new >= self._interval or not self._taken_tokens or self.finish_reason is not None

    def pieces(self) -> list[Delta]:
        """Return the news in pieces of at most `interval` tokens."""
        made: list[Delta] = []
        while self._ends is not None and len(self.token_ids) - self._taken_tokens > self._interval:
            start, end = self._taken_tokens, self._taken_tokens + self._interval
            text = "".join(self._parts[self._taken_parts : self._ends[end - 1]])
            logprobs = None if self.logprobs is None else self.logprobs[start:end]
            made.append(Delta(self.index, text, self.token_ids[start:end], None, None, logprobs))
            self._taken_parts, self._taken_tokens = self._ends[end - 1], end
        return [*made, self.news()]

    def mark_taken(self) -> None:
        """Mark all present output as taken."""
        self._taken_parts, self._taken_tokens = len(self._parts), len(self.token_ids)

    def snapshot(self) -> CompletionOutput:
        # Keep one joined part instead of many: the next snapshot joins little.
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


def entry(scored: StepLogprobs, line: int, token: int, top: int, tokenizer: Tokenizer) -> TokenLogprobs:
    """Return the token at the line's position, then the `top` most likely ones."""
    texts = tokenizer.text_of
    found = {token: Logprob(float(scored.logprobs[line]), int(scored.ranks[line]), texts[token])}
    tops = zip(scored.top_ids[line, :top].tolist(), scored.top_logprobs[line, :top].tolist(), strict=True)
    for rank, (other, logprob) in enumerate(tops, 1):
        if other >= 0 and other != token:
            found[other] = Logprob(logprob, rank, texts[other])
    return found
