"""kill -9 under load: the short form of `make kills`, and what its checks notice. Pairs: tests/server/test_pair.py."""

from __future__ import annotations

import mmap
import os
import random
import threading

import pytest
from kills.clients import Clients, Outage, Question, Reply, fault_of, questions
from kills.holdings import PINNED, SLACK, Holdings, Ward, busy_series
from kills.ranks import RANKS, Ranked, kill_rank
from kills.stores import DURABLE, Tiered, keys_of, kill_store, start
from kills.streams import BothSides, OneDevice, RankStreams, of_streams
from sharpest import sharpest
from tier_rig import setup_of, stored
from tier_servers import redis_server

PID = os.getpid()
QUESTION = Question("2 + 2 =", 2, "4.", "stop")


@pytest.mark.process
def test_redis_killed_under_load_costs_no_answer_and_no_page_that_it_acknowledged(tmp_path):
    store, rng, ward = redis_server(tmp_path, *DURABLE), random.Random(1), Ward()
    start(store)
    server = Tiered(store)
    clients = Clients(server.base, questions(6), salts=6, count=4)
    try:
        for turn in range(3):
            with clients.running():
                kill_store(server, clients, rng) if turn else clients.wait(25)
            server.rest()
            ward.note(server.processes())
        assert not clients.faults() and not ward.faults() and not clients.failed
    finally:
        server.close()
        store.kill()


@pytest.mark.process
def test_a_rank_killed_under_load_is_named_and_no_answer_is_wrong():
    server, rng, ward = Ranked(), random.Random(1), Ward()
    clients, said = Clients(server.base, questions(6), salts=6, count=4), {}
    try:
        for rank in RANKS:
            with clients.running():
                _, said[rank] = kill_rank(server, clients, rank, rng)
            server.rest()
            ward.note(server.processes())
        assert not clients.faults() and not ward.faults()
    finally:
        server.close()
    assert "is being restarted: rank 1 was killed by SIGKILL" in said["rank 1"]
    assert "is being restarted: the engine process was killed by SIGKILL" in said["rank 0"]


@pytest.mark.process
@pytest.mark.parametrize(
    ("server", "count"), sharpest([(OneDevice, 60), (RankStreams, 40), (BothSides, 40)], mark="seeds")
)
def test_engines_killed_under_open_streams_cost_none_of_them(server, count):
    found = of_streams("engine", server(), 2, questions(6, length=20, least=16), count, 1)
    assert not found.faults and found.resumed["lost"] == 0
    assert found.resumed["finished"] > count / 2


@pytest.mark.net
@pytest.mark.parametrize(("options", "lost"), [(DURABLE, 0), ((), 3)])
def test_pages_that_a_store_loses_when_it_is_killed_are_noticed(options, lost, tmp_path):
    store, setup = redis_server(tmp_path, *options), setup_of("")
    try:
        tier = store.start(setup_of(store.url))
        stored(tier, setup, 0, 1, 2)
        tier.close()
        kept = keys_of(store)
        store.kill()
        start(store)
        assert len(kept) == 3 and len(kept - keys_of(store)) == lost
    finally:
        store.kill()


@pytest.mark.parametrize(
    ("reply", "fault"),
    [
        (Reply(QUESTION, 1, 2, "4.", "stop", ""), ""),
        (Reply(QUESTION, 1, 2, "5.", "stop", ""), "an answer is '5.'"),
        (Reply(QUESTION, 1, 2, "4", "stop", ""), "an answer is '4'"),
        (Reply(QUESTION, 1, 2, "4.", "length", ""), "an answer is '4.', length"),
        (Reply(QUESTION, 1, 6, "4", None, "broken: a stream without [DONE]"), ""),
        (Reply(QUESTION, 6, 7, "", None, "503 loading"), ""),
        (Reply(QUESTION, 1, 6, "5", None, "broken: a stream without [DONE]"), "an answer began with '5'"),
        (Reply(QUESTION, 1, 2, "", None, "503 loading"), "a request failed without need"),
        (Reply(QUESTION, 6, 7, "", None, "500 internal"), "a request failed with 500"),
    ],
)
def test_wrong_tokens_and_failures_without_need_are_noticed(reply, fault):
    found = fault_of(reply, [Outage(5, 8)])
    assert found.startswith(fault) and bool(found) == bool(fault)


@pytest.mark.parametrize("kind", ["descriptors", "threads", "shared mappings"])
def test_a_thing_that_a_process_keeps_is_noticed(kind, monkeypatch):
    monkeypatch.setattr("kills.holdings.REST_SECONDS", 0.2)
    ward, done = Ward(), threading.Event()
    ward.note({"this": PID})
    ward.note({"this": PID})
    thread = threading.Thread(target=done.wait)
    kept = os.open("/dev/null", os.O_RDONLY) if kind == "descriptors" else -1
    shared = mmap.mmap(-1, 4096) if kind == "shared mappings" else None
    if kind == "threads":
        thread.start()
    try:
        with pytest.raises(AssertionError, match=f"this keeps more, of its: .*{kind}"):
            ward.note({"this": PID})
    finally:
        done.set()
        if kind == "threads":
            thread.join()
        if shared is not None:
            shared.close()
        if kept >= 0:
            os.close(kept)


def test_memory_that_grows_and_pages_that_stay_pinned_are_noticed(monkeypatch):
    sizes = iter([1, 3, 2, SLACK + 4])
    monkeypatch.setattr("kills.holdings.holdings", lambda pid: Holdings(1, 1, 1, next(sizes)))
    monkeypatch.setattr("kills.holdings.settled", lambda *_: None)
    ward = Ward()
    for _ in range(4):
        ward.note({"this": PID})
    assert ward.faults() == ["this grew by 16 MiB"]
    page = 'gapless:kv_pages{engine="0",state="%s"} %s\n'
    assert busy_series(page % ("free", "7.0") + page % ("owned", "0.0")) == []
    for state in ("owned", "fenced"):
        assert busy_series(page % (state, "1.0"))
    assert busy_series('gapless:kv_lower_tier_moving{engine="0",state="loading",tier="redis"} 2.0')
    assert busy_series('gapless:kv_tier_moving{direction="read",engine="0"} 1.0')
    pinned = 'gapless:kv_tier_pinned{engine="0"} 1.0'
    assert busy_series(pinned, PINNED) and not busy_series(pinned), "what peers may take is kept for a minute"
