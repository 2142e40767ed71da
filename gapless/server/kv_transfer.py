"""Reads and writes kv_transfer_params: a router has one engine compute a prompt and another continue it.

Two spellings are taken: by names alone (remote_decoder, remote_prefiller), and that of vLLM's NIXL connector
(do_remote_decode, do_remote_prefill), whose block numbers mean nothing here. Pages are found by their keys in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gapless.base.errors import RequestError
from gapless.base.peers import PeerAddress, PeerPlan
from gapless.base.records import NO_TRANSFER, KVTransfer

TRANSFER_FIELD = "kv_transfer_params"
MAX_NAME_CHARS = 128


class Handover(NamedTuple):
    """A request's settings for other engines, and its answer's for the next one."""

    transfer: KVTransfer = NO_TRANSFER
    answer: dict[str, Any] | None = None


def read_handover(params: Mapping[str, Any] | None, plan: PeerPlan, new_name: str) -> Handover:
    """Read a request's settings. `new_name` is given to a prompt for a decoder that has none.

    An engine without peers leaves it alone. Raises RequestError, also for a peer that this engine
    was not started with: none is reached because a request names it.
    """
    if not params or not plan:
        return Handover()
    decoder, prefiller = _part(params, "remote_decoder"), _part(params, "remote_prefiller")
    nixl = decoder is None and prefiller is None
    if nixl:
        decoder = {"kv_request_id": None} if params.get("do_remote_decode") else None
        prefiller = {**params, "kv_request_id": params.get("remote_request_id")}
        prefiller = prefiller if params.get("do_remote_prefill") else None
    transfer, answer = Handover()
    if prefiller is not None:
        transfer = transfer._replace(claim=_name(prefiller, None), peer=_peer(prefiller, plan))
    if decoder is not None:
        if plan.listen is None:
            raise RequestError(
                f"{TRANSFER_FIELD}: this engine gives no pages, since its role is decode", TRANSFER_FIELD
            )
        transfer = transfer._replace(offer=_name(decoder, new_name))
        answer = _answer(transfer.offer, plan.listen, nixl)
    return Handover(transfer, answer)


def _part(params: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    part = params.get(name)
    if part is not None and not isinstance(part, dict):
        raise RequestError(f"{TRANSFER_FIELD}.{name} must be an object", TRANSFER_FIELD)
    return part


def _name(part: Mapping[str, Any], default: str | None) -> str:
    name = part.get("kv_request_id") or default
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise RequestError(
            f"{TRANSFER_FIELD}: kv_request_id must be 1 to {MAX_NAME_CHARS} printable characters", TRANSFER_FIELD
        )
    return name


def _peer(part: Mapping[str, Any], plan: PeerPlan) -> str:
    """Return the peer that a request names; the only one where it names none."""
    host, port = part.get("remote_host"), part.get("remote_port")
    if host is None and len(plan.peers) == 1:
        return str(plan.peers[0])
    path = host.removeprefix("unix:") if isinstance(host, str) and host.startswith("unix:") else ""
    number = int(port) if isinstance(port, int) or (isinstance(port, str) and port.isdecimal()) else 0
    address = PeerAddress(path=path) if path else PeerAddress(str(host), number)
    if address not in plan.peers:
        text = "remote_host and remote_port must be those of a peer that this engine was started with, see --kv-peer"
        raise RequestError(f"{TRANSFER_FIELD}: {text}", TRANSFER_FIELD)
    return str(address)


def _answer(name: str, listen: PeerAddress, nixl: bool) -> dict[str, Any]:
    """The router's settings for the decoder, which finds a prefiller that listens everywhere if it has no other."""
    where = {"remote_host": f"unix:{listen.path}" if listen.path else listen.host, "remote_port": listen.port}
    where = {} if listen.everywhere else where
    if not nixl:
        return {"remote_prefiller": {"kv_request_id": name, **where}}
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_request_id": name,
        "remote_engine_id": "gapless",
        "remote_block_ids": [],
        **where,
    }
