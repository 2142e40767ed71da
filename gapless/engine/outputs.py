"""Results of a request, in vLLM's shapes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from gapless.text.items import ItemKind, Items, ToolCall
from gapless.text.replies import ReplyReader
from gapless.text.reply_parser import ReplyFormat
from gapless.text.tools import ToolUse

FinishReason = Literal["stop", "length", "abort", "error"]
"""stop: end of sequence, a stop id or a stop string. length: max_tokens. abort: ended from outside. error: the model's
numbers were not finite, so the text is not an answer."""


class Logprob(NamedTuple):
    """Log-probability of a token at a position: natural logarithm of its probability before any sampling setting, its
    rank in the vocabulary (1 is the most likely), and its text.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""Log-probabilities at one position: its own token first, then the most likely ones in order, each once."""


class Delta(NamedTuple):
    """New part of a completion since the last Delta of the same index.

    `stop_reason` is the stop string, or the one of stop_token_ids, that ended it; None for end of sequence.
    """

    index: int  # type: ignore[assignment]
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    """One a token of `token_ids`, if requested."""


class RequestMetrics(NamedTuple):
    """Moments of one request in monotonic nanoseconds of the front; 0 for a moment still ahead."""

    arrival: int
    started: int = 0
    """The moment it left the queue."""
    first_token: int = 0
    last_token: int = 0
    generation_tokens: int = 0
    """Over all its completions."""
    preemptions: int = 0
    """Number of returns to the queue, over all completions."""

    @property
    def queue_seconds(self) -> float | None:
        return _seconds(self.arrival, self.started)

    @property
    def time_to_first_token(self) -> float | None:
        return _seconds(self.arrival, self.first_token)

    @property
    def generation_seconds(self) -> float | None:
        """Seconds from the first token to the last."""
        return _seconds(self.first_token, self.last_token)

    @property
    def prefill_seconds(self) -> float | None:
        """Seconds from leaving the queue to the first token."""
        return _seconds(self.started, self.first_token) if self.started else None

    @property
    def inference_seconds(self) -> float | None:
        """Seconds from leaving the queue to the last token."""
        return _seconds(self.started, self.last_token) if self.started else None

    @property
    def total_seconds(self) -> float | None:
        return _seconds(self.arrival, self.last_token)


def _seconds(start: int, end: int) -> float | None:
    return (end - start) / 1e9 if end else None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """A completion. `text` excludes the token or stop string that ended it; `token_ids` has every token.

    `logprobs` has one entry a token, and `cumulative_logprob` their sum, if requested.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    reasoning: str | None = None
    """The model's reasoning before its answer; from `chat` alone, as are the fields below"""
    content: str | None = None
    """The answer without reasoning and calls; `text` is everything the model wrote"""
    tool_calls: tuple[ToolCall, ...] = ()

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The whole output of one request so far.

    `prompt` is None for a prompt of token ids. `prompt_logprobs` has one entry a prompt token, the first of them None,
    if requested.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprobs | None] | None = None


def taken_apart(output: RequestOutput, reply: ReplyFormat | None, use: ToolUse, begun: str) -> RequestOutput:
    """Return the output of a chat with reasoning, content and calls; `use` has the request's tools, and `begun` the
    part of the reply in the prompt.

    Without a format of replies, the content is the text.
    """
    if reply is None:
        return replace(output, outputs=[replace(one, content=one.text) for one in output.outputs])
    completions = []
    for one in output.outputs:
        reader = ReplyReader(reply, use.schemas, begun, parallel=use.parallel)
        said = Items()
        said.take(reader.feed(one.token_ids, one.text) + reader.finish())
        reasoning = said.texts(ItemKind.REASONING) or None
        completions.append(replace(one, reasoning=reasoning, content=said.content, tool_calls=tuple(said.calls)))
    return replace(output, outputs=completions)
