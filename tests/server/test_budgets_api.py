"""A thinking budget over HTTP, with a core that says any token that its mask allows."""

import pytest
from form_core import FormCore
from server_harness import TOKENS, error_of, serving

BUDGET = 7
END = TOKENS.encode("</think>", False)
ASKED = {"thinking_token_budget": BUDGET, "max_tokens": 40, "seed": 3, "return_token_ids": True}
BEGUN = {
    "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>\n"}],
    "add_generation_prompt": False,
    "continue_final_message": True,
}
FORMS = [{}, {"structured_outputs": {"choice": ["yes", "no"]}}, {"response_format": {"type": "json_object"}}]


@pytest.fixture(scope="module")
def client():
    core = lambda: FormCore(TOKENS, freely=30)  # noqa: E731
    with serving(core=core, reasoning_parser="think") as server, server.client() as client:
        yield client


@pytest.mark.parametrize("form", FORMS, ids=["none", "choice", "object"])
def test_a_chat_thinks_no_longer_than_its_budget_and_then_answers(client, form):
    (choice,) = client.post("/v1/chat/completions", json={**BEGUN, **ASKED, **form}).json()["choices"]
    ids, message = choice["token_ids"], choice["message"]
    at = next(at for at in range(len(ids)) if ids[at : at + len(END)] == END)
    assert at == BUDGET or (form and BUDGET < at < BUDGET + 4), "a character may have been begun"
    assert TOKENS.decode(ids[:at]).strip() == (message.get("reasoning") or "").strip()
    if "structured_outputs" in form:
        assert message["content"].strip() in ("yes", "no")


def test_a_budget_is_refused_by_name_where_nothing_is_known_of_reasoning(client):
    refused = client.post("/v1/completions", json={"prompt": "hi", **ASKED})
    assert refused.status_code == 400 and error_of(refused)["param"] == "thinking_token_budget"


def test_a_begun_answer_is_not_cut_off(client):
    asked = {**BEGUN, "truncate_prompt_tokens": 3}
    refused = client.post("/v1/chat/completions", json={**asked, "truncation_side": "right"})
    assert refused.status_code == 400 and error_of(refused)["param"] == "truncation_side"
    assert client.post("/v1/chat/completions", json={**asked, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(("context", "budget", "bounded"), [(3_000, 1_500, True), (1_100, 1_500, False)])
def test_messages_bound_thinking_where_their_budget_can_be_reached(context, budget, bounded):
    asked = []

    class Hearing(FormCore):
        def submit(self, request):
            asked.append(request.params.structured_outputs)
            super().submit(request._replace(params=request.params.replace(structured_outputs=None)))

    def core():
        made = Hearing(TOKENS)
        made.info = made.info._replace(max_model_len=context)
        return made

    with serving(reasoning_parser="think", core=core) as server, server.client() as client:
        thinking = {"type": "enabled", "budget_tokens": budget}
        body = {"model": "tiny", "max_tokens": 2_000, "messages": BEGUN["messages"][:1], "thinking": thinking}
        with client.stream("POST", "/v1/messages", json={**body, "stream": True}) as answer:
            assert answer.status_code == 200
            server.until(lambda: asked)
        body["thinking"] = {"type": "disabled", "budget_tokens": -5}
        with client.stream("POST", "/v1/messages", json={**body, "stream": True}) as answer:
            assert answer.status_code == 200
            server.until(lambda: len(asked) == 2)
    form, unasked = asked
    assert unasked is None
    assert (form is not None and form.thinking.budget == budget) is bounded
