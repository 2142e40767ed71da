"""The official client, sync and async, against a running server."""

import asyncio

import openai
import pytest
from server_harness import ALPHABET


@pytest.fixture(scope="module")
def official(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


HELLO = [{"role": "user", "content": "hello"}]


def test_the_official_client_lists_the_models(official):
    assert [model.id for model in official.models.list()] == ["tiny"]
    assert official.models.retrieve("tiny").id == "tiny"


def test_the_official_client_reads_a_chat(official):
    answer = official.chat.completions.create(model="tiny", messages=HELLO, max_completion_tokens=5)
    assert answer.choices[0].message.content == "abcde"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 5


def test_the_official_client_reads_log_probabilities(official):
    """As the client's own types have them, whole and in chunks."""
    asks = {"model": "tiny", "messages": HELLO, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    content = official.chat.completions.create(**asks).choices[0].logprobs.content
    assert [(entry.token, entry.logprob, bytes(entry.bytes)) for entry in content] == [
        (letter, -2.0, letter.encode()) for letter in "abc"
    ]
    assert [[top.logprob for top in entry.top_logprobs] for entry in content] == [[-1.0, -2.0]] * 3
    parts = [chunk.choices[0].logprobs for chunk in official.chat.completions.create(**asks, stream=True)]
    assert [entry for part in parts if part for entry in part.content] == content
    legacy = official.completions.create(model="tiny", prompt="hi", max_tokens=1, echo=True, logprobs=1).choices[0]
    assert (legacy.logprobs.tokens, legacy.logprobs.token_logprobs) == (["h", "i", "a"], [None, -2.0, -2.0])
    assert legacy.logprobs.text_offset == [0, 1, 2] and legacy.logprobs.top_logprobs[0] is None


def test_the_official_client_reads_a_streamed_chat(official):
    chunks = list(
        official.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=5, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "abcde"
    assert chunks[-1].usage.completion_tokens == 5
    assert chunks[-2].choices[0].finish_reason == "length"


def test_the_stream_helper_of_the_official_client_reads_a_chat(official):
    with official.chat.completions.stream(model="tiny", messages=HELLO, stop=["f"]) as stream:
        texts = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(texts) == "abcde"
    assert final.choices[0].message.content == "abcde"
    assert final.choices[0].finish_reason == "stop"


def test_the_official_client_reads_completions_whole_and_streamed(official):
    answer = official.completions.create(model="tiny", prompt=["x", "y"], max_tokens=3, n=2)
    assert [choice.text for choice in answer.choices] == ["abc"] * 4
    chunks = official.completions.create(model="tiny", prompt="x", max_tokens=30, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == (ALPHABET * 2)[:30]


def test_errors_are_the_clients_own_classes(official):
    with pytest.raises(openai.NotFoundError, match="not served here"):
        official.chat.completions.create(model="gpt-4", messages=HELLO)
    with pytest.raises(openai.BadRequestError) as caught:
        official.chat.completions.create(model="tiny", messages=HELLO, temperature=500)
    assert (caught.value.param, caught.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError):
        official.embeddings.create(model="tiny", input="x")
    with pytest.raises(openai.NotFoundError, match="stored"):
        official.responses.retrieve("resp_1")


def test_an_error_in_mid_stream_is_raised(official):
    stream = official.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "~!"}], stream=True)
    seen = []
    with pytest.raises(openai.APIError, match="incident"):
        seen.extend(chunk.choices[0].delta.content or "" for chunk in stream)
    assert "ab".startswith("".join(seen))


async def test_two_hundred_async_requests_are_all_answered(server):
    gate = asyncio.Semaphore(32)

    async def chat(client, number):
        async with gate:
            messages = [{"role": "user", "content": f"question {number}"}]
            if number % 2:
                answer = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=10)
                return answer.choices[0].message.content
            stream = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=10, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def completion(client, number):
        async with gate:
            if number % 2:
                return (await client.completions.create(model="tiny", prompt="x", max_tokens=10)).choices[0].text
            stream = await client.completions.create(model="tiny", prompt="x", max_tokens=10, stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])

    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        calls = [(chat if number % 4 < 2 else completion)(client, number) for number in range(200)]
        assert await asyncio.gather(*calls) == [ALPHABET[:10]] * 200
