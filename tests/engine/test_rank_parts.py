"""Parts of an engine of several ranks that need no process: settings, room for orders, whom a stall names."""

from __future__ import annotations

import os
import socket
from collections import deque
from types import SimpleNamespace

import pytest

from gapless.base import host
from gapless.base.config import EngineConfig
from gapless.base.errors import ConfigError, EngineDeadError
from gapless.base.share import Share
from gapless.comm.shared import BoardLine, Commons
from gapless.device import Caps, CpuDevice
from gapless.engine import messages, ranks, share
from gapless.engine.rank_messages import Captured, RankPlan
from gapless.engine.ranks import FollowingRanks
from gapless.engine.wire import Wire
from gapless.kernels.choose import choose
from gapless.model.config import load_config
from gapless.step.follower import FollowerProgram
from gapless.step.graphs import bucket_key
from gapless.step.keys import SampleKey, StepKey
from gapless.step.memory import MemorySizes, build_executor
from gapless.step.orders import CaptureOrder, Order
from gapless.step.outbox import OutboxShape
from gapless.step.program import RowOptions
from gapless.step.speculation import Speculation
from gapless.testing.checksum import ChecksumModel

SIZES = MemorySizes(4, 64, 16, 20, 4, OutboxShape(4, 16, 3), 200, 3, 3, 100)
STEP = Order(StepKey(bucket_key(4, 0), SampleKey(4, 4, False)), b"")


class PlayedRank:
    """A process that answers what a test has it say."""

    def __init__(self, rank):
        self.rank, self.died, self.killed = rank, None, False
        ours, self.end = socket.socketpair()
        self.wire, (self.stderr, self._log) = Wire(ours), os.pipe()

    def share(self, memory, *pages):
        self.commons = Commons.attach(os.dup(memory), Share(self.rank, 3))

    def say(self, message):
        Wire(self.end).send(messages.encode([message]))

    def send(self, message):
        self.wire.send(messages.encode([message]))

    def kill(self):
        self.killed = True

    def close(self):
        self.commons.close()
        self.end.close()
        self.wire.close()
        for number in (self.stderr, self._log):
            os.close(number)


@pytest.fixture
def processes():
    return [PlayedRank(1), PlayedRank(2)]


@pytest.fixture
def leader(processes):
    made = FollowingRanks(processes)
    yield made
    made.close()


def test_a_follower_has_no_drafter_no_logits_and_runs_loads_and_forwards_alone():
    device = CpuDevice(1)
    try:
        options = RowOptions(speculation=Speculation(2, None, 4))
        executor = build_executor(device, ChecksumModel(), FollowerProgram, choose("torch"), SIZES, options)
    finally:
        device.close()
    program = executor.program
    assert (program.drafter, program.head, program.learner, program.processors) == (None, None, None, ())
    assert executor.buffers.logits.shape == (24, 0)
    key = StepKey(bucket_key(4, 0), SampleKey(4, 4, False))
    assert program.own(key) == (key.forward,)


@pytest.mark.parametrize(
    ("cores", "ranks", "asked", "threads"), [(2, 2, 0, 1), (1, 2, 0, 1), (12, 3, 0, 2), (12, 3, 5, 5), (2, 1, 0, 2)]
)
def test_a_rank_takes_its_share_of_the_cores(monkeypatch, cores, ranks, asked, threads):
    opened = []
    monkeypatch.setattr(host, "usable_cores", lambda: cores)
    monkeypatch.setattr(share, "open_device", lambda *asked: opened.append(asked))
    config = EngineConfig(tensor_parallel_size=ranks, threads=asked, device_ids=",".join(map(str, range(3, 3 + ranks))))
    share.open_rank_device(config, load_config(config), Share(ranks - 1, ranks))
    assert opened == [("auto", threads, 2 + ranks)]


def test_ranks_that_share_a_gpu_are_given_its_memory_and_ranks_on_one_core_are_warned_of(caplog, monkeypatch):
    gpu = SimpleNamespace(caps=Caps(own_memory=True))
    alone, shared = (EngineConfig(tensor_parallel_size=2, device_ids=ids) for ids in ("0,1", "0,0"))
    share.check_devices(alone, gpu)
    with pytest.raises(ConfigError, match=r"^device_ids: .*: give --kv-cache-memory-bytes"):
        share.check_devices(shared, gpu)
    monkeypatch.setattr(host, "usable_cores", lambda: 2)
    share.check_devices(shared, SimpleNamespace(caps=Caps()))
    assert not caplog.records
    monkeypatch.setattr(host, "usable_cores", lambda: 1)
    share.check_devices(shared, SimpleNamespace(caps=Caps()))
    assert "fewer cores (1) than ranks" in caplog.text
    share.check_devices(EngineConfig(tensor_parallel_size=2, device_ids="0,0", num_gpu_blocks_override=9), gpu)
    assert "MPS" in caplog.text


def test_orders_are_declined_while_the_slowest_rank_leaves_no_room(leader, processes):
    readers, sent = [process.commons for process in processes], 0
    leader.build(RankPlan(SIZES, 0, 0, (0, 0)))
    while leader.room(1):
        leader.send(STEP)
        sent += 1
        readers[0].ring.take()
    assert leader.room(4) == 0 and leader.lags() == [0, sent, sent]
    while readers[1].ring.take() is not None:
        pass
    assert leader.room(4) == 4


def test_a_graph_counts_as_captured_where_every_rank_has_it(leader, processes):
    keys = (bucket_key(4, 0), SampleKey(4, 4, False), bucket_key(2, 0), bucket_key(1, 0))
    order = CaptureOrder(keys, ())
    leader.send(order)
    for process, kept in zip(processes, ((True, False, True), (True, True, False)), strict=True):
        process.say(Captured(kept))
    assert leader.captured(order) == [True, True, False, False]
    assert leader.captured(CaptureOrder(keys[1:2], ())) == [True], "followers sample nothing"


def test_orders_that_no_ring_holds_are_refused_at_the_start(leader):
    with pytest.raises(ConfigError, match=r"^max_model_len: .* would take 2,4\d\d,\d\d\d bytes of 2,097,152: lower"):
        leader.build(RankPlan(SIZES._replace(fill=600_000), 0, 0, (0, 0)))


@pytest.mark.parametrize(
    ("waiting", "calls", "named"),
    [((5, 0, 5), (9, 8, 9), 1), ((0, 5, 5), (8, 9, 9), 0), ((5, 5, 5), (9, 9, 8), 2), ((0, 0, 0), (9, 8, 9), 1)],
)
def test_a_stall_names_the_rank_that_the_others_wait_for(waiting, calls, named):
    lines = [BoardLine(1, 7, 7, 6, 0, 0, *line) for line in zip(waiting, calls, strict=True)]
    assert ranks.rank_behind(lines) == named


def test_the_first_failure_counts_and_ends_all_ranks(leader, processes):
    device, woken = SimpleNamespace(errors=deque()), []
    device.fail = device.errors.append
    leader.fails(device)
    leader.wakes(lambda: woken.append(1))
    leader.fail(EngineDeadError("rank 1 is gone"))
    leader.fail(EngineDeadError("rank 2 is gone"))
    assert [str(error) for error in device.errors] == ["rank 1 is gone"] and woken == [1]
    assert all(process.killed and process.commons.stopped for process in processes)
    with pytest.raises(EngineDeadError, match=r"^rank 1 is gone$"):
        leader.captured(CaptureOrder((bucket_key(1, 0),), ()))
