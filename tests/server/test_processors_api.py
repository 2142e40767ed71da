"""Logits processors over HTTP: requests name them, with numbers, in vLLM's field."""

import pytest
from server_harness import error_of, listening_core, serving

asked = []


def core():
    made = listening_core(lambda request: asked.append(request.processors))()
    made.info = made.info._replace(processors=("soft", "loud"))
    return made


@pytest.mark.parametrize(
    ("path", "base"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_a_request_names_processors_and_their_numbers(path, base):
    asked.clear()
    fields = ["loud"], [{"qualname": "soft", "args": [1, 0.5]}, "loud"], [], None
    with serving(core=core) as server, server.client() as client:
        for given in fields:
            assert client.post(path, json={**base, "max_tokens": 2, "logits_processors": given}).status_code == 200
        refused = client.post(path, json={**base, "logits_processors": ["soft", "hard"]})
    assert asked == [((1, ()),), ((0, (1.0, 0.5)), (1, ())), (), ()]
    assert refused.status_code == 400 and error_of(refused)["param"] == "logits_processors"
    assert "no 'hard'; those of this engine: soft, loud" in error_of(refused)["message"]
