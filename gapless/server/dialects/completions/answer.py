"""Answers of completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from gapless.server.dialects.choices import ChoicesAnswer, Fields
from gapless.server.generation import Job, Progress
from gapless.server.logprobs import CompletionWriter, prompt_entries
from gapless.text.items import ItemKind


class CompletionAnswer(ChoicesAnswer):
    """Completions; `echo` has the prompts that are sent too, and `scores_prompts` shows prompts' log-probabilities."""

    object, chunk_object, prefix = "text_completion", "text_completion", "cmpl-"
    nothing: ClassVar[Fields] = {"text": ""}
    ongoing: ClassVar[Fields] = {"finish_reason": None, "stop_reason": None}

    def __init__(self, job: Job, echo: Sequence[str], scores_prompts: bool) -> None:
        super().__init__(job, echo)
        self._scores_prompts = scores_prompts

    def new_writer(self, choice: int) -> CompletionWriter:
        job = self.job
        prompt, plain = job.stream_of(choice).prompt_token_ids, job.params.skip_special_tokens
        return CompletionWriter(job.state.llm.tokenizer, plain, prompt, self.echo.get(choice))

    def said(self, text: str) -> Fields:
        return {"text": text}

    def whole_choice(self, choice: int, done: Progress) -> tuple[Fields, Fields]:
        stream, fields = self.job.stream_of(choice), Fields()
        if self._scores_prompts:
            fields["prompt_logprobs"] = prompt_entries(stream.prompt_logprobs or ())
        if self.job.shows_ids:
            fields |= {"prompt_token_ids": stream.prompt_token_ids, "token_ids": done.token_ids}
        return {"text": self.echo.get(choice, "") + done.items.texts(ItemKind.TEXT)}, fields
