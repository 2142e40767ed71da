"""Every form of Redis: with TLS, on a socket of this host, a cluster, the master that sentinels name."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
import subprocess
import sys

import pytest
import redis
from certificates import Authority, needs_openssl
from fake_resp import FakeResp, free_port
from tier_rig import content, has, key, loaded, setup_of, stored
from tier_servers import redis_program, redis_server
from waiting import until

from gapless.base.errors import ConfigError
from gapless.offload.tiers.redis import KEY_PREFIX, RedisTier


def tier_at(opened, url):
    setup = setup_of(url)
    return opened(RedisTier(setup, seconds=5.0, back_off=0.0)), setup


@needs_openssl
def test_a_server_with_tls_is_believed_by_its_certificate_alone(tmp_path, opened):
    ours, others = Authority(tmp_path / "ours"), Authority(tmp_path / "others")
    files = ours.files("server")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.certfile, files.keyfile)
    fake = FakeResp(context)
    try:
        tier, setup = tier_at(opened, f"{fake.url}?ssl_ca_certs={ours.certificate}")
        stored(tier, setup, 0, 1)
        assert loaded(tier, setup, 1, 0)[1] == [content(1), content(0)]
        for query in (f"?ssl_ca_certs={others.certificate}", ""):
            with pytest.raises(ConfigError, match=r"no Redis answers at rediss://127\..*CERTIFICATE_VERIFY_FAILED"):
                tier_at(opened, f"{fake.url}{query}")
        with pytest.raises(ConfigError, match="no Redis answers at"):
            tier_at(opened, fake.url.replace("rediss", "redis"))
    finally:
        fake.stop()


@pytest.mark.net
def test_a_server_on_a_socket_of_this_host_keeps_pages(tmp_path, opened):
    path = tmp_path / "redis:r.sock"
    server = redis_server(tmp_path, "--unixsocket", str(path))
    server.start(setup_of(server.url)).close()
    try:
        tier, setup = tier_at(opened, f"redis+unix://{path}?db=2")
        stored(tier, setup, 0)
        assert loaded(tier, setup, 0)[1] == [content(0)]
        with redis.Redis.from_url(server.url.replace("/3", "/2")) as client:
            assert client.dbsize() == 1
    finally:
        server.kill()


@pytest.fixture
def cluster(tmp_path):
    """Two servers of a cluster, with half of the slots each."""
    nodes = []
    try:
        for number in range(2):
            (folder := tmp_path / str(number)).mkdir()
            port = free_pair()
            options = ["--port", port, "--save", "", "--dir", folder, "--cluster-enabled", "yes", "--bind", "127.0.0.1"]
            process = subprocess.Popen([redis_program(), *map(str, options)], stdout=subprocess.DEVNULL)
            nodes.append((process, redis.Redis(port=port)))
        halves = (range(8192), range(8192, 16384))
        for (_, client), slots in zip(nodes, halves, strict=True):
            until(lambda client=client: answered(client.ping))
            client.execute_command("CLUSTER ADDSLOTS", *slots)
        nodes[0][1].execute_command("CLUSTER MEET", "127.0.0.1", nodes[1][1].get_connection_kwargs()["port"])
        for _, client in nodes:
            until(lambda client=client: client.execute_command("CLUSTER INFO")["cluster_state"] == "ok")
        yield nodes
    finally:
        for process, client in nodes:
            client.close()
            process.kill()
            process.wait()


def free_pair():
    """A free port whose cluster's port, 10,000 above, is free too. Below those that the system gives to connections."""
    while True:
        port = random.randrange(12_000, 22_000)
        with socket.socket() as one, socket.socket() as other, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            other.bind(("127.0.0.1", port + 10_000))
            return port


def answered(ask):
    """What a server answers; nothing while it is not there."""
    with contextlib.suppress(redis.RedisError):
        return ask()


def port_of(client):
    return client.get_connection_kwargs()["port"]


@pytest.mark.net
def test_pages_of_a_cluster_are_on_all_its_servers_and_one_that_dies_has_none(cluster, opened):
    (first, one), (_, two) = cluster
    tier, setup = tier_at(opened, f"redis+cluster://127.0.0.1:{port_of(one)}")
    numbers = range(10)
    assert not stored(tier, setup, *numbers).failed
    assert loaded(tier, setup, *numbers)[1] == [content(number) for number in numbers]
    assert one.dbsize() > 0 and two.dbsize() == 10 - one.dbsize() > 0
    first.kill()
    found = has(tier, *numbers)
    assert sum(found) == two.dbsize()
    alive = [number for number, there in zip(numbers, found, strict=True) if there]
    assert loaded(tier, setup, *alive)[1] == [content(number) for number in alive]


@pytest.mark.net
def test_slots_that_have_moved_are_found_at_their_new_server(cluster, opened):
    (_, one), (_, two) = cluster
    tier, setup = tier_at(opened, f"redis+cluster://127.0.0.1:{port_of(two)}")
    to = two.execute_command("CLUSTER MYID")
    for slot in {two.execute_command("CLUSTER KEYSLOT", KEY_PREFIX + key(number)) for number in range(8)}:
        for client in (two, one):
            client.execute_command("CLUSTER SETSLOT", slot, "NODE", to)
    until(lambda: not stored(tier, setup, *range(8)).failed)
    assert loaded(tier, setup, *range(8))[1] == [content(number) for number in range(8)] and two.dbsize() == 8


class FakeSentinel(FakeResp):
    """Names `master` as the server of the service "kv"."""

    def answer(self, words):
        if words[0] != b"SENTINEL":
            return super().answer(words)
        facts = {"name": "kv", "ip": "127.0.0.1", "port": self.master, "flags": "master", "num-other-sentinels": 0}
        flat = [str(word).encode() for pair in facts.items() for word in pair]
        return b"*1\r\n*%d\r\n" % len(flat) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in flat)


def test_the_master_that_sentinels_name_is_asked_and_after_it_the_next_one(opened):
    old, new, sentinel = FakeResp(), FakeResp(), FakeSentinel()
    ports = [int(fake.url.rpartition(":")[2].removesuffix("/0")) for fake in (old, new, sentinel)]
    sentinel.master = ports[0]
    try:
        url = f"redis+sentinel://me:secret@127.0.0.1:{free_port()},127.0.0.1:{ports[2]}/kv/0"
        tier, setup = tier_at(opened, url)
        stored(tier, setup, 0)
        assert loaded(tier, setup, 0)[1] == [content(0)] and len(old.values) == 1
        sentinel.master, old.mood = ports[1], "closed"
        assert has(tier, 0) == [False]
        assert not stored(tier, setup, 0, 1).failed
        assert loaded(tier, setup, 1)[1] == [content(1)] and len(new.values) == 2
        with pytest.raises(ConfigError, match=r"no Redis answers at .*/other/0: No master found for 'other'") as error:
            tier_at(opened, url.replace("/kv/", "/other/"))
        assert "secret" not in str(error.value)
    finally:
        for fake in (old, new, sentinel):
            fake.stop()


@pytest.mark.net
def test_a_real_sentinel_is_understood(tmp_path, opened):
    server = redis_server(tmp_path)
    server.start(setup_of(server.url)).close()
    port, at = int(server.url.rpartition(":")[2].removesuffix("/3")), free_port()
    (tmp_path / "conf").write_text(f"port {at}\nbind 127.0.0.1\nsentinel monitor kv 127.0.0.1 {port} 1\n")
    process = subprocess.Popen([redis_program(), tmp_path / "conf", "--sentinel"], stdout=subprocess.DEVNULL)
    try:
        with redis.Redis(port=at) as client:
            until(lambda: (answered(client.sentinel_masters) or {"kv": {}})["kv"].get("flags") == "master")
        tier, setup = tier_at(opened, f"redis+sentinel://127.0.0.1:{at}/kv/3")
        stored(tier, setup, 0)
        assert loaded(tier, setup, 0)[1] == [content(0)]
    finally:
        process.kill()
        process.wait()
        server.kill()


def test_a_tier_without_its_software_names_the_package(monkeypatch):
    for name in ("redis", "gapless.offload.tiers.redis_links"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"redis needs its client \(pip install "):
        RedisTier(setup_of("redis://127.0.0.1:1"))


def test_a_cluster_that_repeats_a_refused_command_is_not_quoted_with_the_password():
    fake = FakeResp()
    try:
        fake.answer = lambda words: b"-ERR unknown command, with args beginning with: 's3cret'\r\n"
        with pytest.raises(ConfigError, match="no Redis answers at") as error:
            RedisTier(setup_of(fake.url.replace("redis://", "redis+cluster://me:s3cret@")))
        assert "s3cret" not in str(error.value)
        where = fake.url.removeprefix("redis://").partition("/")[0]
        with pytest.raises(ConfigError, match="no Redis answers at") as error:
            RedisTier(setup_of(f"redis+sentinel://{where}/kv?sentinel_username=me&sentinel_password=s3cret"))
        assert "s3cret" not in str(error.value)
    finally:
        fake.stop()
