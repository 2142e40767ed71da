"""The chunk that is put together from bytes made once is the one that is written field by field."""

import json

import pytest

from gapless.server.sse import ChatChunks, CompletionChunks

TEXTS = ["", " the", 'a "quoted" \\ line\n', "你好 \U0001f469", "%d %b 100%", "\ud7ff\x00"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("index", [0, 7])
@pytest.mark.parametrize("null_usage", [False, True])
@pytest.mark.parametrize("kind", [ChatChunks, CompletionChunks])
def test_a_plain_chunk_is_the_one_written_field_by_field(kind, null_usage, index, text):
    chunks = kind("id-1", 17, 'a model "x" %d', null_usage)
    for _ in range(2):
        plain = chunks.plain(index, text)
        assert plain == chunks.text(index, text)
        event = json.loads(plain.removeprefix(b"data: "))
        (choice,) = event["choices"]
        assert choice["index"] == index and text in (choice.get("text"), choice.get("delta", {}).get("content"))
        assert ("usage" in event) == null_usage
