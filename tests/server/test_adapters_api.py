"""Adapters over HTTP: they are models of the list, with a parent, and a request names one as its model."""

import pytest
from server_harness import MODEL, error_of, events, listening_core, serving

from gapless.base.config import EngineConfig
from gapless.base.errors import ConfigError
from gapless.server.settings import shown


def core():
    made = listening_core(lambda request: made.submitted.append(request.adapter))()
    made.info = made.info._replace(adapters=("tidy", "terse"))
    made.submitted = []
    return made


@pytest.fixture(scope="module")
def server():
    with serving(core=core, engine=EngineConfig(lora_modules=("tidy=/a", "terse=/b"))) as running:
        yield running


def test_adapters_are_listed_with_their_parent(client):
    cards = client.get("/v1/models").json()["data"]
    assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
        (MODEL, MODEL, None),
        ("tidy", "tidy", MODEL),
        ("terse", "terse", MODEL),
    ]
    assert client.get("/v1/models/terse").json() == cards[2]


@pytest.mark.parametrize(("model", "adapter"), [(MODEL, ""), ("tidy", "tidy"), (None, ""), ("terse", "terse")])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_names_one_as_its_model(client, server, model, adapter, stream):
    before = len(server.core.submitted)
    asked = {"prompt": ["a", "b"], "max_tokens": 3, "stream": stream} | ({"model": model} if model else {})
    answer = client.post("/v1/completions", json=asked)
    assert answer.status_code == 200
    names = {event["model"] for event in events(answer)} if stream else {answer.json()["model"]}
    assert names == {model or MODEL}
    assert server.core.submitted[before:] == [adapter] * 2
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3} | ({"model": model} if model else {})
    assert client.post("/v1/chat/completions", json=chat).json()["model"] == (model or MODEL)
    assert server.core.submitted[-1] == adapter


def test_another_name_is_not_found_and_the_answer_lists_those_there_are(client):
    error = error_of(client.post("/v1/completions", json={"model": "tid", "prompt": "a"}))
    assert error["code"] == "model_not_found" and "terse" in error["message"]


def test_an_adapter_has_no_name_of_the_model():
    with (
        pytest.raises(ConfigError, match="'tiny' is a name of the model itself"),
        serving(core=core, engine=EngineConfig(lora_modules=("tiny=/a",))),
    ):
        pass


def test_their_directories_are_shown_to_nobody():
    given = ("tidy=/secret/place", "terse=/b", '{"name": "c", "path": "/secret"}')
    assert shown("lora_modules", given) == ["tidy", "terse", "c"]


@pytest.fixture
def changing():
    modules = EngineConfig(lora_modules=("tidy=/a", "terse=/b"))
    with serving(core=core, engine=modules) as running, running.client() as client:
        yield client


def names(client):
    return [card["id"] for card in client.get("/v1/models").json()["data"]]


def test_an_adapter_is_loaded_and_unloaded_as_vllm_spells_it(changing):
    answer = changing.post("/v1/load_lora_adapter", json={"lora_name": "new", "lora_path": "new"})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'new' added successfully.")
    assert names(changing) == [MODEL, "tidy", "terse", "new"]
    asked = {"model": "new", "prompt": "a", "max_tokens": 2}
    assert changing.post("/v1/completions", json=asked).json()["model"] == "new"
    answer = changing.post("/v1/unload_lora_adapter", json={"lora_name": "new", "lora_int_id": 7})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'new' removed successfully.")
    assert names(changing) == [MODEL, "tidy", "terse"]
    refused = changing.post("/v1/completions", json=asked)
    assert refused.status_code == 404 and error_of(refused)["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"lora_path": "a"}, "lora_name"),
        ({"lora_name": "a"}, "lora_path"),
        ({"lora_name": "a", "lora_path": ""}, "lora_path"),
        ({"lora_name": " ", "lora_path": "a"}, "lora_name"),
        ({"lora_name": "a\nb", "lora_path": "a"}, "lora_name"),
        ({"lora_name": MODEL, "lora_path": "a"}, "lora_name"),
        ({"lora_name": "a", "lora_path": "a", "load_inplace": "yes"}, "load_inplace"),
    ],
)
def test_a_load_that_says_too_little_or_too_much_is_refused(client, body, param):
    answer = client.post("/v1/load_lora_adapter", json=body)
    assert answer.status_code == 400 and error_of(answer)["param"] == param
    assert names(client) == [MODEL, "tidy", "terse"]
