"""Who may call what. The route table itself is walked, so that a new route cannot be forgotten."""

import pytest
from server_harness import TOKENS, error_of, listening_core, serving
from starlette.requests import Request

from gapless.server.app import ROUTES
from gapless.server.auth import Access, KeyRing
from gapless.server.endpoint import Endpoint
from gapless.server.errors import ApiError
from gapless.server.pages import FILES, INDEX_PAGE

KEYS = ("first-key", "zweiter-schlüssel")
PUBLIC = {"/health", "/ready", "/ping", "/", "/ui", "/ui/", "/ui/{name:path}", "/docs", "/openapi.json"}


@pytest.fixture(scope="module")
def guarded():
    with serving(api_key=KEYS) as server:
        yield server


@pytest.fixture(scope="module")
def operated():
    with serving(api_key=("user",), operator_key=("boss",)) as server, server.client() as client:
        yield client


@pytest.fixture(scope="module")
def caller(guarded):
    with guarded.client() as client:
        yield client


def test_every_route_of_the_app_declares_its_access(guarded):
    routes = guarded.app.routes
    assert {route.path for route in routes} == {entry.path for entry in ROUTES}
    for route in routes:
        assert isinstance(route, Endpoint), f"{route.path} is not behind an Endpoint"
        operator = route.path.endswith(("/server_info", "/tokenizer_info", "load_lora_adapter", "weights_from_disk"))
        operator = operator or route.path.startswith(("/debug/", "/pause", "/resume", "/is_paused", "/abort_requests"))
        operator = operator or route.path in ("/reset_prefix_cache", "/flush_cache")
        expected = Access.PUBLIC if route.path in PUBLIC else Access.OPERATOR if operator else Access.USER
        assert route.entry.access is expected


WALK = [(entry, method) for entry in ROUTES for method in entry.methods]


@pytest.mark.parametrize(("entry", "method"), WALK, ids=lambda item: getattr(item, "path", item))
def test_without_a_key_only_probes_and_the_page_answer(caller, entry, method):
    path = entry.path.replace("{name:path}", "tiny")
    response = caller.request(method, path)
    if entry.path in PUBLIC:
        page = 200 if INDEX_PAGE in FILES else 404
        assert response.status_code == {"/": 307, "/ui": page, "/ui/": 307, "/ui/{name:path}": 404}.get(entry.path, 200)
    else:
        assert response.status_code == 401
        if not path.startswith("/v1/messages"):
            assert error_of(response)["code"] == "invalid_api_key"
        assert response.json()["error"]["type"] == "authentication_error"
        assert response.headers["www-authenticate"] == "Bearer"
    if method == "GET":
        assert caller.head(path).status_code == response.status_code


@pytest.mark.parametrize(
    "path", ["/v1//models", "/V1/models", "/v1/models/", "//v1/models", "/v1/%6dodels", "/metrics/"]
)
def test_other_spellings_of_a_path_open_no_route(caller, path):
    assert caller.get(path).status_code in (401, 404)


BEARERS = [
    *(("authorization", text, 200) for text in ("Bearer first-key", "bearer first-key", f"Bearer {KEYS[1]}".encode())),
    *(("authorization", text, 401) for text in ("Bearer wrong", "Bearer", "first-key", "Basic first-key")),
    *(("authorization", text, 401) for text in ("Bearer first-ke", "Bearer first-keyy", b"Bearer \xff\xfe")),
    ("x-api-key", "first-key", 200),
    ("x-api-key", "", 401),
]


@pytest.mark.parametrize(("name", "value", "status"), BEARERS)
def test_a_key_opens_the_server_and_nothing_else_does(caller, name, value, status):
    response = caller.get("/v1/models", headers={name: value})
    assert response.status_code == status
    assert status == 200 or error_of(response)


def test_the_key_is_tested_before_the_body(caller):
    response = caller.post("/v1/completions", content=b"{not json", headers={"content-type": "text/plain"})
    assert response.status_code == 401


def request_with(key, client=("10.0.0.1", 1)):
    headers = [(b"authorization", b"Bearer " + key.encode()), (b"host", b"localhost:8000")]
    return Request({"type": "http", "client": client, "headers": headers})


def test_tenants_differ_by_key_and_hide_it():
    ring = KeyRing(KEYS)
    first, second = (ring.admit(request_with(key), Access.USER) for key in KEYS)
    assert first and second and first != second
    assert "first" not in first
    assert "first-key" not in repr(ring) + repr(vars(ring))
    with pytest.raises(ApiError):
        ring.admit(request_with("third"), Access.USER)
    assert KeyRing(()).admit(request_with("anything"), Access.USER) == ""


@pytest.mark.parametrize("client", [("127.0.0.1", 5), ("127.8.8.8", 5), ("::1", 5), None])
def test_without_an_operator_key_operators_are_users_of_this_machine(client):
    assert KeyRing(()).admit(request_with("anything", client), Access.OPERATOR) == ""
    assert KeyRing(KEYS).admit(request_with(KEYS[0], client), Access.OPERATOR)
    for ring, key in ((KeyRing(KEYS), "third"), (KeyRing(KEYS), "")):
        with pytest.raises(ApiError):
            ring.admit(request_with(key, client), Access.OPERATOR)


@pytest.mark.parametrize("keys", [(), KEYS])
def test_from_another_machine_an_operator_route_needs_the_operators_key(keys):
    key = KEYS[0]
    with pytest.raises(ApiError, match="its own machine"):
        KeyRing(keys).admit(request_with(key), Access.OPERATOR)
    ring = KeyRing(keys, ("boss",))
    for client in (("10.0.0.1", 1), ("127.0.0.1", 1)):
        with pytest.raises(ApiError, match="the operator's key"):
            ring.admit(request_with(key, client), Access.OPERATOR)
        assert ring.admit(request_with("boss", client), Access.OPERATOR)
    assert bool(ring.admit(request_with("boss"), Access.USER)) is bool(keys)


EMPTY = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/update_weights_from_disk")
"""Operators' routes that refuse a request without a body"""


@pytest.mark.parametrize("path", ["/pause", "/resume", "/reset_prefix_cache", "/flush_cache", *EMPTY])
def test_an_operator_route_takes_the_operators_key_alone(operated, path):
    for key, status in (("user", 401), ("boss", 400 if path in EMPTY else 200)):
        headers = {"authorization": f"Bearer {key}"}
        assert operated.post(path, headers=headers).status_code == status


def test_the_prefix_cache_is_split_by_key_and_salt():
    """The core must see a different salt for each (key, cache_salt), and the body cannot choose the tenant."""
    salts = []

    core = listening_core(lambda request: salts.append(request.salt))
    with serving(api_key=("a", "b"), core=core) as server, server.client() as client:
        for key in ("a", "b"):
            for salt in (None, "None", "x"):
                fields = {"prompt": "hi", "max_tokens": 1, "cache_salt": salt}
                headers = {"authorization": f"Bearer {key}"}
                assert client.post("/v1/completions", json=fields, headers=headers).status_code == 200
        tenant = salts[0].partition(":")[0]
        stolen = {"prompt": "hi", "max_tokens": 1, "cache_salt": f"{tenant}:x"}
        client.post("/v1/completions", json=stolen, headers={"authorization": "Bearer b"})
    assert len(set(salts)) == 7
    assert all(salts)


def test_without_keys_and_salt_all_requests_share_prefixes():
    salts = []

    core = listening_core(lambda request: salts.append(request.salt))
    with serving(core=core) as server, server.client() as client:
        client.post("/v1/completions", json={"prompt": TOKENS.encode("hi"), "max_tokens": 1})
        client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1, "cache_salt": "s"})
    assert salts == ["", ":s"]


@pytest.mark.parametrize(
    ("client", "host", "local"),
    [
        ("127.0.0.1", "localhost:8000", True),
        ("127.0.0.1", "127.0.0.1:8000", True),
        ("::1", "[::1]:8000", True),
        ("::ffff:127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "evil.example", False),
        ("127.0.0.1", "localhost.evil.example:8000", False),
        ("127.0.0.1", "[", False),
        ("127.0.0.1", "", False),
        ("::ffff:192.168.0.7", "localhost", False),
        ("192.168.0.7", "192.168.0.1", False),
        (None, "any", True),
    ],
)
def test_an_operator_route_without_a_key_wants_this_machine_by_a_name_that_is_its_own(client, host, local):
    """A page of others, open in a browser here, has a name of theirs in Host, wherever that points."""
    headers = [(b"host", host.encode())] if host else []
    scope = {"type": "http", "method": "GET", "path": "/server_info", "headers": headers}
    request = Request(scope | {"client": (client, 1) if client else None, "query_string": b"", "server": ("x", 1)})
    if local:
        assert KeyRing(()).admit(request, Access.OPERATOR) == ""
    else:
        with pytest.raises(ApiError, match="its own machine alone"):
            KeyRing(()).admit(request, Access.OPERATOR)
