"""New weights over HTTP: for operators, from below one directory, with one answer when they are in use."""

import pytest
from server_harness import error_of, fake_core, serving

from gapless.base.config import EngineConfig
from gapless.base.errors import RequestError

ROUTE = "/update_weights_from_disk"


def core():
    made = fake_core()
    made.updates = []

    def update(path, answer):
        made.updates.append(path)
        answer(RequestError(f"{path}/config.json: layers is 1", "model_path") if path.endswith("bad") else None)

    made.update_weights = update
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("weights")
    for name in ("good", "bad"):
        (root / "here" / name).mkdir(parents=True)
    (root / "elsewhere").mkdir()
    (root / "here" / "link").symlink_to(root / "elsewhere")
    return root


@pytest.fixture(scope="module")
def server(folder):
    with serving(core=core, engine=EngineConfig(weights_dir=str(folder / "here"))) as running:
        yield running


def test_weights_are_loaded_as_sglang_spells_it(client, server, folder):
    answer = client.post(ROUTE, json={"model_path": "good", "load_format": "auto"})
    assert answer.status_code == 200
    assert answer.json() == {"success": True, "message": "the weights of good are in use"}
    assert server.core.updates[-1] == str(folder / "here" / "good")


@pytest.mark.parametrize("path", ["../elsewhere", "/etc", "link", "a\0b"])
def test_no_other_directory_is_read(client, server, path):
    before = len(server.core.updates)
    answer = client.post(ROUTE, json={"model_path": path})
    assert answer.status_code == 400 and error_of(answer)["param"] == "model_path"
    assert len(server.core.updates) == before


def test_a_refusal_of_the_engine_is_passed_on_without_the_directory(client, folder):
    answer = client.post(ROUTE, json={"model_path": "bad"})
    assert answer.status_code == 400 and error_of(answer)["message"] == "bad/config.json: layers is 1"
    assert error_of(answer)["param"] == "model_path"


def test_a_server_without_the_directory_changes_nothing():
    with serving(core=core) as server, server.client() as client:
        answer = client.post(ROUTE, json={"model_path": "good"})
        assert answer.status_code == 400 and "--weights-dir" in error_of(answer)["message"]
        assert not server.core.updates
