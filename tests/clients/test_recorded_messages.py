"""What Anthropic's client said, said again to the present server: it must read from the answers what it has read."""

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import validate
from message_events import assembled, events_of

RECORDING = json.loads((Path(__file__).parent / "recorded" / "anthropic.json").read_text(encoding="utf-8"))
STEPS = [pytest.param(step, id=step["name"]) for step in RECORDING["steps"]]


def send(demo: Any, exchange: dict[str, Any]) -> Any:
    response = demo.request(
        exchange["method"], exchange["path"], headers=exchange["headers"], json=exchange["body"] or None
    )
    assert response.status_code == exchange["status"], response.text
    return response


def read(response: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """What the client makes of one answer, under the names that the scenario uses."""
    if response.status_code >= 400:
        return {"status": response.status_code, "body": response.json()["error"]}
    if "max_tokens" not in asked:
        return {"counted": response.json()["input_tokens"]}
    message = assembled(events_of(response)) if asked.get("stream") else response.json()
    assert message["model"] == asked["model"]
    check_schemas(message["content"], asked)
    usage = message["usage"]
    prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    return {
        "content": [block(each) for each in message["content"]],
        "kinds": [each["type"] for each in message["content"]],
        "reason": message["stop_reason"],
        "sequence": message["stop_sequence"],
        "usage": {"prompt": prompt, "output": usage["output_tokens"]},
        "prompt": prompt,
    }


def block(one: dict[str, Any]) -> list[Any]:
    return [one["type"], [one["name"], one["input"]] if one["type"] == "tool_use" else one[one["type"]]]


def check_schemas(content: list[Any], asked: dict[str, Any]) -> None:
    """A forced call and an answer of a format keep to their schemas."""
    if "tool_choice" in asked:
        validate(content[0]["input"], asked["tools"][0]["input_schema"])
    if "output_config" in asked:
        validate(json.loads(content[0]["text"]), asked["output_config"]["format"]["schema"])


@pytest.mark.parametrize("step", STEPS)
def test_anthropics_client_reads_the_answers_as_recorded(demo, step):
    (exchange,) = step["exchanges"]
    found = read(send(demo, exchange), exchange["body"])
    for name, value in step["seen"].items():
        if name == "body":
            assert {key: found["body"][key] for key in value} == value
        elif name != "error":  # the client's own class for that status
            assert found[name] == value, name


def test_tokens_of_the_prefix_cache_are_counted_apart(demo):
    body = {"model": "demo", "messages": [{"role": "user", "content": "Count the pens of Mia and Ben. " * 20}]}
    counted = demo.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]
    first, again = (demo.post("/v1/messages", json={**body, "max_tokens": 4}).json()["usage"] for _ in range(2))
    assert (first["input_tokens"], first["cache_read_input_tokens"]) == (counted, 0)
    assert again["cache_read_input_tokens"] > counted // 2
    assert again["input_tokens"] + again["cache_read_input_tokens"] == counted
