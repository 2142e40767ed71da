"""Peers over TLS: pages arrive, and a peer without a valid certificate gets none and delays no other."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from contextlib import suppress

import pytest
from certificates import Authority, needs_openssl
from fake_resp import free_port
from peer_rig import KEY, open_giver
from sharpest import sharpest
from tier_rig import SLOT, content, has, loaded, stored
from waiting import until

from gapless.base.config import EngineConfig
from gapless.base.errors import ConfigError
from gapless.base.peers import PeerAddress, PeerFiles, PeerPlan, role_plan, with_key
from gapless.engine.wiring import build_core
from gapless.offload.tiers import frames
from gapless.offload.tiers.frames import FrameKind, FrameSocket, greet, tls_of
from gapless.offload.tiers.peer import open_peer_tier
from gapless.server.config import ServerConfig
from gapless.server.pair import serve_pair

pytestmark = needs_openssl
HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("tls") / "theirs")


@pytest.fixture(scope="module")
def files(authority):
    """Those of a peer that all is well with."""
    return authority.files("good")


@pytest.fixture(scope="module")
def wrong(authority, other, files):
    """Files by what is wrong with them."""
    return {
        "another authority": other.files("stranger")._replace(ca_certs=files.ca_certs),
        "expired": authority.files("old", days=-1),
        "plain text": None,
    }


@pytest.fixture
def address():
    return PeerAddress(HOST, free_port())


def giver_at(setup, address, files):
    return open_giver(setup, PeerPlan(address, (), KEY, files))


def taker_of(setup, *addresses, files):
    return open_peer_tier(setup, PeerPlan(None, addresses, KEY, files), back_off=0.1)


def connected(address):
    raw = socket.create_connection((address.host, address.port))
    raw.settimeout(60)
    return raw


def secured(files):
    """Two ends of a connection over TLS."""
    both = socket.socketpair(socket.AF_UNIX)
    ends = FrameSocket(both[0], tls_of(files, gives=True)), FrameSocket(both[1], tls_of(files, gives=False), HOST)
    other = threading.Thread(target=ends[0].secure)
    other.start()
    ends[1].secure()
    other.join()
    return ends


def test_pages_arrive_over_tls(opened, setup, address, files, caplog):
    caplog.set_level("INFO", "gapless.offload.tiers")
    giver, taker = opened(giver_at(setup, address, files)), opened(taker_of(setup, address, files=files))
    stored(giver, setup, 0, 1, 2)
    for _ in range(3):  # one connection serves all
        assert has(taker, 2, 7, 0) == [True, False, True]
        end, got = loaded(taker, setup, 0, 2)
        assert got == [content(0), content(2)] and not end.failed and end.nbytes == 2 * SLOT
    assert len(giver.server.connections) == caplog.text.count(": connected") == 1


def test_a_unix_socket_stays_without_tls_whatever_files_there_are(opened, setup, tmp_path, files):
    address = PeerAddress(path=str(tmp_path / "p.sock"))
    giver, taker = opened(giver_at(setup, address, files)), opened(taker_of(setup, address, files=files))
    stored(giver, setup, 0)
    assert has(taker, 0) == [True] and loaded(taker, setup, 0)[1] == [content(0)]


@pytest.mark.parametrize("what", ["another authority", "expired", "plain text"])
def test_a_taker_without_a_good_certificate_gets_nothing_and_others_do(
    what, opened, setup, address, files, wrong, caplog
):
    giver = opened(giver_at(setup, address, files))
    stored(giver, setup, 0)
    bad = opened(taker_of(setup, address, files=wrong[what]))
    assert has(bad, 0) == [False]
    good = opened(taker_of(setup, address, files=files))
    until(lambda: has(good, 0) == [True])
    assert "a peer was refused" in caplog.text and KEY.decode() not in caplog.text
    bad.close()
    until(lambda: len(giver.server.connections) == 1)


@pytest.mark.parametrize("what", ["another authority", "expired", "plain text", "another host"])
def test_a_giver_without_a_good_certificate_gives_nothing_and_others_do(
    what, opened, setup, address, authority, files, wrong, caplog
):
    there = authority.files("elsewhere", host="127.0.0.2") if what == "another host" else wrong[what]
    bad, good = opened(giver_at(setup, address, there)), PeerAddress(HOST, free_port())
    for giver in (bad, opened(giver_at(setup, good, files))):
        stored(giver, setup, 0)
    taker = opened(taker_of(setup, address, good, files=files))
    until(lambda: has(taker, 0) == [True])
    assert loaded(taker, setup, 0)[1] == [content(0)]
    assert taker.links[str(address)].error and not taker.links[str(good)].error
    assert what == "plain text" or "certificate verify failed" in caplog.text


@pytest.mark.parametrize("what", ["no certificate", "TLS 1.2"])
def test_a_client_that_shows_less_than_it_must_is_sent_away(what, opened, setup, address, files):
    giver = opened(giver_at(setup, address, files))
    context = ssl.create_default_context(cafile=files.ca_certs)
    if what == "TLS 1.2":
        context.load_cert_chain(files.certfile, files.keyfile)
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    peer = FrameSocket(connected(address), context, HOST)
    with pytest.raises(OSError):
        greet(peer, KEY, setup.namespace)
    peer.close()
    until(lambda: not giver.server.connections)


STALLED = [b"", b"\x16\x03\x01\x02\x00"]


@pytest.mark.parametrize("said", STALLED)
def test_a_handshake_that_does_not_end_delays_no_other_peer(said, opened, setup, address, files, monkeypatch):
    monkeypatch.setattr(frames, "FRAME_SECONDS", 1e6)
    monkeypatch.setattr("gapless.offload.tiers.giving.ADMIT_SECONDS", 1e6)
    giver = opened(giver_at(setup, address, files))
    stored(giver, setup, 0)
    with connected(address) as raw:
        raw.sendall(said)
        taker = opened(taker_of(setup, address, files=files))
        until(lambda: has(taker, 0) == [True])
        giver.close()
        until(lambda: not giver.server.connections)


@pytest.mark.parametrize("said", sharpest([b"GET / HTTP/1.1\r\n\r\n", *STALLED]))
def test_a_handshake_that_does_not_end_is_ended(said, opened, setup, address, files):
    opened(giver_at(setup, address, files))
    with connected(address) as raw:
        raw.sendall(said)
        with suppress(ConnectionResetError):
            while raw.recv(99):
                pass


@pytest.mark.seeds
def test_a_handshake_byte_by_byte_is_ended(opened, setup, address, files):
    giver = opened(giver_at(setup, address, files))
    with connected(address) as raw, pytest.raises(OSError):
        for byte in b"\x16\x03\x01\x02\x00\x01" + bytes(500):
            raw.send(bytes([byte]))
            time.sleep(0.05)
    until(lambda: not giver.server.connections)


@pytest.mark.seeds
def test_a_giver_that_never_answers_has_nothing_and_closing_does_not_wait_for_it(opened, setup, files, monkeypatch):
    with socket.create_server((HOST, 0)) as silent:
        address = PeerAddress(*silent.getsockname())
        assert has(opened(taker_of(setup, address, files=files)), 0) == [False]
        monkeypatch.setattr(frames, "FRAME_SECONDS", 1e6)
        taker = taker_of(setup, address, files=files)
        silent.accept()[0].close()  # that of the first taker
        with silent.accept()[0]:
            taker.close()


@pytest.mark.parametrize("tls", [False, True])
def test_a_page_that_is_read_slowly_ends_the_connection(tls, files):
    giver, taker = secured(files) if tls else map(FrameSocket, socket.socketpair(socket.AF_UNIX))
    page, failed = bytes(8 << 20), threading.Event()

    def give():
        with pytest.raises(OSError):
            giver.send(FrameKind.PAGE, frames.PAGE_HEAD.pack(b"", 0, len(page)), page=page, seconds=0.4)
        failed.set()

    thread = threading.Thread(target=give)
    thread.start()
    memory = memoryview(bytearray(16_384))
    while not failed.is_set():
        taker.fill(memory, time.monotonic() + 60)
        time.sleep(0.02)
    thread.join()
    giver.close()
    taker.close()


def test_bytes_after_a_stop_are_no_cipher_text(files):
    giver, taker = secured(files)
    page = content(0) * 9  # of three records
    giver.send(FrameKind.GONE, page=page)
    assert taker.receive(FrameKind.GONE)[1] == b""
    memory = memoryview(bytearray(len(page)))
    taker.fill(memory[:16_384], time.monotonic() + 60)
    taker.stop()
    with suppress(OSError):
        taker.fill(memory[16_384:], time.monotonic() + 60)
    assert all(byte in (0, sent) for byte, sent in zip(memory, page, strict=True))
    with pytest.raises(OSError):
        taker.send(FrameKind.ASK, b"in the clear")
    giver.close()
    taker.close()


# What the user says.


def test_addresses_that_other_machines_reach_need_tls_and_a_key(tmp_path, monkeypatch):
    monkeypatch.delenv("GAPLESS_KV_PEER_KEY", raising=False)
    files = PeerFiles("c", "k", "ca")
    far = (("prefill", "0.0.0.0:1", [], "kv_peer_listen"), ("decode", None, ["b:1"], "kv_peers"))
    for role, listen, peers, field in far:
        with pytest.raises(ConfigError, match=f"{field}: .* crosses machines.*kv_peer_ssl_certfile"):
            role_plan(role, listen, peers)
        plan = role_plan(role, listen, peers, files)
        assert plan.tls == files
        with pytest.raises(ConfigError, match=f"{field}: .* need a key.*kv_peer_key_file"):
            with_key(plan, None)
        (tmp_path / "key").write_bytes(KEY)
        assert with_key(plan, str(tmp_path / "key")) == plan._replace(key=KEY)


def test_the_files_for_tls_come_together():
    assert role_plan("both", None, [], (None, None, None)).tls is None
    for some in (("c", None, None), (None, "k", "ca"), ("c", "k", None)):
        with pytest.raises(ConfigError, match="belong together"):
            role_plan("both", None, [], some)


@pytest.mark.parametrize("name", ["ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "key_file"])
def test_files_for_peers_are_refused_without_any_by_an_engine_and_by_a_pair(name, capsys):
    config = EngineConfig(device="cpu", **{f"kv_peer_{name}": "/a.pem"})
    with pytest.raises(ConfigError, match=f"kv_peer_{name} is for engines with peers: add --role, or leave it out"):
        build_core(config)
    assert serve_pair([], config, ServerConfig(pd="1p1d")) == 2
    assert "leave role and every kv_peer flag out" in capsys.readouterr().err
    EngineConfig(role="both", **{f"kv_peer_ssl_{one}": "/a.pem" for one in PeerFiles._fields})


def test_files_that_cannot_be_used_are_named(files, other):
    for changed, match in (
        ({"certfile": "/none"}, "kv_peer_ssl_certfile /none"),
        ({"keyfile": str(other.files("lost").keyfile)}, "kv_peer_ssl_keyfile .*cannot be used"),
        ({"ca_certs": "/none"}, "kv_peer_ssl_ca_certs /none cannot be used"),
    ):
        with pytest.raises(ConfigError, match=match):
            tls_of(files._replace(**changed), gives=True)
    with pytest.raises(ConfigError, match=r"kv_peer_ssl_keyfile .*cannot be used"):
        tls_of(other.locked("locked"), gives=True)
