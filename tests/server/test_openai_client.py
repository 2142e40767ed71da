"""The official client, sync and async, against a running server."""

import openai
import pytest
from server_harness import GO_ON


@pytest.fixture(scope="module")
def official(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


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
