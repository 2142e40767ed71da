"""Reads streamed messages by the rules of Anthropic's manual."""

import json
import re

DELTAS = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}


def events_of(response):
    """The events of a stream, each of which is named twice."""
    assert response.headers["content-type"].startswith("text/event-stream")
    return events_in(response.text)


def events_in(text):
    found = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        name, data = re.fullmatch("event: (.*)\ndata: (.*)", event).groups()
        found.append(json.loads(data))
        assert found[-1]["type"] == name
    return found


def error_of(response, kind):
    """The message of an error of this type, after a look at its shape."""
    body = response.json()
    assert set(body) == {"type", "error", "request_id"} and set(body["error"]) == {"type", "message"}
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert body["request_id"] and body["request_id"] == response.headers["request-id"]
    return body["error"]["message"]


def assembled(events):
    """The message that the events of a stream make, by the rules of Anthropic's manual."""
    first, ping, *rest, ending, last = events
    assert (first["type"], ping, last) == ("message_start", {"type": "ping"}, {"type": "message_stop"})
    message, begun, parts = first["message"], None, []
    for event in rest:
        if event == ping:
            continue
        if event["type"] == "content_block_start":
            assert begun is None and event["index"] == len(message["content"])
            begun, parts = event["content_block"], []
            message["content"].append(begun)
        assert event["index"] == len(message["content"]) - 1
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                parts.append(delta["partial_json"])
            else:
                begun[DELTAS[delta["type"]]] += delta[DELTAS[delta["type"]]]
        elif event["type"] == "content_block_stop":
            if begun["type"] == "tool_use":
                begun["input"] = json.loads("".join(parts))
            begun = None
    assert begun is None and ending["type"] == "message_delta"
    return {**message, **ending["delta"], "usage": ending["usage"]}
