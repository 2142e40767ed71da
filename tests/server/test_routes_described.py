"""The front door: where / leads, what describes the routes, what a 404 says, and the list of models in two forms."""

import json
import re
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from server_harness import error_of, serving

from gapless.server.app import OTHER_KINDS, ROUTES

RECORDED = Path(__file__).parents[1] / "clients" / "recorded"
EXAMPLES = {route.path: route.body.EXAMPLE for route in ROUTES if route.body is not None}
ANTHROPIC = {"anthropic-version": "2023-06-01"}


@pytest.fixture(scope="module")
def described(client):
    return client.get("/openapi.json").json()


def validator(described, path):
    body = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    return Draft202012Validator({**body["schema"], "components": described["components"]})


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_the_root_sends_callers_to_the_page(client, method):
    response = client.request(method, "/")
    assert (response.status_code, response.headers["location"]) == (307, "ui")
    assert client.request(method, "/", follow_redirects=True).status_code == 200


@pytest.mark.parametrize("path", ["/llm", "/llm/", "/"])
def test_a_root_path_is_kept_and_may_be_taken_away_before(path):
    with serving(root_path="/llm") as server, server.client() as client:
        assert client.get(path).headers["location"] == "/llm/ui"
        assert client.get(f"{path.rstrip('/')}/v1/models").json()["data"][0]["id"] == "tiny"
        assert client.get("/llmv1/models").status_code == 404
        assert client.get("/llm/openapi.json").json()["servers"] == [{"url": "/llm"}]


def test_every_listed_route_is_described(described):
    assert described["openapi"] == "3.1.0"
    shown = {(method.upper(), path) for path, methods in described["paths"].items() for method in methods}
    assert shown == {(m, r.path.replace(":path", "")) for r in ROUTES if r.listed for m in r.methods}
    for methods in described["paths"].values():
        for operation in methods.values():
            assert operation["summary"] and operation["responses"]
    names = set(described["components"]["schemas"])
    assert set(re.findall(r"#/components/schemas/(\w+)", json.dumps(described))) <= names


def test_the_description_stays_small(client):
    assert len(client.get("/openapi.json").content) < 64_000


@pytest.mark.parametrize("path", EXAMPLES)
def test_a_route_s_example_fits_its_shape_and_is_answered(client, described, path):
    example = json.loads(json.dumps(EXAMPLES[path]).replace("MODEL", "tiny"))
    validator(described, path).validate(example)
    response = client.post(path, json=example)
    if "weights" in path:
        assert "--weights-dir" in error_of(response)["message"], "this server has no others"
    else:
        assert response.status_code == 200, response.text


def test_requests_of_recorded_clients_fit_the_shapes(described):
    seen = 0
    for file in RECORDED.glob("*.json"):
        recorded = json.loads(file.read_text())
        for step in recorded.get("steps", [recorded]):
            for exchange in step["exchanges"]:
                if exchange["status"] == 200 and exchange["path"] in EXAMPLES:
                    validator(described, exchange["path"]).validate(exchange["body"])
                    seen += 1
    assert seen > 50


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": "hi"}),
        ("/v1/chat/completions", {}),
        ("/v1/completions", {"prompt": 3}),
        ("/v1/messages", {"model": "tiny", "messages": []}),
        ("/v1/completions", {"prompt": "x", "temperature": "hot"}),
    ],
)
def test_a_request_refused_for_its_shape_does_not_fit(client, described, path, body):
    assert not validator(described, path).is_valid(body)
    assert client.post(path, json=body).status_code == 400


def test_the_page_of_routes_names_all_and_fetches_nothing(client):
    response = client.get("/docs")
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    for route in ROUTES:
        assert (f" {route.path.replace(':path', '')} " in response.text) == route.listed
    assert not re.search(r"<script|<link|<img|src=|https?://|@import", response.text)
    assert "What is 12 + 30?" in response.text and "temperature" in response.text


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("/v1/chat/completion", "the nearest is POST /v1/chat/completions"),
        ("/v1/chat", "POST /v1/chat/completions"),
        ("/chat/completions", "the nearest is POST /v1/chat/completions"),
        ("/debug/step", "the nearest is GET /debug/steps"),
        ("/debug/nothing", "GET /debug/kv"),
        ("/nowhere", "POST /v1/chat/completions"),
    ],
)
def test_a_404_names_what_was_meant_and_is_short(client, path, named):
    response = client.get(path)
    message = error_of(response)["message"]
    assert response.status_code == 404 and named in message and "GET /openapi.json" in message
    assert len(message) < 400 and not any(f" {other}," in message for other in OTHER_KINDS)


@pytest.mark.parametrize("path", OTHER_KINDS)
def test_routes_of_other_kinds_of_models_say_what_this_one_does(client, path):
    error = error_of(client.post(path, json={"input": "x"}))
    assert error["code"] == "not_found" and "tiny generates text" in error["message"] and path in error["message"]


def test_anthropic_s_clients_get_the_models_in_their_form(client):
    listed = client.get("/v1/models", headers=ANTHROPIC).json()
    (card,) = listed.pop("data")
    assert listed == {"has_more": False, "first_id": "tiny", "last_id": "tiny"}
    assert (card["type"], card["id"], card["display_name"]) == ("model", "tiny", "tiny")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", card["created_at"])
    response = client.get("/v1/models/tiny", headers=ANTHROPIC)
    assert response.json() == card and len(response.headers["request-id"]) == 32
    missing = client.get("/v1/models/other", headers=ANTHROPIC)
    assert missing.status_code == 404 and missing.json()["error"]["type"] == "not_found_error"
    assert client.get("/v1/models").json()["object"] == "list"
