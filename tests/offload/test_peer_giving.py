"""The giving side of peers: who gets in, what ends a connection, and how long a reader keeps its pages."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

import pytest
from peer_rig import KEY, connected, giver_of, greeted, is_found, taker_of
from tier_rig import checksum, content, has, key, setup_of, stored
from waiting import until

from gapless.base.errors import ConfigError
from gapless.base.shared import mapped
from gapless.offload.tiers import frames
from gapless.offload.tiers.frames import LEASE, FrameKind, FrameSocket
from gapless.offload.tiers.giving import MAX_CONNECTIONS, MAX_STRANGERS


def test_a_machine_that_has_gone_is_noticed_within_a_minute():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as raw:
        FrameSocket(raw)
        assert raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, pause, tries = [
            raw.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_KEEP{name}")) for name in ("IDLE", "INTVL", "CNT")
        ]
        assert idle + tries * pause <= 60


def test_a_taker_that_does_not_ask_for_a_proof_gets_nothing_either(giver, setup, path, caplog):
    peer = FrameSocket(connected(path))
    peer.send(FrameKind.HELLO, b"gaplessP6" + bytes(32) + setup.namespace.digest)
    proof = peer.receive(FrameKind.CHALLENGE)[1][-32:]
    peer.send(FrameKind.PROOF, proof, setup.namespace.text.encode())  # the giver's own, back to it
    with pytest.raises(frames.PeerError, match="closed"):
        peer.receive(FrameKind.WELCOME)
    assert "another key" in caplog.text
    peer.close()


@pytest.mark.parametrize(("key_of_both", "user", "gets"), [(b"", 0, True), (b"", 1, False), (KEY, 1, True)])
def test_a_unix_socket_without_a_key_serves_processes_of_one_user(
    key_of_both, user, gets, opened, setup, path, monkeypatch, caplog
):
    our = os.geteuid()
    monkeypatch.setattr("os.geteuid", lambda: our + user)  # as if each were another user to the other
    giver, taker = opened(giver_of(setup, path, key_of_both)), opened(taker_of(setup, path, key=key_of_both))
    stored(giver, setup, 0)
    assert has(taker, 0) == [gets]
    assert gets or "another user: give both sides a key" in caplog.text


def test_each_side_by_itself_refuses_another_users_process(opened, setup, path, monkeypatch):
    our = os.geteuid()
    monkeypatch.setattr("os.geteuid", lambda: our + 1)
    opened(giver_of(setup, path, b""))
    taker = FrameSocket(connected(path))
    assert not taker.wait(60), "a giver says nothing to it"
    taker.close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as giver:
        giver.bind(str(path.with_name("others")))
        giver.listen(1)
        giver.settimeout(60)
        opened(taker_of(setup, path.with_name("others"), key=b""))
        raw, _ = giver.accept()
        raw.settimeout(60)
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


@pytest.mark.parametrize(
    "sent", [b"", b"\x00" * 5, b"\x01\xff\xff\xff\xff", b"GET / HTTP/1.1\r\n\r\n", b"\x01\x49\x00\x00\x00" + b"x" * 73]
)
def test_a_program_that_is_no_peer_is_sent_away(sent, giver, path):
    with connected(path) as raw:
        raw.settimeout(60)
        raw.sendall(sent)
        if not sent:
            raw.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):  # what it had sent was not read
            assert raw.recv(9) == b""
    until(lambda: not giver.server.connections)


@pytest.mark.parametrize(
    "frame",
    [
        b"\x05\x02\x00\x00\x00xx",
        b"\x05\x05\x00\x00\x00\x00\xff\xff\xff\x7f",
        b"\x07\x05\x00\x00\x00abcde",
        pytest.param(b"\x05\x07\x02\x00\x00" + b"\x01\x02" + bytes(4) + bytes(513), id="a name that is too long"),
    ],
)
def test_frames_that_do_not_fit_together_end_the_connection(frame, giver, setup, path):
    peer = FrameSocket(raw := connected(path))
    frames.greet(peer, KEY, setup.namespace)
    raw.sendall(frame)
    with pytest.raises(frames.PeerError, match="closed"):
        peer.receive(FrameKind.ANSWER)
    peer.close()


def test_connections_of_peers_are_bounded(giver, setup, path, monkeypatch, caplog):
    monkeypatch.setattr("gapless.offload.tiers.giving.MAX_CONNECTIONS", 3)
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


def test_a_peer_gets_in_while_strangers_connect_and_say_nothing(opened, giver, setup, path, monkeypatch):
    monkeypatch.setattr("gapless.offload.tiers.giving.ADMIT_SECONDS", 1e6)
    monkeypatch.setattr("gapless.offload.tiers.frames.FRAME_SECONDS", 1e6)  # strangers stay for as long as they may
    stored(giver, setup, 0)
    strangers = [connected(path) for _ in range(MAX_CONNECTIONS + MAX_STRANGERS)]
    assert strangers[MAX_CONNECTIONS - 1].recv(1) == b"", "only the latest are waited for"
    taker = opened(taker_of(setup, path))
    is_found(taker, key(0))
    strangers += [connected(path) for _ in range(MAX_STRANGERS)]
    assert has(taker, 0) == [True], "strangers took the place of a peer"
    assert len(giver.server.connections) <= MAX_STRANGERS + 2
    for stranger in strangers:
        stranger.close()


@pytest.mark.seeds
def test_a_stranger_that_says_a_little_at_a_time_is_sent_away(giver, setup, path, monkeypatch):
    monkeypatch.setattr("gapless.offload.tiers.giving.ADMIT_SECONDS", 1.0)
    monkeypatch.setattr("gapless.offload.tiers.frames.FRAME_SECONDS", 1e6)
    peer = FrameSocket(connected(path))
    peer.send(FrameKind.HELLO, b"gaplessP6" + bytes(32) + setup.namespace.digest)
    peer.receive(FrameKind.CHALLENGE)
    assert not peer.wait(60)
    peer.close()


def test_an_address_in_use_is_refused_and_a_socket_left_behind_is_not(opened, setup, path):
    giver = giver_of(setup, path)
    with pytest.raises(ConfigError, match="kv_peer_listen: cannot listen on"):
        giver_of(setup, path)
    giver.close()
    left = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    left.bind(str(path))
    left.close()
    opened(giver_of(setup, path))
    assert path.stat().st_mode & 0o077 == 0


def test_a_giver_whose_socket_was_removed_can_be_closed(giver, path):
    path.unlink()
    giver.close()
