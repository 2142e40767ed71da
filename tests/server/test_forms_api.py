"""Forms of output over HTTP: what requests may say, what comes back, and what is refused, each with its field."""

import json
import re
import threading

import pytest
from form_core import FormCore
from jsonschema import validate
from server_harness import BODIES, TEXT_ROUTES, TOKENS, error_of, script, serving
from sharpest import sharpest

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 0}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
CLOSED = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TREE = {"type": "tag", "begin": "<n>", "content": {"type": "regex", "pattern": "[0-9]{2}"}, "end": "</n>"}
TAG = {"triggers": ["<f"], "structures": [{"begin": "<f>", "schema": CLOSED, "end": "</f>"}]}
ROUTES = {path: {**BODIES[path], "max_tokens": 600} for path in TEXT_ROUTES}
both = pytest.mark.parametrize("path", sharpest(ROUTES))


@pytest.fixture(scope="module")
def server():
    with serving(core=lambda: FormCore(TOKENS, script)) as running:
        yield running


def schema_format(schema, **more):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


def texts(response):
    assert response.status_code == 200, response.text
    return [
        choice["text"] if "text" in choice else choice["message"]["content"] for choice in response.json()["choices"]
    ]


def is_record(text):
    validate(json.loads(text), SCHEMA)


def is_object(text):
    assert isinstance(json.loads(text), dict)


def is_closed(text):
    assert set(json.loads(text)) == {"a"}


def matches(pattern):
    def check(text):
        assert re.fullmatch(pattern, text)

    return check


@both
@pytest.mark.parametrize(
    ("fields", "check"),
    [
        ({"response_format": schema_format(SCHEMA, strict=True)}, is_record),
        ({"response_format": schema_format(SCHEMA, strict=False, description="x")}, is_record),
        ({"response_format": {"type": "json_object"}}, is_object),
        ({"response_format": {"type": "structural_tag", **TAG}}, matches("(?s).*")),
        ({"response_format": {"type": "structural_tag", "format": TREE}}, matches("<n>[0-9]{2}</n>")),
        ({"structured_outputs": {"json": SCHEMA}}, is_record),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, is_record),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}}, is_record),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, is_record),
        ({"structured_outputs": {"json": CLOSED, "disable_additional_properties": True}}, is_closed),
        ({"structured_outputs": {"json_object": True}}, is_object),
        ({"structured_outputs": {"regex": "[ab]{3}-[0-9]"}}, matches("[ab]{3}-[0-9]")),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, matches("yes|no")),
        ({"structured_outputs": {"grammar": 'start: "x"+'}}, matches("x+")),
        ({"structured_outputs": {"structural_tag": TAG}}, matches("(?s).*")),
        ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, matches("(?s).*")),
        ({"structured_outputs": {"structural_tag": json.dumps({"format": TREE})}}, matches("<n>[0-9]{2}</n>")),
        ({"guided_json": SCHEMA}, is_record),
        ({"guided_json": json.dumps(SCHEMA), "guided_whitespace_pattern": " ?"}, is_record),
        ({"guided_json_object": True}, is_object),
        ({"guided_regex": "a|b"}, matches("a|b")),
        ({"guided_choice": ["yes", "no"]}, matches("yes|no")),
        ({"guided_grammar": 'root ::= "x" [0-9]'}, matches("x[0-9]")),
        ({"guided_structural_tag": json.dumps(TAG)}, matches("(?s).*")),
        ({"guided_choice": ["yes", "no"], "ignore_eos": True}, matches("yes|no")),
        ({"regex": "[ab]{3}-[0-9]", "grammar": "", "ebnf": None}, matches("[ab]{3}-[0-9]")),
        ({"ebnf": 'root ::= "x" [0-9]'}, matches("x[0-9]")),
        ({"grammar": 'root ::= "x" [0-9]'}, matches("x[0-9]")),
        ({"grammar": 'start: "x"+'}, matches("x+")),
        ({"json_schema": SCHEMA}, is_record),
        ({"json_schema": json.dumps(SCHEMA)}, is_record),
        ({"structural_tag": json.dumps({"format": TREE})}, matches("<n>[0-9]{2}</n>")),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, is_record),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, is_record),
    ],
)
def test_the_output_has_the_form_that_a_request_asks_for(client, path, fields, check):
    for seed in range(2):
        response = client.post(path, json={**ROUTES[path], **fields, "n": 2, "seed": seed})
        for text in texts(response):
            check(text)
        assert {choice["finish_reason"] for choice in response.json()["choices"]} == {"stop"}


def test_a_response_takes_the_spellings_of_forms_too(client):
    for fields in ({"regex": "x[0-9]"}, {"ebnf": 'root ::= "x" [0-9]'}, {"structured_outputs": {"regex": "x[0-9]"}}):
        body = {"input": "hi", "max_output_tokens": 600, **fields}
        answer = client.post("/v1/responses", json=body).json()
        assert re.fullmatch("x[0-9]", answer["output"][0]["content"][0]["text"])


def test_each_prompt_and_completion_has_a_matcher_of_its_own(client):
    body = {"prompt": ["a", "b", "c"], "n": 3, "max_tokens": 600, "guided_regex": "[a-z]{1,30}"}
    answers = texts(client.post("/v1/completions", json=body))
    assert len(answers) == 9 and len(set(answers)) > 3
    assert all(re.fullmatch("[a-z]{1,30}", text) for text in answers)


class Slow(FormCore):
    """Its vocabulary comes when a test says so."""

    def __init__(self, *arguments, **options):
        self.go_on = threading.Event()
        super().__init__(*arguments, **options)

    def vocabulary(self):
        assert self.go_on.wait(20)
        return super().vocabulary()


def test_a_grammar_that_takes_too_long_is_a_refusal_and_delays_no_other():
    with serving(core=lambda: Slow(TOKENS, script, seconds=0.1)) as server, server.client() as client:
        response = client.post("/v1/completions", json={"prompt": "hi", "guided_regex": "a"})
        assert response.status_code == 400 and "simplify it" in error_of(response)["message"]
        assert texts(client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 3})) == ["abc"]
        server.core.go_on.set()


def test_a_client_that_goes_away_while_its_grammar_is_compiled_leaves_nothing():
    with serving(core=lambda: Slow(TOKENS, script)) as server:
        with server.client(headers={"x-request-timeout": "0.1"}) as client:
            assert client.post("/v1/completions", json={"prompt": "hi", "guided_regex": "a"}).status_code == 408
        server.core.go_on.set()
        server.until(lambda: server.stats().grammars.waiting == 0)
        assert len(server.core.aborted) == 1
        with server.client() as client:
            assert texts(client.post("/v1/completions", json={"prompt": "hi", "guided_regex": "a"})) == ["a"]
        assert server.core.vocabularies == 1
