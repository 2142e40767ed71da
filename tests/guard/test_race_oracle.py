"""Random programs of launches, fences, waits and hand-overs: what races is what a plain reachability search says."""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.device.seam import STREAMS
from gapless.guard.race import no_race
from gapless.testing.sim import SimDevice

CELLS = 4
THREADS = 2


class Use(NamedTuple):
    """`write` to, or a read of, cells low..high of the buffer."""

    by_rows: bool
    write: bool
    low: int
    high: int


cells = st.tuples(st.integers(0, CELLS - 1), st.integers(1, 3)).map(lambda c: (c[0], min(CELLS, c[0] + c[1])))
uses = st.tuples(st.booleans(), st.booleans(), cells).map(lambda u: Use(u[0], u[1], *u[2]))
threads = st.integers(0, THREADS - 1)
streams = st.sampled_from(STREAMS[:2])
back = st.integers(1, 4)
# Fences are counted from the newest, so that most of them matter.
operations = st.one_of(
    st.tuples(st.just("launch"), threads, streams, st.lists(uses, min_size=1, max_size=2)),
    st.tuples(st.just("host"), threads, uses),
    st.tuples(st.just("record"), threads, streams),
    st.tuples(st.just("after"), threads, streams, back),
    st.tuples(st.just("wait"), threads, back),
    st.tuples(st.just("poll"), threads, back),
    st.tuples(st.just("give"), threads),
    st.tuples(st.just("take"), threads),
)


class Graph:
    """Happens-before by definition: nodes in order of creation, each with the set of those before it."""

    def __init__(self) -> None:
        self.before: list[set[int]] = []
        self.deeds: list[tuple[int, str, Use]] = []
        self.last: dict[str, int] = {}
        """The newest node of each thread and stream."""

    def node(self, agents: list[str], *after: int) -> int:
        """A node that follows the newest of these agents, and becomes it for the last of them."""
        known = [*after, *(self.last[agent] for agent in agents if agent in self.last)]
        self.before.append(set(known).union(*(self.before[node] for node in known)))
        self.last[agents[-1]] = len(self.before) - 1
        return self.last[agents[-1]]

    def races(self) -> set[tuple[bool, frozenset[str]]]:
        """(buffer, the two agents) of every unordered conflict."""
        return {
            (a.by_rows, frozenset((one, other)))
            for i, one, a in self.deeds
            for j, other, b in self.deeds
            if i < j and i not in self.before[j] and a.by_rows == b.by_rows and (a.write or b.write)
            and a.low < b.high and b.low < a.high
        }  # fmt: skip


class Run:
    """Plays operations on a simulated device under the checker, and draws the graph of them."""

    def __init__(self, checker, seed: int) -> None:
        self.checker = checker
        self.device = SimDevice(seed)
        self.ranges = torch.zeros(CELLS)
        self.rows = torch.zeros(CELLS, 2)
        checker.register("ranges", self.ranges)
        checker.register("rows", self.rows, "rows")
        agents = checker.agents
        self.threads = [agents.here(), *(agents.add(f"T{i}", False) for i in range(1, THREADS))]
        self.graph = Graph()
        self.fences: list[tuple[object, int]] = []
        self.given: list[int] = []
        self.found: set[tuple[bool, frozenset[str]]] = set()
        checker.note_race = self.note
        self.key = torch.nn.Identity()  # any object

    def note(self, actor, buffer, kind, note, other) -> bool:
        agents = self.checker.agents
        self.found.add((buffer.name == "rows", frozenset((agents[actor.index].name, agents[other.agent].name))))
        return False

    def play(self, what: str, thread: int, *rest) -> None:
        me = self.threads[thread]
        with self.checker.agents.acting_as(me):
            getattr(self, what)(me.name, *rest)

    def use(self, use: Use) -> None:
        if use.by_rows:
            index = torch.arange(use.low, use.high)
            _ = self.rows.index_fill_(0, index, 1) if use.write else self.rows.index_select(0, index)
        else:
            view = self.ranges[use.low : use.high]
            _ = view.fill_(1) if use.write else view.sum()

    def host(self, me: str, use: Use) -> None:
        self.graph.deeds.append((self.graph.node([me]), me, use))
        self.use(use)

    def launch(self, me: str, stream: str, all_uses: list[Use]) -> None:
        self.graph.node([me])
        node = self.graph.node([me, stream])
        self.graph.deeds += [(node, stream, use) for use in all_uses]
        getattr(self.device, stream).launch(lambda: [self.use(use) for use in all_uses] and None)
        self.graph.node([me])

    def record(self, me: str, stream: str) -> None:
        self.graph.node([me])
        self.fences.append((getattr(self.device, stream).record(), self.graph.node([me, stream])))
        self.graph.node([me])

    def after(self, me: str, stream: str, index: int) -> None:
        if self.fences:
            fence, node = self.fences[-min(index, len(self.fences))]
            self.graph.node([me])
            self.graph.node([me, stream], node)
            getattr(self.device, stream).after(fence)
            self.graph.node([me])

    def wait(self, me: str, index: int) -> None:
        if self.fences:
            fence, node = self.fences[-min(index, len(self.fences))]
            fence.wait()
            self.graph.node([me], node)

    def poll(self, me: str, index: int) -> None:
        if self.fences:
            fence, node = self.fences[-min(index, len(self.fences))]
            if fence.done():
                self.graph.node([me], node)

    def give(self, me: str) -> None:
        self.given.append(self.graph.node([me]))
        self.checker.happens_before(self.key)

    def take(self, me: str) -> None:
        self.graph.node([me], *self.given)
        self.checker.happens_after(self.key)


@settings(max_examples=120, deadline=None)
@given(st.lists(operations, min_size=25, max_size=45), st.integers(0, 1000))
def test_accesses_race_if_no_path_of_the_graph_orders_them(program, seed):
    with no_race("record") as checker:
        run = Run(checker, seed)
        for operation in program:
            run.play(*operation)
        run.device.drain()
    assert run.found == run.graph.races()


def test_the_oracle_knows_a_race_and_an_order():
    use = Use(False, True, 0, 2)
    with no_race("record") as checker:
        run = Run(checker, 0)
        run.play("launch", 0, "compute", [use])
        run.play("record", 0, "compute")
        run.play("after", 0, "token_out", 0)
        run.play("launch", 0, "token_out", [use])
        assert run.graph.races() == set()
        run.play("host", 0, use)
        run.device.drain()
    assert (
        run.found
        == run.graph.races()
        == {
            (False, frozenset(("MainThread", "compute"))),
            (False, frozenset(("MainThread", "token_out"))),
        }
    )
