"""KV events over ZeroMQ: vLLM's form, read by definitions copied from vLLM's; subscribers, replays and bad settings."""

import json
import re
import socket
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from vllm_events import AllBlocksCleared, BlockRemoved, BlockStored, Clients, decode

from gapless.base.config import EngineConfig
from gapless.base.errors import ConfigError
from gapless.base.records import PageChange, PageEvent
from gapless.server.config import ServerConfig
from gapless.server.kv_events import KvEventPublisher, counts_of, kv_events
from gapless.server.kv_events_config import KvEventsConfig, listens

GUIDE = Path(__file__).resolve().parents[2] / "docs/guides/kv-events.md"
zmq = pytest.importorskip("zmq", reason="needs the extra events")


def digest(number):
    return bytes(24) + (2**63 + number).to_bytes(8, "big")


def stored(*numbers, parent=None, tokens=2, **fields):
    ids = np.arange(tokens * len(numbers), dtype=np.int32)
    return PageEvent(PageChange.STORED, 0, tuple(map(digest, numbers)), parent and digest(parent), ids, **fields)


REMOVED = PageEvent(PageChange.REMOVED, 1, (digest(1), digest(2)))
CLEARED = PageEvent(PageChange.CLEARED)


def receive(subscriber, count):
    found = []
    while len(found) < count:
        assert subscriber.poll(60_000), f"{len(found)} of {count} came"
        found.append(subscriber.recv_multipart())
    return found


@contextmanager
def publishing(tmp_path, **fields):
    endpoint, replay = f"ipc://{tmp_path}/out", f"ipc://{tmp_path}/again"
    given = {"enable_kv_cache_events": True, "endpoint": endpoint, "replay_endpoint": replay, **fields}
    publisher, clients = KvEventPublisher(KvEventsConfig.parse(json.dumps(given))), Clients(endpoint, replay)
    try:
        yield publisher, clients
    finally:
        publisher.close()
        clients.close()


def connected(publisher, subscriber):
    """Publish until it arrives: a subscription takes a moment, and what comes before is lost."""
    while not subscriber.poll(20):
        publisher.publish([CLEARED])
    return int.from_bytes(subscriber.recv_multipart()[1], "big")


def test_events_have_the_form_of_vllm(tmp_path):
    with publishing(tmp_path, topic="kv@pod@model") as (publisher, clients):
        subscriber, other = clients.subscriber("kv@"), clients.subscriber("else")
        connected(publisher, subscriber)
        began = time.time()
        publisher.publish([stored(1, 2, salt="tenant:s", adapter="lora"), stored(3, parent=2, salt=":s"), REMOVED])
        publisher.publish([stored(4, tokens=3, window=6, salt="tenant:")])
        frames = receive(subscriber, 2)
        assert not other.poll(0)
    while decode(frames[0][2]).events == [AllBlocksCleared()]:
        frames.pop(0)
    batch, window = (decode(payload) for _, _, payload in frames)
    assert began <= batch.ts <= time.time() and batch.data_parallel_rank == 0
    one = 2**63 + 1
    assert batch.events == [
        BlockStored(
            [one, one + 1], None, [0, 1, 2, 3], 2, None, "GPU", "lora", [("lora", "s"), ("lora",)], 0, "full_attention"
        ),
        BlockStored([one + 2], one + 1, [0, 1], 2, None, "GPU", None, [None], 0, "full_attention"),
        BlockRemoved([one, one + 1], "GPU", 1),
    ]
    (event,) = window.events
    assert event.extra_keys == [None], "a tenant that sends no salt has none"
    assert (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window, event.block_size) == ("sliding_window", 6, 3)
    again = decode(frames[0][2])
    again.events = [*batch.events]
    assert msgspec.msgpack.encode(again) == frames[0][2], "the very bytes that vLLM would send"
    assert frames[0][0] == b"kv@pod@model" and b"tenant" not in frames[0][2]


def test_sequence_numbers_have_no_gap_and_a_replay_starts_where_it_is_asked_to(tmp_path):
    with publishing(tmp_path, topic="t", buffer_steps=5) as (publisher, clients):
        subscriber = clients.subscriber()
        for number in range(8):
            publisher.publish([stored(number)])
        while len(found := clients.replay(0)) < 5 or found[-1][1][-1] != 7:
            pass
        assert [int.from_bytes(number, "big") for _, number, _ in found] == [3, 4, 5, 6, 7]
        assert [decode(payload).events[0].block_hashes for _, _, payload in found] == [[2**63 + n] for n in range(3, 8)]
        assert {topic for topic, _, _ in found} == {b"t"}
        replayed = publisher.counts()[0]["replayed"]
        assert clients.replay(6) == found[3:] and clients.replay(8) == []
        batches, held = publisher.counts()
        assert batches == {"sent": 8, "lost": 0, "replayed": replayed + 2} and held == {"queue": 0, "replay": 5}
        connected(publisher, subscriber)
        publisher.publish([REMOVED])
        while not isinstance(decode((last := receive(subscriber, 1)[0])[2]).events[0], BlockRemoved):
            pass
        assert clients.replay(int.from_bytes(last[1], "big")) == [last]


def test_a_request_that_is_none_is_not_answered_and_the_next_one_is(tmp_path, caplog):
    with publishing(tmp_path) as (publisher, clients):
        publisher.publish([CLEARED])
        for request in ([b"x"], [b"", b"short"], [b"x", bytes(8)], [b"", bytes(8), b""]):
            asker = clients.asker()
            asker.send_multipart(request)
            assert not asker.poll(50)
        assert len(clients.replay(0)) == 1
    assert "an empty frame and a number of 8 bytes" in caplog.text


def test_a_whole_replay_arrives_at_a_client_that_reads_late(tmp_path):
    with publishing(tmp_path) as (publisher, clients):
        for number in range(3_000):
            publisher.publish([stored(number)])
        while len(found := clients.replay(0)) < 3_000:
            pass
        assert [int.from_bytes(number, "big") for _, number, _ in found] == [*range(3_000)]


@pytest.mark.process
def test_a_subscriber_that_never_reads_loses_batches_and_holds_up_nobody(tmp_path):
    with publishing(tmp_path, hwm=10, buffer_steps=50) as (publisher, clients):
        slow, quick = clients.subscriber(most=1), clients.subscriber()
        first = max(connected(publisher, slow), connected(publisher, quick))
        big, sent = stored(*range(2_000), tokens=16), 200
        for _ in range(sent):
            publisher.publish([big])  # which waits for nobody
        while not (found := clients.replay(first + 1)) or int.from_bytes(found[-1][1], "big") < first + sent:
            time.sleep(0.01)
        publisher.publish([REMOVED])
        while decode(receive(quick, 1)[0][2]).events != [BlockRemoved([2**63 + 1, 2**63 + 2], "GPU", 1)]:
            pass


def test_a_batch_beyond_the_queue_is_dropped_and_the_loss_is_reported(tmp_path):
    with publishing(tmp_path, max_queue_size=3) as (publisher, clients):
        lost = []
        publisher.lost = lambda: lost.append(1)
        big = stored(*range(5_000), tokens=16)
        while not lost:
            publisher.publish([big])
        batches, held = publisher.counts()
        assert batches["lost"] == 1 and held["queue"]
        publisher.lost = list
        while not (found := clients.replay(0)):
            pass
        assert decode(found[0][2]).events


def test_the_consumer_of_the_manual_prints_the_events(tmp_path, capsys):
    (program,) = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    with publishing(tmp_path, topic="kv@host-1@MODEL") as (publisher, clients):
        program = program.replace("tcp://127.0.0.1:5557", clients.endpoint).replace("while True", "for _ in range(2)")
        done = threading.Event()

        def publish():
            while not done.wait(0.01):
                publisher.publish([stored(1)])

        thread = threading.Thread(target=publish)
        thread.start()
        names = {}
        exec(program, names)
        done.set()
        thread.join()
        names["subscriber"].context.destroy(linger=0)
    number, kind, hashes = capsys.readouterr().out.splitlines()[0].split(maxsplit=2)
    assert number.isdigit() and (kind, hashes) == ("BlockStored", f"[{2**63 + 1}]")


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", r"kv_events_config must be JSON such as \{"),
        ("[]", "Expected `object`, got `array`"),
        ('{"enable": true}', r"with the fields enable_kv_cache_events, .*unknown field `enable`"),
        ('{"publisher": "nats"}', r"Invalid enum value 'nats' - at `\$.publisher`"),
        ('{"buffer_steps": 0}', r"`int` >= 1 - at `\$.buffer_steps`"),
        ('{"hwm": true}', r"Expected `int`, got `bool` - at `\$.hwm`"),
        ('{"topic": 7}', r"Expected `str`, got `int` - at `\$.topic`"),
        ('{"endpoint": "127.0.0.1:5557"}', r"kv_events_config.endpoint must be like tcp://127.0.0.1:5557 or ipc://"),
        ('{"endpoint": "tcp://127.0.0.1"}', "kv_events_config.endpoint must"),
        ('{"endpoint": "tcp://*:70000"}', "kv_events_config.endpoint must"),
        ('{"endpoint": "tcp://*:0"}', "kv_events_config.endpoint must"),
        ('{"endpoint": "inproc://events"}', "kv_events_config.endpoint must"),
        ('{"endpoint": ""}', "kv_events_config.endpoint must"),
        ('{"replay_endpoint": "pgm://a:1"}', "kv_events_config.replay_endpoint must be like .*got 'pgm://a:1'"),
        ('{"replay_endpoint": ""}', "kv_events_config.replay_endpoint must"),
        ('{"replay_endpoint": "tcp://127.0.0.1:5557"}', "kv_events_config.replay_endpoint must be another one"),
    ],
)
def test_bad_settings_are_refused_by_name(text, message):
    with pytest.raises(ConfigError, match=message):
        ServerConfig(kv_events_config=text)


def test_nothing_is_published_unless_it_is_asked_for_and_nothing_listens_beyond_this_machine_by_itself():
    assert KvEventsConfig().endpoint == "tcp://127.0.0.1:5557" and KvEventsConfig().replay_endpoint is None
    for text in (None, "{}", '{"enable_kv_cache_events": true, "publisher": "null"}'):
        with kv_events(text, EngineConfig()) as publishers:
            assert not publishers
    here = ["tcp://*:1", "tcp://0.0.0.0:1", "tcp://127.0.0.1:1", "tcp://localhost:1", "tcp://[::1]:1", "ipc:///a"]
    assert all(map(listens, here)) and not any(
        map(listens, ["tcp://10.0.0.1:1", "tcp://router:1", "tcp://[fe80::1]:1"])
    )


def test_each_of_several_engines_has_a_port_of_its_own():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    given = {"enable_kv_cache_events": True, "endpoint": f"tcp://127.0.0.1:{port}"}
    config = KvEventsConfig.parse(json.dumps(given | {"replay_endpoint": "tcp://*:7000"})).of_engine(2)
    assert (config.endpoint, config.replay_endpoint) == (f"tcp://127.0.0.1:{port + 2}", "tcp://*:7002")
    with kv_events(json.dumps(given), EngineConfig(data_parallel_size=2)) as publishers:
        for number, publisher in enumerate(publishers):
            clients = Clients(f"tcp://127.0.0.1:{port + number}", None)
            subscriber = clients.subscriber("")
            connected(publisher, subscriber)
            publisher.publish([stored(number)])
            batches = [decode(receive(subscriber, 1)[0][2])]
            while not isinstance(batches[-1].events[0], BlockStored):
                batches.append(decode(receive(subscriber, 1)[0][2]))
            assert {batch.data_parallel_rank for batch in batches} == {number}
            clients.close()
        outcomes, _ = counts_of(publishers)
        assert outcomes["sent"] == sum(publisher.counts()[0]["sent"] for publisher in publishers) > 2
    for endpoint in ("ipc:///a", "tcp://*:65535"):
        with pytest.raises(
            ConfigError, match=r"kv_events_config\.endpoint of several engines must be tcp://ADDRESS:PORT"
        ):
            KvEventsConfig(endpoint=endpoint).of_engine(1)
    near = {"endpoint": "tcp://127.0.0.1:7001", "replay_endpoint": "tcp://127.0.0.1:7002"}
    text = json.dumps({"enable_kv_cache_events": True, **near})
    with (
        pytest.raises(ConfigError, match=r"replay_endpoint meets the ports of endpoint.*leave 2 ports between"),
        kv_events(text, EngineConfig(data_parallel_size=2)),
    ):
        pass


def test_a_start_names_the_missing_package_and_the_endpoint_it_cannot_use(tmp_path, monkeypatch):
    on = json.dumps({"enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/a"})
    uncached, nowhere = EngineConfig(enable_prefix_caching=False), on.replace("/a", "/no/such/place")
    for text, engine, message in (
        (on, uncached, "without prefix caching"),
        (nowhere, EngineConfig(), r"kv_events_config.endpoint: cannot use ipc://"),
        (on, EngineConfig(), "needs pyzmq: pip install pyzmq"),
    ):
        if "pyzmq" in message:
            monkeypatch.setitem(sys.modules, "zmq", None)
        with pytest.raises(ConfigError, match=message), kv_events(text, engine):
            pass
