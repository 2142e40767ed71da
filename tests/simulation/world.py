"""One simulated run: the real loop on SimDevice, scripted clients, injected faults, and checks after every turn."""

from __future__ import annotations

from collections.abc import Callable

import torch
from harness import LookingModel, captures_at_once, check_nothing_held, look_behind_steps
from simulation.scenario import NAN_TOKEN, VOCAB, Fault, Job, Scenario

from gapless.base.errors import EngineError, QueueFullError
from gapless.base.records import Flag, StepTokens
from gapless.device import SimDevice
from gapless.loop.build import build_loop
from gapless.loop.loop import Loop
from gapless.memory.pages import PagePool
from gapless.model.checksum import continue_prompt, owners
from gapless.model.seam import KVCache, StepInputs

MOST_TURNS = 3_000
CLOCK_JUMP_NS = 3_600 * 10**9
LAST_KEY = 1_000
"""The request that must succeed when all else is over."""


class InjectedError(Exception):
    """Raised by a forward because the scenario says so."""


class SimModel(LookingModel):
    """Also looks whether the pages that it touched are held by anybody, and can fail."""

    def __init__(self, max_model_len: int, may_fail: bool) -> None:
        """`may_fail`: whether some prompt holds the token that makes logits NaN."""
        super().__init__(VOCAB, max_model_len)
        self._may_fail = may_fail
        self.pool: PagePool | None = None
        self.raise_next = False

    def note(self, inputs: list[torch.Tensor], columns: int, plan: list[int]) -> None:
        if self.raise_next:
            raise InjectedError("the scenario says so")
        super().note(inputs, columns, plan)

    def forward(self, inputs: StepInputs, plan: tuple[int, ...], cache: KVCache) -> torch.Tensor:
        fold = super().forward(inputs, plan, cache)
        if not self._may_fail:
            return fold
        return torch.where(self._poisoned(inputs, plan, cache), -1, fold)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().logits(hidden)
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
                assert self.pool._owners[page] > 0, f"page {page} is touched and belongs to nobody"

    def _poisoned(self, inputs: StepInputs, plan: tuple[int, ...], cache: KVCache) -> torch.Tensor:
        """[T, 1]: whether a token may read the one that makes logits NaN. The second half of an entry says it."""
        marks = cache.data[:, 0, 1, :, 0, 0]
        size, device = cache.page_size, inputs.ids.device
        marks[inputs.slots // size, inputs.slots % size] = (inputs.ids == NAN_TOKEN).long()
        readable = marks[inputs.pages].flatten(1)[owners(plan, device)]
        visible = torch.arange(readable.shape[1], device=device) <= inputs.positions[:, None]
        return (readable * visible).any(1, keepdim=True)


class Client:
    """What one job has seen so far."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.tokens: list[int] = []
        self.scored = 0
        """Prompt tokens that have got their log-probability."""
        self.scored_new = 0
        """The same of sampled tokens."""
        self.end: str | None = None
        self.expected, self.expected_end = _undisturbed(job)

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
        known = [*self.job.prompt, *self.tokens]
        if position < len(self.job.prompt):
            self.scored += 1
            expected = self.scored
        else:
            self.scored_new += 1
            expected = len(known)
        assert position == expected, f"request {self.job.key}: position {position} is scored in place of {expected}"
        if best:
            direct = continue_prompt(known[:position], 1, VOCAB)
            assert best[:1] == direct, f"request {self.job.key}: {best[0]} is the most likely at {position}"

    def finish(self, end: str) -> None:
        assert self.end is None, f"request {self.job.key} ends twice: {self.end}, {end}"
        self.end = end
        if end in Flag.__members__:
            assert (end, self.tokens) == (self.expected_end, self.expected), f"request {self.job.key}: {end} too soon"
            wanted = 0 if self.job.asks[1] is None else len(self.job.prompt) - 1
            assert self.scored == wanted, f"request {self.job.key}: {self.scored} of {wanted} prompt tokens are scored"
            wanted = 0 if self.job.asks[0] is None else len(self.tokens)
            assert self.scored_new == wanted, f"request {self.job.key}: {self.scored_new} of {wanted} tokens are scored"


class World:
    """Runs a scenario; an AssertionError is a finding. `prepare` gets the loop of every engine that is started."""

    def __init__(self, scenario: Scenario, prepare: Callable[[Loop], None] = lambda loop: None) -> None:
        self.scenario = scenario
        self._prepare = prepare
        self.clients = {job.key: Client(job) for job in scenario.jobs}
        self.engines = 0
        self.preemptions = 0
        self.chained = 0
        self.turns = 0
        self._faults = scenario.faults
        self._coming = sorted(scenario.jobs, key=lambda job: (job.arrives, job.key))
        self._start_engine()

    def run(self) -> None:
        """Everything that the scenario holds; then all must come to rest, and one more request must succeed."""
        while self._coming or self._open() or self.loop.has_work():
            self._turn()
        self._check_rest()
        self._faults, self.model.raise_next = (), False  # healed
        last = Job(LAST_KEY, self.turns, (1, 2, 3), min(8, self.scenario.sizes.max_len), (), 0, "", None)
        client = self.clients[last.key] = Client(last)
        self._coming = [last]
        while self._coming or client.end is None or self.loop.has_work():
            self._turn()
        assert client.end == client.expected_end, f"after all is over, a new request ends with {client.end}"
        self._check_rest()
        self._stop_engine()

    def _turn(self) -> None:
        assert self.turns < MOST_TURNS, f"requests {[c.job.key for c in self._open()]} do not end"
        for fault in self._faults:
            if fault.turn == self.turns:
                self._break(fault)
        while self._coming and self._coming[0].arrives <= self.turns:
            self._arrive(self._coming.pop(0))
        for client in self._open():
            if client.job.leaves is not None and client.job.leaves <= self.turns:
                self.loop.abort(client.job.key)
                client.finish("left")
        self.turns += 1
        try:
            settled = self.loop.turn().tokens
        except (EngineError, InjectedError) as error:
            # One that is raised while a step is captured comes as it is.
            if not isinstance(error, InjectedError) and not isinstance(error.__cause__, InjectedError):
                raise
            self._restart()
            return
        for item in settled:
            self._deliver(item)
        self._check_accounting()

    def _arrive(self, job: Job) -> None:
        try:
            self.loop.submit(job.request())
        except QueueFullError:
            assert len(self.loop.planner.waiting) >= self.scenario.sizes.queue  # those preempted come on top
            self.clients[job.key].finish("refused")

    def _deliver(self, settled: StepTokens) -> None:
        if settled.logprobs is not None:
            scored = settled.logprobs
            for key, position, top in zip(
                *(c.tolist() for c in (scored.keys, scored.positions, scored.top_ids)), strict=True
            ):
                self.clients[key].on_logprob(position, top[:1])
        lines = zip(settled.keys.tolist(), settled.tokens.tolist(), settled.flags.tolist(), strict=True)
        for key, token, flag in lines:
            self.clients[key].on_token(token, flag)

    def _open(self) -> list[Client]:
        """Clients whose request the engine has."""
        coming = {job.key for job in self._coming}
        return [client for key, client in self.clients.items() if client.end is None and key not in coming]

    # Faults.

    def _break(self, fault: Fault) -> None:
        if fault.kind == "raise":
            self.model.raise_next = True
        elif fault.kind == "restart":
            self._restart()
        else:
            self.device.host_now += CLOCK_JUMP_NS

    def _restart(self) -> None:
        """The engine is replaced: what was open ends with an error, and nothing of it may come back."""
        for client in self._open():
            client.finish("died")
        self._stop_engine()
        self._start_engine()

    def _start_engine(self) -> None:
        scenario = self.scenario
        self.engines += 1
        self.device = SimDevice(scenario.seed * 16 + self.engines, scenario.mood, scenario.maps_host)
        self.model = SimModel(scenario.sizes.max_len, any(NAN_TOKEN in job.prompt for job in scenario.jobs))
        self.loop: Loop = build_loop(
            self.device,
            self.model,
            scenario.sizes,
            scenario.depth,
            model_name="sim",
            prefix_caching=scenario.prefix_caching,
            by_priority=scenario.by_priority,
            chain=scenario.chain,
            **(captures_at_once(scenario.sizes) if scenario.seed % 3 == 0 else {}),
        )
        self.model.pool = self.loop.pool
        look_behind_steps(self.loop, self.model)
        self._prepare(self.loop)

    def _stop_engine(self) -> None:
        self.preemptions += self.loop.planner.preemptions
        self.chained += self.loop.counters.chained_steps
        self.device.close()

    # Safety.

    def _check_accounting(self) -> None:
        pool = self.loop.pool
        pool.check([seq.pages for seq in self.loop.planner.by_row if seq is not None])
        counts = pool.counts()
        assert min(counts) >= 0 and sum(counts) == pool.size, f"pages do not add up: {counts}"
        assert len(self.loop.planner.waiting) <= self.scenario.sizes.queue + self.scenario.sizes.rows

    def _check_rest(self) -> None:
        check_nothing_held(self.loop)
        # A test may forge late lines; of its own the engine has none, since leases keep them away.
        assert self.loop.counters.dropped_identity == getattr(self.loop, "forged_lines", 0)


def _undisturbed(job: Job) -> tuple[list[int], str]:
    """Tokens and end of a run in which nothing happens, by direct computation."""
    if NAN_TOKEN in job.prompt:
        return [], Flag.ERROR.name
    tokens = continue_prompt(job.prompt, job.max_len - len(job.prompt), VOCAB)
    for index, token in enumerate(tokens):
        if token in job.stop_ids:
            return tokens[: index + 1], Flag.STOP.name
    return tokens, Flag.LENGTH.name
