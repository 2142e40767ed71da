"""What real clients said, said again to the present server: each client must read from the answers what it has read.
The clients' rules are applied to fresh answers, and the official client's own types check every field."""

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from server_harness import error_of

RECORDED = Path(__file__).with_name("recorded")
CLIENTS = ("openai-3", "openai-2", "litellm", "langchain-openai", "openai-agents", "instructor")
RECORDINGS = {name: json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8")) for name in CLIENTS}
STEPS = [pytest.param(step, id=f"{name}-{step['name']}") for name in CLIENTS for step in RECORDINGS[name]["steps"]]
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
RESPONSE_EVENT = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def send(demo):
    """Sends a recorded request, once: both major versions of the official client say mostly the same."""
    answers: dict[str, Any] = {}

    def send(exchange):
        key = json.dumps(
            [exchange[name] for name in ("method", "path", "body")] + [exchange["headers"]["authorization"]]
        )
        if key not in answers:
            method, path, headers = (exchange[name] for name in ("method", "path", "headers"))
            answers[key] = demo.request(method, path, headers=headers, json=exchange["body"] or None)
        assert answers[key].status_code == exchange["status"], answers[key].text
        return answers[key]

    return send


def events(response) -> list[dict[str, Any]]:
    """The official client's rule: events end in an empty line, `data:` lines hold JSON, [DONE] is the last."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *found, rest = response.text.split("\n\n")
    assert rest == "" and found.pop() == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in found]


def text_of(choice: dict[str, Any], chat: bool) -> str:
    if not chat:
        return choice["text"]
    return (choice["delta"].get("content") if "delta" in choice else choice["message"]["content"]) or ""


def check_types(chunk: dict[str, Any], chat: bool) -> None:
    """Every field is what the official client says that it is, where the API itself keeps to that."""
    if chat:
        (ChatCompletionChunk if chunk["object"].endswith("chunk") else ChatCompletion).model_validate(chunk)
        return
    chunk = json.loads(json.dumps(chunk))
    for choice in chunk["choices"]:
        choice["finish_reason"] = choice["finish_reason"] or "stop"  # null until the last chunk
        if scores := choice["logprobs"]:
            for name in ("token_logprobs", "top_logprobs"):
                del scores[name][0]  # null: nothing stands in front of a prompt's first token
    Completion.model_validate(chunk)


class Read:
    """One answer, as clients read it: the same for a stream and for a whole body."""

    def __init__(self) -> None:
        self.choices: dict[int, list[Any]] = {}
        self.calls: list[list[Any]] = []
        self.tokens: list[str] = []
        self.tops: list[int] = []
        self.offsets: list[int] = []
        self.usage: list[int] | None = None
        self.ids: set[str] = set()

    def take(self, chunk: dict[str, Any], chat: bool) -> None:
        self.ids.add(chunk["id"])
        for choice in chunk["choices"]:
            read = self.choices.setdefault(choice["index"], [choice["index"], "", None])
            assert read[2] is None, "something came after the end"
            read[1] += text_of(choice, chat)
            read[2] = choice["finish_reason"]
            assert read[2] in (None, "stop", "length", "tool_calls")
            for call in choice.get("message", {}).get("tool_calls") or ():
                self.calls.append([call["function"]["name"], json.loads(call["function"]["arguments"])])
            self._scores(choice.get("logprobs"), chat)
        if used := chunk.get("usage"):
            assert self.usage is None and used["total_tokens"] == used["prompt_tokens"] + used["completion_tokens"]
            self.usage = [used["prompt_tokens"], used["completion_tokens"], used["total_tokens"]]

    def _scores(self, scores: dict[str, Any] | None, chat: bool) -> None:
        if scores is None:
            return
        if not chat:
            self.tokens += scores["tokens"]
            self.offsets += scores["text_offset"]
            return
        for entry in scores["content"]:
            assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"] and entry["logprob"] <= 0
            self.tokens.append(entry["token"])
            self.tops.append(len(entry["top_logprobs"]))

    def told(self) -> dict[str, Any]:
        choices = [self.choices[index] for index in sorted(self.choices)]
        assert all(finish is not None for _, _, finish in choices)
        first = {"text": choices[0][1], "finish": choices[0][2]}
        scores = {"tokens": self.tokens, "tops": self.tops, "offsets": self.offsets}
        return {"choices": choices, **first, **scores, "usage": self.usage, "ids": len(self.ids), "calls": self.calls}


def whole(response, exchange) -> Read:
    assert response.headers["content-type"] == "application/json"
    chat, body, read = exchange["path"] == CHAT, response.json(), Read()
    check_types(body, chat)
    assert body["model"] == exchange["body"]["model"] and body["usage"]
    read.take(body, chat)
    return read


def streamed(response, exchange) -> Read:
    chat, chunks, read = exchange["path"] == CHAT, events(response), Read()
    wanted = (exchange["body"].get("stream_options") or {}).get("include_usage", False)
    for chunk in chunks:
        check_types(chunk, chat)
        read.take(chunk, chat)
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert bool(read.usage) == wanted
    if wanted:
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]
    if chat:
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    return read


def responded(response, exchange) -> dict[str, Any]:
    """A response object, whole or at the end of its events, which must add up to it."""
    body = ended(response) if exchange["body"].get("stream") else response.json()
    Response.model_validate(body)
    used = body["usage"]
    calls = [[item["name"], json.loads(item["arguments"])] for item in body["output"] if "arguments" in item]
    items = [["function_call", *call] for call in calls]
    texts = ["".join(part["text"] for part in item["content"]) for item in body["output"] if "content" in item]
    return {
        "items": items + [["message", text] for text in texts],
        "calls": calls,
        "text": "".join(texts),
        "finish": body["status"],
        "usage": [used["input_tokens"], used["output_tokens"], used["total_tokens"]],
    }


def ended(response) -> dict[str, Any]:
    blocks = [block.split("\n") for block in response.text.split("\n\n")]
    assert blocks.pop() == [""]
    told = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    for number, ((name, _), event) in enumerate(zip(blocks, told, strict=True)):
        assert name == f"event: {event['type']}" and event["sequence_number"] == number
        RESPONSE_EVENT.validate_python(event)
    pieces: dict[str, str] = {}
    for event in told:
        if event["type"].endswith(".delta"):
            pieces[event["item_id"]] = pieces.get(event["item_id"], "") + event["delta"]
    last: dict[str, Any] = told[-1]["response"]
    for item in last["output"]:
        assert pieces[item["id"]] == (item["arguments"] if "arguments" in item else item["content"][0]["text"])
    return last


def listed(response, exchange) -> dict[str, Any]:
    body = response.json()
    if exchange["path"] == "/v1/models":
        assert body["object"] == "list" and all(Model.model_validate(card) for card in body["data"])
        return {"models": [card["id"] for card in body["data"]]}
    return {"one": Model.model_validate(body).id}


def read(response, exchange) -> dict[str, Any]:
    """What a client makes of one answer, under the names that the scenarios use."""
    about = {"status": response.status_code, "type": response.headers["content-type"]}
    if response.status_code >= 400:
        return {**about, "body": error_of(response)}
    if exchange["method"] == "GET":
        return {**about, **listed(response, exchange)}
    if exchange["path"] == RESPONSES:
        return {**about, **responded(response, exchange)}
    return {**about, **(streamed if exchange["body"].get("stream") else whole)(response, exchange).told()}


def as_json(text: str) -> Any:
    return json.loads(text) if text.startswith("{") else None


@pytest.mark.parametrize("step", STEPS)
def test_a_client_reads_the_answers_as_recorded(send, step):
    answers = [read(send(exchange), exchange) for exchange in step["exchanges"]]
    found: dict[str, Any] = {name: value for answer in answers for name, value in answer.items()}
    found["texts"] = sorted(answer.get("text", "") for answer in answers)
    found["calls"] = [call for answer in answers for call in answer.get("calls", ())]
    found["items"] = sorted(item for answer in answers for item in answer.get("items", ()))
    found["json"] = [arguments for _, arguments in found["calls"]] or [as_json(text) for text in found["texts"]]
    found["last"] = found["texts"][-1] if found["texts"] else None
    found["usages"] = sorted(answer.get("usage") or [] for answer in answers)
    for name, value in step["seen"].items():
        if name == "body":
            assert {key: found["body"][key] for key in value} == value
        elif name != "error":  # the client's own class for that status
            assert found[name] == value, name


def test_clients_know_a_prompt_that_is_too_long_by_these_words(send):
    """litellm raises ContextWindowExceededError for them, and callers cut their prompt."""
    (step,) = [step for step in RECORDINGS["litellm"]["steps"] if step["name"] == "too_long"]
    assert step["seen"]["error"] == "ContextWindowExceededError"
    assert "This model's maximum context length is" in error_of(send(*step["exchanges"]))["message"]


@pytest.mark.parametrize("name", [*CLIENTS, "anthropic", "lm-eval"])
def test_a_recording_is_small_and_of_no_machine(name):
    text = (RECORDED / f"{name}.json").read_text(encoding="utf-8")
    assert len(text) < 48_000
    for leak in ("/root/", "/home/", "/tmp/", "/usr/", "127.0.0.1", "localhost"):
        assert leak not in text
    recording = json.loads(text)
    assert recording["requirement"].endswith(f"=={recording['version']}")
