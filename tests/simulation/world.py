"""One simulated run: the real loop on SimDevice, scripted clients, injected faults, and checks after every turn."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Pools
from functools import partial

import numpy as np
import pytest
import torch
from adapted_checksum import NUMBERS, Tables, WithAdapters, contents_of, digest_of, shift_of
from grouped_model import WINDOW, GroupedModel, continue_grouped
from harness import LookingModel, captures_at_once, look_behind_steps
from oracle_drafter import Oracle
from page_contents import Contents
from scripted_drafter import Scripted
from simulation.audits import TierAudit
from simulation.lower import Kept, LateLine
from simulation.programs import PROGRAMS
from simulation.scenario import CHANGES, NAN_TOKEN, VOCAB, Fault, Job, Scenario
from simulation.tier import Tier

from gapless.base.errors import EngineError, QueueFullError, RequestError
from gapless.base.records import Flag, Int32s, StepTokens
from gapless.comm.alone import ONE_RANK
from gapless.kernels import plain
from gapless.kernels.pages import weights
from gapless.kernels.seam import Kernels
from gapless.loop.loop import NEWS_SECONDS, Loop
from gapless.loop.spec import HostSizes
from gapless.memory.pages import PagePool
from gapless.memory.prefix import PrefixHasher
from gapless.model.drafting.seam import Drafter
from gapless.model.seam import KVCache, StepInputs
from gapless.offload.below import LOOKUP_NS
from gapless.offload.copies import PageCopy
from gapless.offload.tiers.seam import key_of
from gapless.offload.transfers import Transfers
from gapless.step.adapters import Adapters
from gapless.step.speculation import Speculation
from gapless.testing.checksum import PRIME, continue_prompt, owners, pages_read
from gapless.testing.loops import loop_of
from gapless.testing.scenario import LeaseAudit, check_at_rest, check_pages
from gapless.testing.sim import SimDevice
from gapless.testing.world import RankDiedError
from gapless.testing.world import World as RankWorld

MOST_TURNS = 1_000
"""The longest of 600 sound seeds takes 234."""
CLOCK_JUMP_NS = 3_600 * 10**9
LAST_KEY = 1_000
"""The request that must succeed when all else is over."""


def checksum_of(page: Int32s) -> int:
    """Return the checksum of a page in host memory."""
    words = torch.from_numpy(page.astype(np.int64))
    return int((words * weights(len(words), words.device)).sum())


class InjectedError(Exception):
    """Raised by a forward because the scenario says so."""


class SimModel(LookingModel):
    """Also looks whether the pages that it touched are held by anybody, and can fail."""

    def __init__(self, max_model_len: int, may_fail: bool) -> None:
        """`may_fail`: whether some prompt holds the token that makes logits NaN, or some KV goes bad."""
        super().__init__(VOCAB, max_model_len)
        self._may_fail = may_fail
        self.weights = torch.zeros((), dtype=torch.int64)
        """Added to every KV entry"""
        self.spoil_next = False
        """Whether the KV of the last token of the next step goes bad."""
        self._spoils = torch.zeros((), dtype=torch.bool)
        self.pool: PagePool | None = None
        """Looked at when there is one."""
        self.raise_next = False
        self._seen: list[tuple[StepInputs, tuple[int, ...], KVCache]] = []
        """What was run since the last look: a step may run its model several times."""

    def note(self, inputs: list[torch.Tensor], columns: int, plan: list[int]) -> None:
        if self.raise_next:
            raise InjectedError("the scenario says so")
        super().note(inputs, columns, plan)
        self._spoils.fill_(self.spoil_next)
        self.spoil_next = False
        if self.pool is not None:
            self._seen.append(self.given)

    def look_now(self) -> None:
        seen, self._seen = self._seen, []
        for given in seen:
            self.look(*given)

    def entries(self, inputs: StepInputs) -> torch.Tensor:
        return (super().entries(inputs) + self.weights) % PRIME

    def forward(self, inputs: StepInputs, plan: tuple[int, ...], cache: KVCache) -> torch.Tensor:
        fold = super().forward(inputs, plan, cache)
        if not self._may_fail:
            return fold
        return torch.where(self._poisoned(inputs, plan, cache), -1, fold)

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().scores(hidden)
        return logits.masked_fill_(hidden < 0, torch.nan) if self._may_fail else logits

    def look(self, inputs: StepInputs, plan: tuple[int, ...], cache: KVCache) -> None:
        """The pages that a step touched have an owner: the host has not moved since it began."""
        assert self.pool is not None
        slots, tables, lengths = inputs.slots.tolist(), inputs.pages.tolist(), inputs.kv_lens.tolist()
        first, page_size = 0, cache.page_size
        for row, count in enumerate(plan):
            written = {slot // page_size for slot in slots[first : first + count]}
            first += count
            if written == {0}:
                continue  # inert
            for page in {*written, *tables[row][: -(-lengths[row] // page_size)]}:
                held = self.pool.pins[page] + self.pool.fences[page]
                assert held > 0, f"page {page} is touched and has no owner"

    def _poisoned(self, inputs: StepInputs, plan: tuple[int, ...], cache: KVCache) -> torch.Tensor:
        """[T, 1]: whether a token reads bad KV, its own included. Its own is bad then too: the second half says so."""
        marks = cache.data[:, 0, 1, :, 0, 0]
        size, device = cache.page_size, inputs.ids.device
        place = inputs.slots // size, inputs.slots % size
        real = (inputs.slots >= size).long()
        last = (real == 1) & (real.cumsum(0) == real.sum())
        marks[place] = ((inputs.ids == NAN_TOKEN) | (last & self._spoils)).long()
        readable = marks[pages_read(inputs, size)].flatten(1)[owners(plan, device)]
        visible = torch.arange(readable.shape[1], device=device) <= inputs.positions[:, None]
        bad = (readable * visible).any(1, keepdim=True)
        marks[place] = bad[:, 0].long()
        return bad


class GroupedSimModel(SimModel, GroupedModel):
    """The same over two page groups."""

    pools: Pools[PagePool] = ()

    def look(self, inputs: StepInputs, plan: tuple[int, ...], cache: KVCache) -> None:
        super().look(inputs, plan, cache)
        second, size, first = inputs.group(1), cache.page_size, 0
        positions, slots, tables = inputs.positions.tolist(), second.slots.tolist(), second.pages.tolist()
        for row, count in enumerate(plan):
            begin, end = max(0, positions[first] - WINDOW + 1), positions[first] + count
            written = {slot // size for slot in slots[first : first + count]}
            first += count
            if written == {0}:
                continue  # inert
            for page in {*written, *tables[row][begin // size : -(-end // size)]}:
                held = self.pools[1].pins[page] + self.pools[1].fences[page]
                assert page and held > 0, f"page {page} of the window is touched and has no owner"


class AdaptedSimModel(SimModel, WithAdapters):
    """A simulator's model whose rows may have adapters."""


class Client:
    """What one job has seen so far. `direct` says which tokens follow a prompt."""

    def __init__(self, job: Job, direct: Callable[..., list[int]]) -> None:
        self.job = job
        self._direct = direct
        self.tokens: list[int] = []
        self.scored = 0
        """Prompt tokens that have got their log-probability."""
        self.scored_new = 0
        """The same of sampled tokens."""
        self.admitted = 0
        """The turn in which it got its row, the last time."""
        self.end: str | None = None
        self.expected, self.expected_end = _undisturbed(job, direct)

    def has_adapter(self, shift: int) -> None:
        """Expect tokens of the adapter that has the name when the job arrives, or of the weights that the model has
        then; these add `shift` to all entries."""
        self._direct = partial(self._direct, shift=shift)
        self.expected, self.expected_end = _undisturbed(self.job, self._direct)

    def on_token(self, token: int, flag: int) -> None:
        assert self.end is None, f"request {self.job.key} gets a token after its end ({self.end})"
        if flag != Flag.ERROR:
            self.tokens.append(token)
        assert self.tokens == self.expected[: len(self.tokens)], (
            f"request {self.job.key} got {self.tokens}, expected {self.expected}"
        )
        if flag != Flag.LIVE:
            self.finish(Flag(flag).name)

    def on_logprob(self, position: int, best: list[int]) -> None:
        """One scored token; `best` is the most likely one, if any was asked for."""
        assert self.end is None, f"request {self.job.key} gets a log-probability after its end ({self.end})"
        known = [*self.job.prompt, *self.expected]
        if position < len(self.job.prompt):
            self.scored += 1
            expected = self.scored
        else:
            self.scored_new += 1
            expected = len(self.job.prompt) + self.scored_new - 1
        assert position == expected, f"request {self.job.key}: position {position} is scored in place of {expected}"
        if best:
            direct = self._direct(known[:position], 1, VOCAB)
            assert best[:1] == direct, f"request {self.job.key}: {best[0]} is the most likely at {position}"

    def finish(self, end: str) -> None:
        assert self.end is None, f"request {self.job.key} ends twice: {self.end}, {end}"
        self.end = end
        assert end != "failed" or self.expected_end == end, f"request {self.job.key} fails"
        if end in Flag.__members__:
            assert (end, self.tokens) == (self.expected_end, self.expected), f"request {self.job.key}: {end} too soon"
            wanted = 0 if self.job.asks[1] is None else len(self.job.prompt) - 1
            assert self.scored == wanted, f"request {self.job.key}: {self.scored} of {wanted} prompt tokens are scored"
            wanted = 0 if self.job.asks[0] is None else len(self.tokens)
            assert self.scored_new == wanted, f"request {self.job.key}: {self.scored_new} of {wanted} tokens are scored"


class World:
    """Runs a scenario; an AssertionError is a finding. `prepare` gets the loop of every engine that is started."""

    def __init__(
        self, scenario: Scenario, prepare: Callable[[Loop], None] = lambda loop: None, kernels: Kernels = plain.KERNELS
    ) -> None:
        self.scenario = scenario
        self._prepare = prepare
        self._kernels = kernels
        self._direct = continue_grouped if scenario.grouped else continue_prompt
        self.clients = {job.key: Client(job, self._direct) for job in scenario.jobs}
        self.kept: dict[bytes, torch.Tensor] = {}
        """Pages in the second tier, which outlives engines."""
        self.below: Kept = {}
        """Pages in the tier below the host tier, which does so too"""
        self.rotten: set[bytes] = set()
        """Keys of pages there that have changed"""
        self.fetched = self.disproved = 0
        self.stored = self.loaded = 0
        self.followed = self.declined = self.deaths = 0
        self.engines = 0
        self.preemptions = 0
        self.chained = 0
        self.brought = 0
        """Loads of adapters into slots."""
        self.held = 0
        self.accepted = 0
        """Rows that steps held for want of a mask."""
        self.rung = 0
        """Turns with work and no step, which waited until the bell was rung."""
        self.turns = 0
        self.hosted = 0
        """Pages that came back from the host tier."""
        self.refused = 0
        """Pages that came back from there and were not what had been stored."""
        self.spoiled = 0
        """The turn in which the first request failed for bad KV; 0: none did."""
        self.renewed = 0
        """How often the model has got other weights"""
        self._renews = False
        """Whether it is to get some, when all that runs has ended"""
        self._faults = scenario.faults
        self._coming = sorted(scenario.jobs, key=lambda job: (job.arrives, job.key))
        self._start_engine()

    def run(self) -> None:
        """Everything that the scenario holds; then all must come to rest, and one more request must succeed."""
        while self.busy:
            self.turn()
        self.finish()

    @property
    def busy(self) -> bool:
        return bool(self._coming or self._open() or self.loop.has_work())

    def finish(self) -> None:
        """All is at rest, and one more request succeeds."""
        self.check_rest()
        if self.ranks:
            self.ranks.faults = self.ranks.faults._replace(dies=None)
            if self.ranks.stopped:
                self._restart()
        self._faults, self.model.raise_next, self.model.spoil_next = (), False, False  # healed
        last = Job(LAST_KEY, self.turns, (1, 2, 3), min(8, self.scenario.sizes.max_len), (), 0, "", None)
        client = self.clients[last.key] = Client(last, self._direct)
        if self._shift:
            client.has_adapter(self._shift)
        if self.contents is not None:
            self.contents.know([([*last.prompt, *client.expected], last.salt)], shift=self._shift)
        self._coming = [last]
        while self._coming or client.end is None or self.loop.has_work():
            self.turn()
        assert client.end == client.expected_end, f"after all is over, a new request ends with {client.end}"
        self.check_rest()
        self._stop_engine()

    def turn(self) -> None:
        assert self.turns < MOST_TURNS, f"requests {[c.job.key for c in self._open()]} do not end"
        for fault in self._faults:
            if fault.turn == self.turns:
                self._break(fault)
        if self._renews and not self._open() and not self.loop.in_flight:
            self._renew()
        while self._coming and self._coming[0].arrives <= self.turns and not self._renews:
            self._arrive(self._coming.pop(0))
        leaving = self.turns
        self.turns += 1
        began, steps = self.device.host_now, self.loop.counters.steps
        try:
            for client in self._open():  # an abort too may find that the device has failed
                if client.job.leaves is not None and client.job.leaves <= leaving:
                    self.loop.abort(client.job.key)
                    client.finish("left")
            turn = self.loop.turn()
            for key, _ in turn.started:
                self.clients[key].admitted = self.turns
            for item in turn.tokens:
                self._deliver(item)
            for key, _ in turn.failed:
                self.clients[key].finish("failed")
            if self.loop.planner.has_work() and not self.loop.in_flight and self.loop.counters.steps == steps:
                self.rung += self.device.host_now < began + NEWS_SECONDS * 10**9
            if self.tier is not None:
                self.tier.turn()
        except EngineError as error:
            dies = isinstance(error.__cause__, RankDiedError) and self.ranks is not None and self.ranks.faults.dies
            if not dies and not isinstance(error.__cause__, InjectedError):
                raise
            self._restart()
            return
        self._check_accounting()

    def _arrive(self, job: Job) -> None:
        number = self.numbers.get(job.adapter, 0)
        if job.adapter and not number:
            with pytest.raises(RequestError, match="no adapter"):
                self.loop.submit(job.request())
            return self.clients[job.key].finish("refused")
        if number:
            self._knows_adapter(self.clients[job.key], number)
        try:
            self.loop.submit(job.request())
        except QueueFullError:
            assert len(self.loop.planner.waiting) >= self.scenario.sizes.queue  # those preempted come on top
            self.clients[job.key].finish("refused")

    def _knows_adapter(self, client: Client, number: int) -> None:
        client.has_adapter(shift_of(number))
        if self.contents is not None:
            known = [*client.job.prompt, *client.expected], client.job.salt
            self.contents.know([known], digest_of(number), shift_of(number))

    def _deliver(self, settled: StepTokens) -> None:
        if settled.logprobs is not None:
            scored = settled.logprobs
            for key, position, top in zip(
                *(c.tolist() for c in (scored.keys, scored.positions, scored.top_ids)), strict=True
            ):
                self.clients[key].on_logprob(position, top[:1])
        for key, token, flag in settled.entries():
            if flag == Flag.ERROR and self.clients[key].expected_end != Flag.ERROR.name:
                self._spoiled(self.clients[key])
            self.clients[key].on_token(token, flag)

    def _spoiled(self, client: Client) -> None:
        """A request fails that reads bad KV: it shares no page with one whose failure was known before."""
        assert any(fault.kind == "spoil" for fault in self.scenario.faults), (
            f"request {client.job.key} fails for its KV"
        )
        self.spoiled = self.spoiled or self.turns
        assert client.admitted <= self.spoiled, f"request {client.job.key} was given KV in doubt"
        client.expected, client.expected_end = client.tokens.copy(), Flag.ERROR.name

    def _open(self) -> list[Client]:
        """Clients whose request the engine has."""
        coming = {job.key for job in self._coming}
        return [client for key, client in self.clients.items() if client.end is None and key not in coming]

    # Faults.

    def _break(self, fault: Fault) -> None:
        if fault.kind == "raise":
            self.model.raise_next = True
        elif fault.kind == "spoil":
            self.model.spoil_next = True
        elif fault.kind == "restart":
            self._restart()
        elif fault.kind == "renew":
            self._renews = True
        elif fault.kind == "flip":
            self.flip()
        elif fault.kind == "flush":
            self._flush()
        elif fault.kind == "rot":
            self.rotten |= self.line.rot() if self.line is not None else set()
        elif fault.kind in CHANGES:
            self._change_adapters(fault.kind)
        else:
            self.device.host_now += CLOCK_JUMP_NS

    def flip(self) -> None:
        """Change a bit of every copy that can be loaded, including those that a peer has lent. On odd turns, also make
        the next load read a page that was bad when stored, and put it in doubt during the load."""
        if self.loop.parts.transfers is None:
            return
        for group in self.loop.parts.transfers.host.groups:
            for copy in group.copies.values():
                if copy.checksum is not None:
                    self._flip(copy)
        assert self.tiers is not None
        self.tiers.spoils = self._was_bad if self.turns % 2 else None

    def _flip(self, copy: PageCopy) -> Int32s:
        """Change a bit of a copy, unseen by those who look for races; return the copy."""
        transfers, group = self.loop.parts.transfers, copy.group.number
        assert transfers is not None
        lent = None if copy.lease is None else copy.lease.memory
        memory = np.frombuffer(transfers.memory[group] if lent is None else lent.data, np.uint8)
        start, nbytes = copy.slot * transfers.stride(group), transfers.slots[group][0].nbytes
        words = memory[start : start + nbytes].view(np.int32)
        words[-1] ^= 1
        self.flipped.add(copy)
        if self.line is not None:  # it may be stored below like that, and outlive this engine
            self.rotten.add(key_of(group, copy.digest))
        return words

    def _was_bad(self, copy: PageCopy) -> None:
        copy.checksum = checksum_of(self._flip(copy))
        self.rotten.add(key_of(copy.group.number, copy.digest))  # a peer may have it too

    @property
    def _shift(self) -> int:
        return 7_919 * self.renewed

    @property
    def _name(self) -> str:
        return f"sim {self.renewed}" if self.renewed else "sim"

    def _renew(self) -> None:
        """The model has other weights from now on: those who come expect their tokens."""
        assert self.loop.planner.index is not None
        self._renews, self.renewed = False, self.renewed + 1
        self.model.weights.fill_(self._shift)
        self.loop.planner.index.rename(self._name)
        for job in self._coming:
            self.clients[job.key].has_adapter(self._shift)
        self._know()

    def _know(self) -> None:
        """Note what pages must hold by the names that they have from now on."""
        index = self.loop.planner.index
        self.contents = Contents(PrefixHasher(self._name, index.hasher.page_size)) if index else None
        if self.contents is not None:
            coming = {job.key for job in self._coming}
            plain = [client for client in self.clients.values() if not client.job.adapter]
            plain = [client for client in plain if not self.renewed or client.job.key in coming]
            self.contents.know((([*c.job.prompt, *c.expected], c.job.salt) for c in plain), shift=self._shift)

    def _flush(self) -> None:
        """Others have taken all pages and slots that are at rest, and given them back."""
        for pool in self.loop.pools:
            pool.retire([pool.take() for _ in range(pool.available())], 0)
        for group in self.loop.parts.transfers.host.groups if self.loop.parts.transfers is not None else ():
            for copy in [copy for copy in group.copies.values() if not copy.pins]:
                copy.lose()

    def _change_adapters(self, kind: str) -> None:
        """A name gets another adapter, or one goes or comes back: requests that have come keep theirs."""
        assert self.loop.parts.adapters is not None
        name = {"swap": "ann", "unload": "bob"}[kind]
        if kind == "unload" and name in self.numbers:
            del self.numbers[name]
            self.loop.parts.adapters.drop(name)
        else:
            self._swaps += kind == "swap"
            self.numbers[name] = NUMBERS[name] + self._swaps % 2
            self.loop.parts.adapters.put(name, contents_of(self.device, self.numbers[name]))

    def _restart(self) -> None:
        """The engine is replaced: what was open ends with an error, and nothing of it may come back."""
        for client in self._open():
            client.finish("died")
        self._stop_engine()
        self._start_engine()

    def _start_engine(self) -> None:
        scenario = self.scenario
        self.engines += 1
        self.ranks = self._new_ranks()
        seed = scenario.seed * 16 + self.engines
        self.device = self.ranks.device if self.ranks else SimDevice(seed, scenario.mood, scenario.maps_host)
        self.model = self._new_model()
        self.model.weights.fill_(self._shift)
        adapters = self._new_adapters()
        self.loop: Loop = loop_of(
            self.device,
            self.model,
            scenario.sizes,
            scenario.depth,
            model_name=self._name,
            prefix_caching=scenario.prefix_caching,
            by_priority=scenario.by_priority,
            chain=scenario.chain,
            kernels=self._kernels,
            program=PROGRAMS[scenario.step],
            speculation=self._speculation(),
            # Never `mixed`: captured steps with chunks need `begin_mixed`, which plain kernels lack, and a model that
            # finds its chunks on the device, which the checksum model does not. See tests/step/test_mixed_graphs.py.
            ranks=self.ranks,
            group=self.ranks.group if self.ranks else ONE_RANK,
            adapters=adapters,
            host=self.host_sizes(),
            **(captures_at_once(scenario.sizes) if scenario.seed % 3 == 0 else {}),
        )
        self.model.pool = self.loop.pools[0]
        self.attach_lower()
        transfers = self.loop.parts.transfers
        self.tiers = TierAudit(transfers, lambda: self.device.host_now) if transfers is not None else None
        if isinstance(self.model, GroupedSimModel):
            self.model.pools = self.loop.pools
        look_behind_steps(self.loop, self.model)
        # Of a slot that is written too early, rows that have ended say nothing.
        self._audit = LeaseAudit(self.loop) if adapters or scenario.host else None
        self.flipped: set[PageCopy] = set()
        self._prepare(self.loop)
        if self.ranks:
            self.ranks.follow(self.loop)
            for executor in self.ranks.executors:
                executor.program.model.pool = None  # the leader's looks for all
        self._know()
        tiered = scenario.tier and self.contents is not None
        self.tier = Tier(self.device, self.loop, self.kept, self.contents) if tiered else None

    def attach_lower(self) -> None:
        self.line: LateLine | None = None
        if not self.scenario.lower or self.loop.parts.transfers is None:
            return
        if any(fault.kind == "spoil" for fault in self._faults):
            self.below.clear()  # nobody has read what an engine that died had stored of bad KV
        self.line = LateLine(self.below, self.scenario.seed * 16 + self.engines)
        host, slot = self.loop.parts.transfers.host, self.loop.parts.transfers.slot
        host.attach([self.line], slot, min(LOOKUP_NS, self.scenario.late_ns))

    def host_sizes(self) -> HostSizes | None:
        scenario, weighs = self.scenario, self.scenario.seed % 8 == 0
        nbytes = scenario.host * (1 + scenario.grouped) * 4096
        return HostSizes(nbytes, 1, scenario.late_ns, weighs) if nbytes else None

    def _speculation(self) -> Speculation | None:
        if self.scenario.drafts is None:
            return None
        drafter: Drafter = Oracle(VOCAB, 4, self.scenario.drafts)
        if any(job.automaton is not None for job in self.scenario.jobs):  # the oracle does not ask matchers
            answers = [[*client.job.prompt, *client.expected] for client in self.clients.values()]
            drafter = Scripted.new(answers, self.scenario.drafts)
        return Speculation(4, drafter, self.scenario.sizes.rows)

    def _new_model(self) -> SimModel:
        spoils = any(fault.kind == "spoil" for fault in self.scenario.faults)
        may_fail = spoils or any(NAN_TOKEN in job.prompt for job in self.scenario.jobs)
        kind = AdaptedSimModel if self.scenario.adapters else GroupedSimModel if self.scenario.grouped else SimModel
        return kind(self.scenario.sizes.max_len, may_fail)

    def _new_adapters(self) -> Adapters | None:
        """The adapters with which an engine starts; those that came later are not among them."""
        self.numbers: dict[str, int] = {}
        if not isinstance(self.model, AdaptedSimModel):
            return None
        self._swaps, self.numbers = 0, dict(NUMBERS)
        self.model.tables = Tables(self.scenario.adapters)
        contents = {name: contents_of(self.device, number) for name, number in NUMBERS.items()}
        return Adapters(self.model.tables, contents)

    def _new_ranks(self) -> RankWorld | None:
        """The ranks of an engine, if it has several. A rank dies in the first engine alone."""
        scenario = self.scenario
        if not scenario.followers:
            return None
        faults = scenario.ranks if self.engines == 1 else scenario.ranks._replace(dies=None)
        seed = scenario.seed * 16 + self.engines
        return RankWorld(seed, 1 + scenario.followers, scenario.mood, scenario.maps_host, faults)

    def _stop_engine(self) -> None:
        if self.loop.parts.adapters is not None:
            self.brought += self.loop.parts.adapters.slots.loads
        self.preemptions += self.loop.planner.preemptions
        self.chained += self.loop.counters.chained_steps
        self.held += self.loop.counters.held_rows
        if self.loop.launcher.gate is not None:
            self.accepted += self.loop.launcher.gate.report().right
        if self.ranks:
            self.followed += sum(host.follower.launched for host in self.ranks.hosts)
            self.declined += self.loop.counters.declined_ranks
            self.deaths += "died" in self.ranks.stopped
        if self.loop.parts.transfers is not None:
            self.hosted += self.loop.parts.transfers.host.counts.loaded
            self.refused += self.loop.parts.transfers.host.counts.refused
            for counts in self.loop.parts.transfers.host.below.counts:
                self.fetched += counts.loaded
                self.disproved += counts.refused
        if self.tier is not None:
            self.stored, self.loaded = self.stored + self.tier.stored, self.loaded + self.tier.loaded
        self.device.close()

    # Safety.

    def _check_accounting(self) -> None:
        check_pages(self.loop)
        if self.contents is not None:
            self.contents.check_settled(self.loop)
        if self.spoiled:
            self._check_index()
        if self._audit is not None:
            self._audit.check()
        if self.loop.parts.transfers is not None:
            self.check_copies(self.loop.parts.transfers)
        assert len(self.loop.planner.waiting) <= self.scenario.sizes.queue + self.scenario.sizes.rows

    def check_copies(self, transfers: Transfers) -> None:
        """Copies hold what their digests mean, and only what has changed since was refused."""
        transfers.host.check()
        group = transfers.host.groups[0]
        shape = self.loop.launcher.executor.program.cache.data.shape[1:]
        for digest, copy in group.copies.items():
            sound = copy not in self.flipped and key_of(0, digest) not in self.rotten
            if copy.checksum is not None and sound and not self.spoiled:
                assert self.contents is not None
                if self.contents.knows(digest):
                    page = transfers.bulk_in.sources(copy.lease)[0][copy.slot]
                    self.contents.check(digest, page.view(torch.int64).view(shape), "a copy in the host tier")
        if self.line is not None and not (self.spoiled or self.flipped):
            self._check_below(self.line, torch.Size(shape))
        doubted = self.flipped or self.rotten or any(fault.kind in ("raise", "spoil") for fault in self._faults)
        if self.scenario.pair is not None:  # a request that fails dropped what the other engine may have loaded by then
            doubted = doubted or any(NAN_TOKEN in client.job.prompt for client in self.clients.values())
        assert doubted or not transfers.host.counts.refused, "a sound copy was refused"

    def _check_below(self, line: LateLine, shape: torch.Size) -> None:
        """What was stored below is what its key means."""
        assert self.contents is not None
        for key in line.new - self.rotten:
            if key[-4:] == bytes(4) and key in line.kept and self.contents.knows(key[:-4]):
                page = torch.frombuffer(bytearray(line.kept[key][0]), dtype=torch.int64)[: shape.numel()]
                self.contents.check(key[:-4], page.view(shape), "a page below the host tier")
        line.new.clear()

    def _check_index(self) -> None:
        """After the first failure, no page that may be shared holds bad KV."""
        pool, memory = self.loop.pools[0], self.loop.launcher.executor.program.cache.data
        pages = [page for page in pool.digest_of if pool.settled(page)]
        bad = memory[pages, 0, 1].flatten(1).any(1).tolist()
        assert not any(bad), f"pages {[page for page, is_bad in zip(pages, bad, strict=True) if is_bad]} are in doubt"

    def check_rest(self) -> None:
        while self.line is not None and self.line.orders:
            assert self.loop.parts.transfers is not None
            self.loop.parts.transfers.poll()
        if self.tier is not None:
            self.tier.drain()
        if self.ranks:
            self.ranks.check_alike(self.loop)
        if self.loop.parts.adapters is not None:
            self.device.drain()
            self.loop.parts.adapters.before_plan()  # loads of aborted requests, and adapters not needed any more
            assert self.loop.parts.adapters.contents.keys() == set(self.loop.parts.adapters.names.values())
        check_at_rest(self.loop)
        if self.loop.parts.transfers is not None:
            host = self.loop.parts.transfers.host
            pinned = sum(group.pinned for group in host.groups)
            assert pinned == len(host.below.holding()), f"at rest, {pinned} copies in the host tier are pinned"
        if self.contents is not None:
            self.contents.check_settled(self.loop, again=True)
        # A test may forge late lines; of its own the engine has none, since leases keep them away.
        assert self.loop.counters.dropped_identity == getattr(self.loop, "forged_lines", 0)


def _continued(job: Job, direct: Callable[..., list[int]]) -> list[int]:
    """Tokens up to the greatest length."""
    if job.bias is None and job.automaton is None:
        return direct(job.prompt, job.max_len - len(job.prompt), VOCAB)
    known = list(job.prompt)
    while len(known) < job.max_len:
        known.append(job.follows(known, direct(known, 1, VOCAB)[0]))
    return known[len(job.prompt) :]


def _undisturbed(job: Job, direct: Callable[..., list[int]]) -> tuple[list[int], str]:
    """Tokens and end of a run in which nothing happens, by direct computation."""
    if NAN_TOKEN in job.prompt:
        return [], Flag.ERROR.name
    tokens = _continued(job, direct)
    for index, token in enumerate(tokens):
        if index == job.fails_at:
            return tokens[:index], "failed"
        if token in job.stop_ids:
            return tokens[: index + 1], Flag.STOP.name
    return tokens, Flag.LENGTH.name
