"""/v1/responses on the demo model, by the official client as it is installed here; test_recorded.py has the others."""

from __future__ import annotations

import openai
import pytest
from pydantic import BaseModel

PERSON = "Extract name, age, city and job as JSON: The nurse Marco moved to Quabaris at the age of 89."


class Person(BaseModel):
    name: str
    age: int
    city: str
    job: str


@pytest.fixture(scope="module")
def official(demo):
    key = demo.headers["authorization"].removeprefix("Bearer ")
    with openai.OpenAI(base_url=f"{demo.base_url}/v1", api_key=key, max_retries=0) as client:
        yield client


def test_the_official_client_reads_typed_output_whole_and_streamed(official):
    ask = {"model": "demo", "input": PERSON, "temperature": 0, "text_format": Person}
    whole = official.responses.parse(**ask).output_parsed
    with official.responses.stream(**ask) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        last = stream.get_final_response().output_parsed
    assert whole == last == Person(name="Marco", age=89, city="Quabaris", job="nurse")
    assert len(texts) > 5 and Person.model_validate_json("".join(texts)) == whole


def test_the_official_client_reads_a_call_of_a_custom_tool(official):
    form = {"type": "grammar", "syntax": "regex", "definition": "Paris|Oslo"}
    tool = {"type": "custom", "name": "get_weather", "description": "Get the weather of a city", "format": form}
    choice = {"type": "custom", "name": "get_weather"}
    ask = {"model": "demo", "input": "What is the weather in Paris?", "temperature": 0}
    with official.responses.stream(**ask, tools=[tool], tool_choice=choice, parallel_tool_calls=False) as stream:
        pieces = [event.delta for event in stream if event.type == "response.custom_tool_call_input.delta"]
        (call,) = stream.get_final_response().output
    assert (call.type, call.name, call.input) == ("custom_tool_call", "get_weather", "Paris") and pieces == ["Paris"]


def test_a_stored_response_cannot_be_asked_for(official):
    with pytest.raises(openai.NotFoundError, match="not stored here"):
        official.responses.retrieve("resp_1")
    with pytest.raises(openai.BadRequestError) as found:
        official.responses.create(model="demo", input="Hi", previous_response_id="resp_1")
    assert found.value.param == "previous_response_id"
