"""Addresses and keys of peers: what the user may say, and hosts whose look-up fails, hangs, or finds several."""

from __future__ import annotations

import select
import socket
import threading
from contextlib import suppress

import pytest
from fake_resp import free_port
from peer_rig import KEY, open_giver, taker_of
from tier_rig import SLOT, Hand, key, stored
from waiting import until

from gapless.base.errors import ConfigError
from gapless.base.peers import PeerAddress, PeerPlan, role_plan, with_key
from gapless.base.records import NO_TRANSFER
from gapless.base.shared import SharedMemory
from gapless.offload.tiers.copying import CopyThreads
from gapless.offload.tiers.frames import FrameKind, FrameSocket, admit
from gapless.offload.tiers.link import FIRST_BACK_OFF, PeerCaller, PeerLink
from gapless.offload.tiers.peer import PeerWorker
from gapless.offload.tiers.seam import Namespace


@pytest.fixture
def hanging(monkeypatch):
    """Look-ups of the host `gone` hang until this is set; another fails."""
    answers, look_up = threading.Event(), socket.getaddrinfo

    def hangs(host, *args, **options):
        if host == "gone":
            answers.wait(120)
            raise OSError("no such host")
        return look_up(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", hangs)
    monkeypatch.setattr("gapless.offload.tiers.link.FRAME_SECONDS", 0.3)
    yield answers
    answers.set()


def far_link(host, *args):
    return PeerLink(
        PeerCaller(PeerAddress(host, 1), KEY, Namespace("")), CopyThreads(), (SLOT,), lambda data: None, *args
    )


@pytest.mark.process
def test_a_look_up_that_hangs_holds_a_link_no_longer_than_a_peer_may(hanging):
    link = far_link("gone", 0.0)
    for _ in range(2):
        assert link.turn() and "look-up" in link.error and not hanging.is_set()
    assert sum(thread.name == "gapless-look-up" for thread in threading.enumerate()) == 1, "one for each try"
    hanging.set()
    while "look-up" in link.error:
        assert link.turn()
    assert link.error == "no such host", "the answer that came late"


@pytest.mark.process
def test_pages_of_one_peer_are_found_while_the_look_up_of_another_hangs(giver, setup, path, hanging):
    taker = taker_of(setup, path)
    stored(giver, setup, 0)
    link = far_link("gone").start()
    taker.links[str(link.address)] = link
    worker = PeerWorker("peers", taker, lambda: None)
    worker.start()
    worker.ask(1, [key(0), key(1)], 5.0, NO_TRANSFER)
    answers = []
    until(lambda: answers.extend(worker.take()) or answers)
    assert answers[0].hits == (True, False)
    worker.close()
    assert not hanging.is_set(), "closing waits for the look-up"


@pytest.mark.parametrize("error", [UnicodeError("a host without a name"), OSError("no such host")])
def test_a_peer_whose_host_cannot_be_looked_up_is_left_alone_for_a_while(error, monkeypatch):
    tries = []

    def look_up(*_, **__):
        tries.append(1)
        raise error

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    clock = Hand()
    link = PeerLink(PeerCaller(PeerAddress("a", 1), KEY, Namespace("")), CopyThreads(), (SLOT,), clock=clock)
    assert [link.turn() for _ in range(3)] == [True, False, False] and len(tries) == 1
    assert str(error) in link.error
    clock.now += FIRST_BACK_OFF
    assert [link.turn() for _ in range(3)] == [True, False, False] and len(tries) == 2


def test_a_peer_that_breaks_after_each_greeting_is_left_alone_longer_each_time(path):
    """Each greeting costs the engine: the peer's memory is mapped, and made readable for the device."""
    tries, memory = [], SharedMemory(SLOT)

    def breaks(peer):
        tries.append(1)
        with suppress(OSError):
            admit(peer, KEY, Namespace(""))
            peer.receive(FrameKind.MAP)
            peer.send_memory(memory.fd)
        peer.close()

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    clock = Hand()
    link = PeerLink(PeerCaller(PeerAddress(path=str(path)), KEY, Namespace("")), CopyThreads(), (SLOT,), clock=clock)
    for _ in range(200):
        if select.select([listener], [], [], 0)[0]:
            breaks(FrameSocket(listener.accept()[0]))
        peer = threading.Thread(target=link.turn)
        peer.start()
        while peer.is_alive():
            if select.select([listener], [], [], 0.001)[0]:
                breaks(FrameSocket(listener.accept()[0]))
        clock.now += 0.01
    listener.close()
    memory.close()
    assert 3 <= len(tries) <= 6, "in two seconds, after 0.1 s, 0.2 s, 0.4 s and 0.8 s"


def two_of(look_up):
    """A look-up that knows a host with two addresses, of which the first does not answer."""

    def both(host, port, *args, **options):
        lines = [
            look_up(one, port, *args, **options) for one in (("127.0.0.2", "127.0.0.1") if host == "two" else (host,))
        ]
        return [line for some in lines for line in some]

    return both


def test_every_address_of_a_host_is_tried(monkeypatch, opened, setup):
    address = PeerAddress("127.0.0.1", free_port())
    giver = opened(open_giver(setup, PeerPlan(address, (), KEY)))
    monkeypatch.setattr(socket, "getaddrinfo", two_of(socket.getaddrinfo))
    link = opened(
        PeerLink(
            PeerCaller(PeerAddress("two", address.port), KEY, setup.namespace), CopyThreads(), setup.slot_bytes
        ).start()
    )
    until(lambda: giver.server.connections or link.error)
    assert not link.error


def test_addresses_are_read_and_shown():
    for text in ("127.0.0.1:5600", "[::1]:7", "prefill.example:80", "unix:/run/kv.sock"):
        assert str(PeerAddress.parse(text, "x")) == text
    for text in ("5600", ":5600", "host", "host:0", "host:70000", "host:x", "unix:"):
        with pytest.raises(ConfigError, match="kv_peers must be HOST:PORT"):
            role_plan(None, None, [text])
    for text in (".example:1", "a..b:1", "x" * 64 + ":1"):
        with pytest.raises(ConfigError, match=r"kv_peers: '.*' is no name of a host"):
            role_plan(None, None, [text])
    with pytest.raises(ConfigError, match="twice"):
        role_plan(None, None, ["a:1", "a:1"])
    local = [
        "127.0.0.1:1",
        "127.9.9.9:1",
        "[::1]:1",
        "localhost:1",
        "unix:/x",
        "0.0.0.0:1",
        "10.0.0.1:1",
        "[::]:1",
        "a:1",
    ]
    assert [PeerAddress.parse(text, "x").local for text in local] == [True] * 5 + [False] * 4
    assert all(PeerAddress.parse(text, "x").everywhere for text in ("0.0.0.0:1", "[::]:1", "[::0]:1"))
    assert not any(PeerAddress.parse(text, "x").everywhere for text in ("[::1]:1", "a:1", "unix:/x"))
    role_plan(None, "127.0.0.1:1", ["unix:/x"])
    for listen, peers, field in (("0.0.0.0:1", [], "kv_peer_listen"), (None, ["other:1"], "kv_peers")):
        with pytest.raises(ConfigError, match=f"{field}.*in the clear.*kv_peer_ssl_certfile"):
            role_plan(None, listen, peers)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "localhost:1"])
def test_peers_over_tcp_need_a_key_on_one_machine_too_and_unix_sockets_do_not(address, tmp_path, monkeypatch):
    monkeypatch.delenv("GAPLESS_KV_PEER_KEY", raising=False)
    (tmp_path / "key").write_bytes(KEY)
    for plan, field in (
        (role_plan("prefill", address, []), "kv_peer_listen"),
        (role_plan("decode", None, ["unix:/x", address]), "kv_peers"),
    ):
        with pytest.raises(ConfigError) as refused:
            with_key(plan, None)
        for part in (f"{field}: every user", address, "kv_peer_key_file or $GAPLESS_KV_PEER_KEY", "or use unix:PATH"):
            assert part in str(refused.value)
        assert with_key(plan, str(tmp_path / "key")).key == KEY
    assert with_key(role_plan("both", "unix:/x", ["unix:/y"]), None).key == b""


def test_keys_come_from_a_file_or_else_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("GAPLESS_KV_PEER_KEY", raising=False)
    assert with_key(PeerPlan(), None).key == b""
    monkeypatch.setenv("GAPLESS_KV_PEER_KEY", "short")
    with pytest.raises(ConfigError, match="at least 16"):
        with_key(PeerPlan(), None)
    (tmp_path / "key").write_bytes(KEY + b"\n")
    assert with_key(PeerPlan(), str(tmp_path / "key")).key == KEY
    with pytest.raises(ConfigError, match=r"kv_peer_key_file .*cannot be read"):
        with_key(PeerPlan(), str(tmp_path / "none"))
