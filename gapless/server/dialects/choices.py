"""Answers in choices: the form of OpenAI's completions and chat completions."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from gapless.engine.outputs import Delta, TokenLogprobs
from gapless.server.answer import JobAnswer
from gapless.server.errors import ApiError
from gapless.server.generation import Job, Progress
from gapless.server.logprobs import Writer
from gapless.text.items import Change

DONE = b"data: [DONE]\n\n"

ChoiceFields = dict[str, Any]
_json = msgspec.json.encode


class ChoicesAnswer(JobAnswer):
    """An answer in choices, whole or in chunks. `echo` has the prompts that are sent too."""

    object: ClassVar[str]
    chunk_object: ClassVar[str]
    first: ClassVar[ChoiceFields] = {}
    """The field of a choice in the chunk before its text, if there is one"""
    nothing: ClassVar[ChoiceFields]
    """The field of a choice without new text"""
    ongoing: ClassVar[ChoiceFields] = {"finish_reason": None}
    """The end of a choice that has not ended"""

    def __init__(self, job: Job, echo: Sequence[str] = ()) -> None:
        self._scored = job.params.logprobs is not None
        bare = not (self._scored or job.shows_ids or job.shows_times or job.shows_meta or job.readers)
        super().__init__(job, plain=bare and len(job.choices) == 1)
        self._created = int(time.time())
        self._head = b"data: " + _json(self._about(self.chunk_object))[:-1] + b',"choices":['
        # A client that asked for usage finds the field in every chunk, null until the last.
        self._tail: ChoiceFields = {"usage": None} if job.usage_at_end else {}
        self._before, _, self._after = self._chunk(0, self.said("~")).rpartition(b'"~"')
        """The bytes around the text of a plain choice's chunk, which are the same in each"""
        self._writers: dict[int, Writer] = {}
        self.echo = dict(enumerate(text for text in echo for _ in range(job.params.n)))
        """Prompts by choice; a stream takes out the one that it has sent"""
        self._without_ids = set(range(len(job.choices))) if job.shows_ids else set()
        """Choices whose prompt's ids are asked for and have not been sent"""

    def _about(self, kind: str) -> ChoiceFields:
        call = self.job.call
        return {"id": call.identity, "object": kind, "created": self._created, "model": call.model}

    # The two forms

    def said(self, text: str) -> ChoiceFields:
        """Return the field of a choice with new text."""
        raise NotImplementedError

    def shown(self, change: Change) -> ChoiceFields | None:
        """Return the field of a choice with a change of a reply that is taken apart, if it has one."""
        raise NotImplementedError

    def whole_choice(self, choice: int, done: Progress) -> tuple[ChoiceFields, ChoiceFields]:
        """Return the field of a whole choice with its text, and the requested fields after its end."""
        raise NotImplementedError

    def about_prompt(self) -> ChoiceFields:
        """Return the fields about the prompt in a whole answer."""
        return {}

    def new_writer(self, choice: int) -> Writer:
        """Return the writer of a choice's log-probabilities."""
        raise NotImplementedError

    # Streamed

    def opening(self) -> bytes:
        if not self.first:
            return b""
        choices = range(len(self.job.choices))
        return b"".join([self._chunk(choice, self.first, chunk=self._prompt_ids(choice)) for choice in choices])

    def token(self, delta: Delta) -> bytes:
        # Its prompt was sent before, and its end is the reader's.
        if self.job.usage_in_each:
            return self._chunk(0, self.said(delta.text), chunk=self._counts(0))
        return self._before + _json(delta.text) + self._after

    def news(self, choice: int, delta: Delta) -> bytes:
        counts, ended = self._counts(choice), delta.finish_reason is not None
        data = self._prompt(choice, counts) if choice in self.echo else b""
        extra = {**self._scores(choice, delta.token_ids, delta.logprobs), **self._prompt_ids(choice)}
        if self.job.shows_ids:
            extra["token_ids"] = delta.token_ids
        if choice in self.job.readers:
            for shown in self._parts(choice, delta, bool(extra or "usage" in counts)):
                data += self._chunk(choice, shown, extra, chunk=counts)
                extra = {}
            return data + self._last(choice, self.nothing, {}, counts) if ended else data
        if ended:
            return data + self._last(choice, self.said(delta.text) if delta.text else self.nothing, extra, counts)
        if delta.text or delta.token_ids:  # a token without text is news too: clients time their tokens by events
            data += self._chunk(choice, self.said(delta.text), extra, chunk=counts)
        return data

    def _parts(self, choice: int, delta: Delta, beside: bool) -> Iterable[ChoiceFields]:
        """Return what a reply that is taken apart shows; tokens without an event have one if something goes with it."""
        found = [shown for change in self.changes(choice, delta) if (shown := self.shown(change)) is not None]
        return found or ([self.nothing] if delta.token_ids and beside else [])

    def _last(self, choice: int, said: ChoiceFields, extra: ChoiceFields, counts: ChoiceFields) -> bytes:
        if self.job.shows_meta:
            extra = {**extra, "meta_info": self.job.meta_info(choice)}
        return self._chunk(choice, said, extra, self._ended(choice), counts)

    def _chunk(
        self,
        choice: int,
        said: ChoiceFields,
        extra: Mapping[str, Any] = {},
        end: ChoiceFields | None = None,
        chunk: Mapping[str, Any] = {},
    ) -> bytes:
        """Return the event of a choice, with `extra` fields of its own and some of the `chunk`."""
        about = {"index": choice, **said, "logprobs": None, **extra, **(self.ongoing if end is None else end)}
        return self._event(_json(about), {**chunk, **({} if "usage" in chunk else self._tail)})

    def _event(self, choice: bytes, fields: ChoiceFields) -> bytes:
        return self._head + choice + (b"]," + _json(fields)[1:] if fields else b"]}") + b"\n\n"

    def ending(self) -> bytes:
        job = self.job
        times = {"timings": job.timings()} if job.shows_times else {}
        return (self._event(b"", {**times, "usage": job.usage()}) if job.usage_at_end else b"") + DONE

    def failure(self, error: ApiError) -> bytes:
        return b"data: %b\n\n" % error.encode() + DONE

    def _counts(self, choice: int) -> ChoiceFields:
        """The fields of a chunk that count: times and tokens, if they are asked for."""
        job = self.job
        times = {"timings": job.timings(choice)} if job.shows_times else {}
        return {**times, "usage": job.usage(choice)} if job.usage_in_each else times

    def _prompt(self, choice: int, counts: ChoiceFields) -> bytes:
        """The chunk with the choice's prompt, which comes in front of its first token."""
        stream = self.job.stream_of(choice)
        scores = self._scores(choice, stream.prompt_token_ids, stream.prompt_logprobs)
        times = {name: value for name, value in counts.items() if name != "usage"}
        said = self.said(self.echo[choice])
        data = self._chunk(choice, said, {**scores, **self._prompt_ids(choice)}, chunk=times)
        del self.echo[choice]
        return data

    def _prompt_ids(self, choice: int) -> ChoiceFields:
        """The field with the ids of the choice's prompt, once, and where it is asked for."""
        if choice not in self._without_ids:
            return {}
        self._without_ids.remove(choice)
        return {"prompt_token_ids": self.job.stream_of(choice).prompt_token_ids}

    def _scores(self, choice: int, ids: Sequence[int], entries: Sequence[TokenLogprobs | None] | None) -> ChoiceFields:
        return {"logprobs": self._written(choice, ids, entries)} if self._scored and ids and entries is not None else {}

    def _written(self, choice: int, ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> ChoiceFields:
        if choice not in self._writers:
            self._writers[choice] = self.new_writer(choice)
        return self._writers[choice].write(ids, entries)

    # Whole

    def whole(self) -> ChoiceFields:
        job = self.job
        choices = [self._whole(choice, done) for choice, done in enumerate(job.choices)]
        said = {"choices": choices, "usage": job.usage(), "system_fingerprint": None}
        times = {"timings": job.timings()} if job.shows_times else {}
        handover = {} if job.handover.answer is None else {"kv_transfer_params": job.handover.answer}
        return {**self._about(self.object), **said, **times, **self.about_prompt(), **handover}

    def _whole(self, choice: int, done: Progress) -> ChoiceFields:
        said, extra = self.whole_choice(choice, done)
        scores = {"logprobs": self._whole_scores(choice, done) if self._scored else None}
        meta = {"meta_info": self.job.meta_info(choice)} if self.job.shows_meta else {}
        return {"index": choice, **said, **scores, **self._ended(choice), **extra, **meta}

    def _whole_scores(self, choice: int, done: Progress) -> ChoiceFields:
        if choice not in self.echo:
            return self._written(choice, done.token_ids, done.logprobs)
        stream = self.job.stream_of(choice)
        entries = [*(stream.prompt_logprobs or ()), *done.logprobs]
        return self._written(choice, [*stream.prompt_token_ids, *done.token_ids], entries)

    def _ended(self, choice: int) -> ChoiceFields:
        done, reader = self.job.choices[choice], self.job.readers.get(choice)
        reason = done.finish_reason
        if reader is not None and reason is not None:
            reason = reader.finish_reason(reason)
        return {"finish_reason": reason, "stop_reason": done.stop_reason}
