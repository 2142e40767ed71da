"""The official client, sync and async, against a running server."""

import asyncio

import openai
import pytest
from server_harness import ALPHABET, GO_ON


@pytest.fixture(scope="module")
def official(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


HELLO = [{"role": "user", "content": "hello"}]


def test_the_official_client_lists_the_models(official):
    assert [model.id for model in official.models.list()] == ["tiny"]
    assert official.models.retrieve("tiny").id == "tiny"


def test_the_stream_helper_of_the_official_client_reads_a_chat(official):
    with official.chat.completions.stream(model="tiny", messages=HELLO, stop=["f"]) as stream:
        texts = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(texts) == "abcde"
    assert final.choices[0].message.content == "abcde"
    assert final.choices[0].finish_reason == "stop"


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
    GO_ON.clear()
    stream = official.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "!"}], stream=True)
    seen = ""
    with pytest.raises(openai.APIError, match="incident"):
        for chunk in stream:
            seen += chunk.choices[0].delta.content or ""
            if seen == "ab":
                GO_ON.set()
    assert seen == "ab"


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
