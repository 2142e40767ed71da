"""What a request may ask for beside its text (times, the weights' version), and what operators set for all of them."""

import json
import shutil

import pytest
from certificates import Authority, needs_openssl
from server_harness import MODEL, TEMPLATE, TOKENS, error_of, events, serving, tokenizer

from gapless.base.config import EngineConfig
from gapless.base.errors import CheckpointError, ConfigError
from gapless.demo import weights_dir
from gapless.engine.frontdoor import ModelAssets, open_assets
from gapless.server.config import ServerConfig
from gapless.server.run import check_tls

HI = [{"role": "user", "content": "hi"}]
CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
ASKED = {CHAT: {"messages": HI, "max_tokens": 5}, PLAIN: {"prompt": "hi", "max_tokens": 5}}
TIMES = {f"{part}_{what}" for part in ("prompt", "predicted") for what in ("n", "ms", "per_token_ms", "per_second")}
TIMES |= {"cache_n", "queue_ms"}


@pytest.mark.parametrize("path", ASKED)
def test_times_come_where_they_are_asked_for(client, path):
    assert "timings" not in client.post(path, json=ASKED[path]).json()
    fields = {**ASKED[path], "timings_per_token": True}
    times = client.post(path, json=fields).json()["timings"]
    assert set(times) == TIMES and (times["predicted_n"], times["cache_n"]) == (5, 0)
    assert min(times.values()) >= 0
    found = events(client.post(path, json={**fields, "stream": True, "stream_options": {"include_usage": True}}))
    told = [event["timings"]["predicted_n"] for event in found if "timings" in event]
    assert told == sorted(told) and told[-1] == 5 and "timings" in found[-1]
    response = client.post("/v1/responses", json={"input": "hi", "max_output_tokens": 5, "timings_per_token": True})
    assert response.json()["timings"]["predicted_n"] == 5


@pytest.mark.parametrize("path", ASKED)
def test_the_weights_are_named_where_that_is_asked_for(server, client, path):
    fields = {**ASKED[path], "return_meta_info": True}
    answer = client.post(path, json=fields).json()
    (choice,) = answer["choices"]
    assert choice["meta_info"]["id"] == answer["id"]
    assert (choice["meta_info"]["weight_version"], choice["meta_info"]["completion_tokens"]) == ("default", 5)
    server.state.weight_version = "step-100"
    try:
        last = events(client.post(path, json={**fields, "stream": True}))[-1]
    finally:
        server.state.weight_version = "default"
    assert last["choices"][0]["meta_info"]["weight_version"] == "step-100"


@pytest.mark.parametrize("path", [*ASKED, "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_one_id_joins_the_answer_the_list_of_requests_and_the_client(server, client, path, stream):
    more = {"/v1/messages": {"model": MODEL, "messages": HI, "max_tokens": 5}, "/v1/responses": {"input": "hi"}}
    fields = {**(ASKED | more)[path], "stream": stream}
    response = client.post(path, json=fields, headers={"x-request-id": "mine-1"})
    server.until(lambda: server.stats().queue.running == 0)
    (row,) = client.get("/debug/requests?limit=1").json()["requests"]
    assert row["request_id"] == "mine-1" and row["id"] in response.text


def test_prompts_of_one_request_and_those_without_a_label_have_ids_too(server, client):
    body = {"prompt": ["a", "b"], "max_tokens": 2, "request_id": "from-the-body"}
    answer = client.post(PLAIN, json=body).json()
    rows = client.get("/debug/requests?limit=2").json()["requests"]
    assert {row["id"] for row in rows} == {f"{answer['id']}-{number}" for number in range(2)}
    assert {row["request_id"] for row in rows} == {"from-the-body"}
    answer = client.post(PLAIN, json={"prompt": "a"}).json()
    (row,) = client.get("/debug/requests?limit=1").json()["requests"]
    assert (row["id"], row["request_id"]) == (answer["id"], "")


def test_more_log_probabilities_than_a_server_gives_are_refused_by_field():
    with serving(max_logprobs=2) as server, server.client() as client:
        for path, field, more in (
            (PLAIN, "logprobs", {}),
            (PLAIN, "prompt_logprobs", {}),
            (CHAT, "top_logprobs", {"logprobs": True}),
        ):
            fields = {**ASKED[path], **more}
            assert client.post(path, json={**fields, field: 2}).status_code == 200
            error = error_of(client.post(path, json={**fields, field: 3}))
            assert error["param"] == field and "at most 2" in error["message"]
        response = client.post("/v1/responses", json={"input": "hi", "top_logprobs": 3})
        assert error_of(response)["param"] == "top_logprobs"


def test_template_variables_of_the_server_hold_where_a_request_says_nothing():
    with serving(default_chat_template_kwargs='{"enable_thinking": true}') as server, server.client() as client:

        def prompt(**fields):
            ids = client.post("/tokenize", json={"messages": HI, **fields}).json()["tokens"]
            answer = client.post(CHAT, json={"messages": HI, "max_tokens": 1, "return_token_ids": True, **fields})
            assert answer.json()["prompt_token_ids"] == ids
            return TOKENS.decode(ids)

        assert prompt() == "<user>hi<assistant>hm "
        assert prompt(chat_template_kwargs={"enable_thinking": False}) == "<user>hi<assistant>"
        counted = client.post("/v1/messages/count_tokens", json={"model": MODEL, "messages": HI}).json()
        assert counted["input_tokens"] == len("<user>hi<assistant>hm ")


def test_template_variables_that_no_one_may_set_end_the_start():
    front = ModelAssets(tokenizer(TEMPLATE), (TOKENS.eos_token_id,), {})
    with (
        pytest.raises(ConfigError, match=r"default_chat_template_kwargs: .*messages is not"),
        serving(front=front, default_chat_template_kwargs='{"messages": []}'),
    ):
        pass


# Default sampling


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    directory = tmp_path_factory.mktemp("generation")
    (directory / "generation_config.json").write_text('{"top_p": 0.5, "max_new_tokens": 7}')
    return str(directory)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("recommends") / "model"
    shutil.copytree(weights_dir(), directory)
    (directory / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.6}))
    return str(directory)


def defaults(model, **fields):
    return dict(open_assets(EngineConfig(model=model, **fields)).defaults)


def test_sampling_comes_from_where_the_operator_says(model, folder):
    assert defaults(model) == {"temperature": 0.6}
    assert defaults(model, generation_config="vllm") == {}
    assert defaults(model, generation_config=folder) == {"top_p": 0.5, "max_tokens": 7}
    override = {"override_generation_config": '{"temperature": 0.5, "max_new_tokens": 9}'}
    assert defaults(model, **override) == {"temperature": 0.5, "max_tokens": 9}
    assert defaults(model, generation_config="vllm", **override) == {"temperature": 0.5, "max_tokens": 9}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"generation_config": "/nowhere"}, "generation_config must be auto, vllm or a folder"),
        ({"override_generation_config": "{"}, "override_generation_config must be JSON such as"),
        ({"override_generation_config": '{"temprature": 1}'}, "has no 'temprature'; known: max_new_tokens"),
        ({"override_generation_config": '{"temperature": -1}'}, "override_generation_config: temperature"),
    ],
)
def test_sampling_that_cannot_be_is_named(model, fields, message):
    with pytest.raises((ConfigError, CheckpointError), match=message):
        defaults(model, **fields)


# TLS


@needs_openssl
def test_https_is_served_and_only_to_clients_with_a_certificate_where_that_is_asked_for(tmp_path):
    import ssl

    import httpx

    authority = Authority(tmp_path / "tls")
    own, theirs = authority.files("server"), authority.files("client")
    files = {"ssl_certfile": own.certfile, "ssl_keyfile": own.keyfile, "ssl_ca_certs": own.ca_certs}
    with serving(ssl_cert_reqs=2, **files) as server:
        url = f"https://127.0.0.1:{server.port}"
        known = ssl.create_default_context(cafile=own.ca_certs)
        with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError)):
            httpx.get(f"{url}/health", verify=known)
        known.load_cert_chain(theirs.certfile, theirs.keyfile)
        with httpx.Client(base_url=url, verify=known) as client:
            assert client.get("/health").status_code == 200
            streamed = client.post(PLAIN, json={"prompt": "hi", "max_tokens": 30, "stream": True})
            assert "".join(event["choices"][0]["text"] for event in events(streamed))[:3] == "abc"


@needs_openssl
def test_files_of_tls_that_cannot_be_used_end_the_start(tmp_path):
    authority = Authority(tmp_path / "tls")
    own, locked = authority.files("server"), authority.locked("locked")
    check_tls(ServerConfig(ssl_certfile=own.certfile, ssl_keyfile=own.keyfile))
    for fields in (
        {"ssl_certfile": "/nowhere.pem"},
        {"ssl_certfile": own.certfile},
        {"ssl_certfile": locked.certfile, "ssl_keyfile": locked.keyfile},
        {"ssl_certfile": own.certfile, "ssl_keyfile": own.keyfile, "ssl_ca_certs": "/nowhere.pem"},
    ):
        with pytest.raises(ConfigError, match=r"--ssl-.* cannot be used"):
            check_tls(ServerConfig(**fields))
    check_tls(ServerConfig(ssl_certfile="/nowhere.pem", uds="a.sock"))
