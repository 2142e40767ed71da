"""The chunk that is put together from bytes made once is the one that is written field by field."""

import json
from types import SimpleNamespace

import pytest

from gapless.base.params import SamplingParams
from gapless.engine.outputs import Delta
from gapless.server.dialects.chat import ChatAnswer
from gapless.server.dialects.completions import CompletionAnswer

TEXTS = ["", " the", 'a "quoted" \\ line\n', "你好 \U0001f469", '%d %b "~" 100%', "\ud7ff\x00"]


def job(usage):
    """A job of one choice that asks for its text alone."""
    off = dict.fromkeys(("shows_ids", "shows_times", "shows_meta", "usage_in_each"), False)
    call = SimpleNamespace(identity="", model='a "~" model %d')
    return SimpleNamespace(call=call, params=SamplingParams(), readers={}, choices=[None], usage_at_end=usage, **off)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("kind", [lambda job: ChatAnswer(job), lambda job: CompletionAnswer(job, (), False)])
def test_a_plain_chunk_is_the_one_written_field_by_field(kind, usage, text):
    answer, delta = kind(job(usage)), Delta(0, text, [1])
    for _ in range(2):
        plain = answer.token(delta)
        assert plain == answer.news(0, delta)
        event = json.loads(plain.removeprefix(b"data: "))
        (choice,) = event["choices"]
        assert choice["index"] == 0 and text in (choice.get("text"), choice.get("delta", {}).get("content"))
        assert ("usage" in event) == usage
