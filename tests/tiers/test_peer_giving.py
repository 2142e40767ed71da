"""The giving side of peers: who gets in, what ends a connection, and how long a reader keeps its pages."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress

import pytest
from peer_rig import KEY, connected, decided, giver_of, greeted, taker_of, until
from tier_rig import checksum, content, has, key, setup_of, stored

from gapless.base.errors import ConfigError
from gapless.base.shared import mapped
from gapless.tiers import frames
from gapless.tiers.frames import LEASE, FrameKind, FrameSocket
from gapless.tiers.giving import MAX_CONNECTIONS, MAX_STRANGERS
from gapless.tiers.seam import Found


def test_the_end_of_a_machine_is_noticed_though_it_says_nothing():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as raw:
        FrameSocket(raw)
        assert raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, pause, tries = [
            raw.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_KEEP{name}")) for name in ("IDLE", "INTVL", "CNT")
        ]
        assert idle + tries * pause <= 60


def test_a_taker_that_does_not_ask_for_a_proof_gets_nothing_either(opened, path, caplog):
    setup = setup_of("")
    opened(giver_of(setup, path))
    peer = FrameSocket(connected(path))
    peer.send(FrameKind.HELLO, b"gaplessP6" + bytes(32) + setup.namespace.digest)
    proof = peer.receive(FrameKind.CHALLENGE)[1][-32:]
    peer.send(FrameKind.PROOF, proof, setup.namespace.text.encode())  # the giver's own, back to it
    with pytest.raises(frames.PeerError, match="closed"):
        peer.receive(FrameKind.WELCOME)
    assert "another key" in caplog.text
    peer.close()


@pytest.mark.parametrize(("key_of_both", "user", "gets"), [(b"", 0, True), (b"", 1, False), (KEY, 1, True)])
def test_without_a_key_a_unix_socket_serves_processes_of_one_user(
    key_of_both, user, gets, opened, path, monkeypatch, caplog
):
    setup, our = setup_of(""), os.geteuid()
    monkeypatch.setattr("os.geteuid", lambda: our + user)  # as if each were another user to the other
    giver, taker = opened(giver_of(setup, path, key_of_both)), opened(taker_of(setup, path, key=key_of_both))
    stored(giver, setup, 0)
    assert has(taker, 0) == [gets]
    assert gets or sum("another user: give both sides a key" in message for message in caplog.messages) >= 1


def test_each_side_by_itself_refuses_another_users_process(opened, path, monkeypatch):
    setup, our = setup_of(""), os.geteuid()
    monkeypatch.setattr("os.geteuid", lambda: our + 1)
    opened(giver_of(setup, path, b""))
    taker = FrameSocket(connected(path))
    assert not taker.wait(3), "a giver says nothing to it"
    taker.close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as giver:
        giver.bind(str(path.with_name("others")))
        giver.listen(1)
        giver.settimeout(3)
        opened(taker_of(setup, path.with_name("others"), key=b""))
        raw, _ = giver.accept()
        raw.settimeout(3)
        assert raw.recv(1) == b"", "nor does a taker"
        raw.close()


def test_a_page_that_is_read_in_place_keeps_its_place_until_the_load_has_ended(opened, path):
    setup = setup_of("", pages=2)
    giver = opened(giver_of(setup, path))
    stored(giver, setup, 0)
    raw = FrameSocket(connected(path))
    frames.greet(raw, KEY, setup.namespace)
    raw.send(FrameKind.MAP)
    memory = mapped(fd := raw.receive_memory())
    os.close(fd)
    raw.send(FrameKind.FETCH, LEASE.pack(5), key(0))
    _, sum_, nbytes, start = frames.LENT.unpack(raw.receive(FrameKind.LENT)[1])
    for number in range(1, 6):
        stored(giver, setup, number)
        assert bytes(memory[start : start + nbytes]) == content(0) and sum_ == checksum(content(0))
    raw.send(FrameKind.RETURN, LEASE.pack(5))
    raw.receive(FrameKind.RETURNED)
    for number in range(6, 8):
        stored(giver, setup, number)
    assert bytes(memory[start : start + nbytes]) != content(0), "its place serves others again"
    raw.close()


def test_a_reader_that_says_nothing_keeps_its_places_for_a_while_and_is_not_answered_after_it(
    opened, path, monkeypatch
):
    monkeypatch.setattr("gapless.tiers.giving.LEASE_SECONDS", 0.6)  # the machine may be busy
    setup = setup_of("", pages=2)
    giver = opened(giver_of(setup, path))
    stored(giver, setup, 0, 1)
    raw = FrameSocket(connected(path))
    frames.greet(raw, KEY, setup.namespace)
    raw.send(FrameKind.MAP)
    os.close(raw.receive_memory())
    raw.send(FrameKind.FETCH, LEASE.pack(5), key(0), key(1))
    assert len(raw.receive(FrameKind.LENT)[1]) == 2 * frames.LENT.size
    assert giver.shelf.lent == 2 and not any(giver.shelf.put([giver.slots.page(key(2), content(2), 2)]))
    until(lambda: not giver.server.connections)
    assert giver.shelf.lent == 0 and all(giver.shelf.put([giver.slots.page(key(2), content(2), 2)]))
    with pytest.raises(OSError):
        raw.send(FrameKind.RETURN, LEASE.pack(5))
        raw.receive(FrameKind.RETURNED)
    raw.close()
    giver.shelf.check()


@pytest.mark.parametrize(
    "sent", [b"", b"\x00" * 5, b"\x01\xff\xff\xff\xff", b"GET / HTTP/1.1\r\n\r\n", b"\x01\x49\x00\x00\x00" + b"x" * 73]
)
def test_what_is_no_peer_is_sent_away(sent, opened, path):
    setup = setup_of("")
    giver = opened(giver_of(setup, path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as raw:
        raw.connect(str(path))
        raw.settimeout(3)
        raw.sendall(sent)
        if not sent:
            raw.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):  # what it had sent was not read
            assert raw.recv(9) == b""
    until = time.monotonic() + 2
    while giver.server.connections:
        assert time.monotonic() < until, "a connection is kept"


@pytest.mark.parametrize(
    "frame",
    [
        b"\x05\x02\x00\x00\x00xx",
        b"\x05\x05\x00\x00\x00\x00\xff\xff\xff\x7f",
        b"\x07\x05\x00\x00\x00abcde",
        pytest.param(b"\x05\x07\x02\x00\x00" + b"\x01\x02" + bytes(4) + bytes(513), id="a name that is too long"),
    ],
)
def test_frames_that_do_not_fit_together_end_the_connection(frame, opened, path):
    setup = setup_of("")
    opened(giver_of(setup, path))
    peer = FrameSocket(raw := connected(path))
    frames.greet(peer, KEY, setup.namespace)
    raw.sendall(frame)
    with pytest.raises(frames.PeerError, match="closed"):
        peer.receive(FrameKind.ANSWER)
    peer.close()


def test_connections_of_peers_are_bounded(opened, path, monkeypatch, caplog):
    monkeypatch.setattr("gapless.tiers.giving.MAX_CONNECTIONS", 3)
    setup = setup_of("")
    giver = opened(giver_of(setup, path))
    strangers = [connected(path) for _ in range(4)]
    peers = [greeted(path, setup) for _ in range(3)]
    for _ in range(2):
        refused = FrameSocket(connected(path))
        with pytest.raises(frames.PeerError, match="closed"):  # before a WELCOME: it will wait longer each time
            frames.greet(refused, KEY, setup.namespace)
        refused.close()
    for peer in peers:
        peer.send(FrameKind.RETURN, LEASE.pack(5))
        peer.receive(FrameKind.RETURNED)
    peers[0].close()
    until(lambda: len(giver.server.connections) <= 6)
    peers[0] = greeted(path, setup)
    peers[0].send(FrameKind.RETURN, LEASE.pack(5))
    peers[0].receive(FrameKind.RETURNED)
    assert caplog.text.count("a peer was refused: 3 peers are connected already") == 1
    for one in (*strangers, *peers):
        one.close()


def test_a_peer_gets_in_while_strangers_connect_and_say_nothing(opened, path):
    setup = setup_of("")
    giver = opened(giver_of(setup, path))
    stored(giver, setup, 0)
    strangers = [connected(path) for _ in range(MAX_CONNECTIONS + MAX_STRANGERS)]
    strangers[MAX_CONNECTIONS - 1].settimeout(0.5)
    with suppress(TimeoutError):
        assert strangers[MAX_CONNECTIONS - 1].recv(1) == b"", "only the latest are waited for"
    taker = opened(taker_of(setup, path))
    found, seconds = decided(taker, [key(0)], "R")
    assert found == [Found.HIT] and seconds < 0.9, "strangers were waited for"
    strangers += [connected(path) for _ in range(MAX_STRANGERS)]
    assert has(taker, 0) == [True], "strangers took the place of a peer"
    assert len(giver.server.connections) <= MAX_STRANGERS + 2
    for stranger in strangers:
        stranger.close()


def test_a_stranger_that_says_a_little_at_a_time_is_sent_away(opened, path, monkeypatch):
    monkeypatch.setattr("gapless.tiers.giving.ADMIT_SECONDS", 0.2)
    setup = setup_of("")
    opened(giver_of(setup, path))
    peer, begin = FrameSocket(connected(path)), time.monotonic()
    peer.send(FrameKind.HELLO, b"gaplessP6" + bytes(32) + setup.namespace.digest)
    peer.receive(FrameKind.CHALLENGE)
    assert not peer.wait(3) and time.monotonic() - begin < 0.9
    peer.close()


def test_an_address_in_use_is_refused_and_a_socket_left_behind_is_not(opened, path):
    setup = setup_of("")
    giver = giver_of(setup, path)
    with pytest.raises(ConfigError, match="kv_peer_listen: cannot listen on"):
        giver_of(setup, path)
    giver.close()
    left = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    left.bind(str(path))
    left.close()
    opened(giver_of(setup, path))
    assert path.stat().st_mode & 0o077 == 0


def test_a_socket_that_was_removed_does_not_stop_the_end(path):
    giver = giver_of(setup_of(""), path)
    path.unlink()
    giver.close()
