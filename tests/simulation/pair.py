"""A pair of simulated engines: one computes prompts and gives their pages, the other goes on with them."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from simulation.scenario import Scenario
from simulation.wire import End, Net
from simulation.world import World

from gapless.kernels import plain
from gapless.kernels.seam import Kernels
from gapless.loop.loop import Loop
from gapless.loop.spec import HostSizes
from gapless.offload.below import LOOKUP_NS
from gapless.offload.tiers.seam import key_of
from gapless.offload.transfers import Transfers

Prepare = Callable[[Loop], None]


class Member(World):
    """One engine of a pair, at its own pace."""

    def __init__(
        self, name: str, scenario: Scenario, net: Net, roles: tuple[bool, bool], prepare: Prepare, kernels: Kernels
    ) -> None:
        """`roles`: whether it gives, and whether it takes."""
        self._member, self._net, self._roles = name, net, roles
        super().__init__(scenario, prepare, kernels)

    def attach_lower(self) -> None:
        self.line, self.rotten = None, self._net.rotten
        transfers = self.loop.parts.transfers
        assert transfers is not None
        end = End(self._net, self.loop, *self._roles, self._check_given)
        line = self._net.open(self._member, end)
        transfers.host.attach([line], transfers.slot, min(LOOKUP_NS, self.scenario.late_ns))

    def host_sizes(self) -> HostSizes | None:
        sizes = super().host_sizes()
        return sizes and sizes._replace(given=int(self._roles[0]))

    def _check_given(self, key: bytes, data: memoryview) -> None:
        """What is put on the shelf is what its key means."""
        assert self.contents is not None
        if key[-4:] == bytes(4) and key not in self.rotten and self.contents.knows(key[:-4]):
            shape = self.loop.launcher.executor.program.cache.data.shape[1:]
            page = torch.frombuffer(bytearray(data), dtype=torch.int64)[: shape.numel()]
            self.contents.check(key[:-4], page.view(shape), "a page on the shelf")

    def flip(self) -> None:
        super().flip()
        assert self.loop.parts.transfers is not None
        for group in self.loop.parts.transfers.host.groups:
            self.rotten |= {
                key_of(group.number, digest) for digest, copy in group.copies.items() if copy in self.flipped
            }

    def check_rest(self) -> None:
        assert isinstance(self.loop.parts.transfers, Transfers)
        while self.loop.parts.transfers.host.below.jobs:
            self.loop.parts.transfers.poll()
        super().check_rest()


class PairWorld:
    """Runs a scenario of two engines; an AssertionError is a finding."""

    def __init__(
        self, scenario: Scenario, prepare: Prepare = lambda loop: None, kernels: Kernels = plain.KERNELS
    ) -> None:
        assert scenario.pair is not None
        self.scenario = scenario
        self.net = Net(scenario.seed, scenario.pair)
        self._rng = random.Random(scenario.seed + 1)
        self._pace = self._rng.choice((0.2, 0.5, 0.5, 0.8))
        gives = scenario._replace(
            jobs=scenario.given, faults=scenario.given_faults, host=scenario.given_host, seed=scenario.seed + 500_000
        )
        self.gives = Member("gives", gives, self.net, (True, scenario.mutual), prepare, kernels)
        self.takes = Member("takes", scenario, self.net, (scenario.mutual, True), prepare, kernels)

    def run(self) -> None:
        """Everything that the scenario holds, in turns that the seed decides; then all must come to rest."""
        while busy := [side for side in (self.gives, self.takes) if side.busy]:
            first = self._rng.random() < self._pace
            (busy[0] if first else busy[-1]).turn()
            self.net.work()
            self.net.check()
        self.net.heal()
        for side in (self.gives, self.takes):
            side.finish()
            self.net.check()
        self.net.check_rest()
