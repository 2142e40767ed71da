"""kv_transfer_params in both spellings: what is read, what the answer says, and which peers may be named."""

import msgspec
import pytest

from gapless.base.errors import RequestError
from gapless.base.peers import PeerPlan, role_plan
from gapless.base.records import KVTransfer
from gapless.server.dialects.completions import CompletionRequest
from gapless.server.kv_transfer import Handover, read_handover

PREFILL = role_plan("prefill", None, [])
DECODE = role_plan("decode", None, ["127.0.0.1:5600", "unix:/run/kv.sock"])
ONE = role_plan("decode", None, ["[::1]:7"])


def read(params, plan):
    return read_handover(params, plan, "new")


def test_a_prefiller_says_where_its_pages_are():
    transfer, answer = read({"remote_decoder": {"kv_request_id": "R"}}, PREFILL)
    assert transfer == KVTransfer(offer="R")
    where = {"remote_host": "127.0.0.1", "remote_port": 5600}
    assert answer == {"remote_prefiller": {"kv_request_id": "R", **where}}
    assert read(answer, DECODE) == Handover(KVTransfer(claim="R", peer="127.0.0.1:5600"))


def test_the_spelling_of_nixl_is_taken_and_given_back():
    asked = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_host": None}
    transfer, answer = read(asked, PREFILL)
    assert transfer == KVTransfer(offer="new")
    assert answer["do_remote_prefill"] is True and answer["do_remote_decode"] is False
    assert answer["remote_block_ids"] == [] and answer["remote_request_id"] == "new"
    assert read(answer, DECODE) == Handover(KVTransfer(claim="new", peer="127.0.0.1:5600"))


def test_the_one_token_that_vllm_router_asks_of_a_prefiller_goes_with_a_form_too():
    form = {"prompt": "hi", "min_tokens": 1, "guided_regex": "a*"}
    asked = msgspec.convert({**form, "kv_transfer_params": {"do_remote_decode": True}}, CompletionRequest)
    assert asked.sampling({}, 1).min_tokens == 0
    for refused, limit in ((asked, 2), (msgspec.convert(form, CompletionRequest), 1)):
        with pytest.raises(RequestError, match="min_tokens does not go with guided_regex"):
            refused.sampling({}, limit)


def test_unix_sockets_and_peers_without_a_name():
    plan = role_plan("both", "unix:/run/kv.sock", [])
    answer = read({"remote_decoder": {}}, plan).answer
    assert answer == {
        "remote_prefiller": {"kv_request_id": "new", "remote_host": "unix:/run/kv.sock", "remote_port": 0}
    }
    assert read(answer, DECODE).transfer.peer == "unix:/run/kv.sock"
    assert read({"remote_prefiller": {"kv_request_id": "R"}}, ONE).transfer == KVTransfer(claim="R", peer="[::1]:7")


def test_a_prefiller_that_listens_everywhere_is_found_by_a_decoder_that_knows_no_other():
    plan = role_plan("prefill", "0.0.0.0:7", [], ["c", "k", "ca"])
    answer = read({"remote_decoder": {"kv_request_id": "R"}}, plan).answer
    assert answer == {"remote_prefiller": {"kv_request_id": "R"}}
    assert read(answer, ONE).transfer == KVTransfer(claim="R", peer="[::1]:7")


def test_an_engine_without_a_role_leaves_it_alone():
    assert read(prefiller("evil", 1), PeerPlan()) == Handover()
    assert read(None, DECODE) == read({}, DECODE) == read({"do_remote_decode": False}, DECODE) == Handover()


def prefiller(host=None, port=5600, named="R"):
    """What a decoder is told of a prefiller."""
    where = {} if host is None else {"remote_host": host, "remote_port": port}
    return {"remote_prefiller": {"kv_request_id": named, **where}}


@pytest.mark.parametrize(
    ("params", "plan", "why"),
    [
        (prefiller("evil"), DECODE, "started with"),
        (prefiller("127.0.0.1", 1), DECODE, "started with"),
        (prefiller(), DECODE, "started with"),
        ({"remote_prefiller": {"kv_request_id": "R", "remote_host": "unix:/etc/x"}}, DECODE, "started with"),
        (prefiller("127.0.0.1"), PREFILL, "started"),
        ({"remote_prefiller": {"remote_host": "127.0.0.1", "remote_port": 5600}}, DECODE, "kv_request_id must be"),
        (prefiller(named="x" * 129), ONE, "kv_request_id must be"),
        (prefiller(named=7), ONE, "kv_request_id must be"),
        ({"remote_prefiller": "R"}, ONE, "remote_prefiller must be an object"),
        ({"remote_decoder": {"kv_request_id": "\x00"}}, PREFILL, "kv_request_id must be"),
        ({"remote_decoder": {"kv_request_id": "R"}}, DECODE, "its role is decode"),
        ({"do_remote_decode": True}, DECODE, "its role is decode"),
    ],
)
def test_a_wrong_transfer_is_refused_by_name(params, plan, why):
    with pytest.raises(RequestError, match=why) as refused:
        read(params, plan)
    assert refused.value.param == "kv_transfer_params" and "kv_transfer_params" in str(refused.value)
