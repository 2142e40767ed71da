"""Ranks that share one memory, as threads here and as processes: `python shared_ranks.py PROGRAM FD RANK WORLD`."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gapless.base.share import Share
from gapless.comm.shared import MOST_FRAME, Commons

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
NOISE = random.Random(3).randbytes(1 << 16)
LATE = 120.0
"""Seconds that guard against a hang alone"""


@contextmanager
def shared(world: int) -> Iterator[list[Commons]]:
    """Each rank's view of one memory, all in this process."""
    made = [Commons.create(world)]
    made += [Commons.attach(os.dup(made[0].fd), Share(rank, world)) for rank in range(1, world)]
    try:
        yield made
    finally:
        made[0].group.stop()
        for one in made:
            one.close()


@contextmanager
def alone(world: int) -> Iterator[Commons]:
    """The leader's view of a memory whose other ranks are processes."""
    leader = Commons.create(world)
    try:
        yield leader
    finally:
        leader.group.stop()
        leader.close()


def together(ranks: list[Commons], body: Callable[[Commons], Any]) -> list[Any]:
    """Run the body for every rank in a thread of its own; return the results. Raises the first error, and then ends
    the other ranks' waits."""
    results: list[Any] = [None] * len(ranks)
    errors: list[BaseException] = []

    def run(commons: Commons) -> None:
        try:
            results[commons.share.rank] = body(commons)
        except BaseException as error:
            errors.append(error)
            commons.group.stop()

    threads = [threading.Thread(target=run, args=(one,)) for one in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LATE)
        assert not thread.is_alive(), "the ranks hang"
    if errors:
        raise errors[0]
    return results


@contextmanager
def process(program: Callable[[Commons], None], leader: Commons, rank: int, world: int) -> Iterator[Any]:
    """Run a program of this file as a rank in a process of its own, which is killed at the end."""
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    with subprocess.Popen(
        [sys.executable, __file__, program.__name__, *map(str, (leader.fd, rank, world))],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        pass_fds=[leader.fd], stdout=subprocess.PIPE, text=True,
    ) as started:  # fmt: skip
        try:
            yield started
        finally:
            started.kill()


def parts(seed: int, world: int, dtype: torch.dtype, shape: tuple[int, ...]) -> list[Tensor]:
    """What each rank adds: numbers of several sizes, so that the order of a sum shows in its bits."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.int64:
        return [torch.randint(-(2**62), 2**62, shape, generator=generator) for _ in range(world)]
    sizes = [10.0 ** torch.randint(-2, 3, shape, generator=generator) for _ in range(world)]
    return [(torch.randn(shape, generator=generator) * size).to(dtype) for size in sizes]


def in_order(given: list[Tensor]) -> Tensor:
    """The sum that every rank must have."""
    if given[0].dtype == torch.int64:
        return torch.stack(given).sum(0)
    sum_ = given[0].float()
    for one in given[1:]:
        sum_ = sum_ + one.float()
    return sum_.to(given[0].dtype)


def frame(number: int) -> bytes:
    """The order of this number: of any length, most of them short."""
    at = number * 2654435761 % len(NOISE)
    length = at % 40 if number % 3 else at % (3000 if number % 7 else 70_000)
    return number.to_bytes(8, "little") + (NOISE[at:] + NOISE)[:length]


def mixed_calls(commons: Commons, rounds: int = 150) -> int:
    """Do random calls of all kinds; return a checksum of all sums, which is equal for all ranks."""
    rng, rank, world, found = random.Random(5), commons.share.rank, commons.share.world, 0
    for turn in range(rounds):
        size = rng.choice((1, 15, 16, 33, 1000, 5000, 300_000 if turn % 30 == 0 else 64))
        given = parts(turn, world, rng.choice(DTYPES), (size,))
        kind = rng.random()
        if kind < 0.6:
            got = commons.group.add(given[rank].clone())
            assert torch.equal(got, in_order(given))
            found = zlib.crc32(got.view(torch.uint8).numpy(), found)
        elif kind < 0.8:
            word = torch.tensor([turn] * (size if rank == 0 else 0) or [-1] * size, dtype=torch.int32)
            assert commons.group.tell(word).eq(turn).all()
        else:
            widths = [rng.randrange(0, 9) for _ in range(world)]
            blocks = [torch.full((size % 50, width), float(one + turn)) for one, width in enumerate(widths)]
            out = torch.empty(size % 50, 0 if rank else sum(widths))
            commons.group.gather(blocks[rank], out)
            assert rank or torch.equal(out, torch.cat(blocks, 1))
    return found


# Programs of processes.


def calls(commons: Commons) -> None:
    print(mixed_calls(commons), flush=True)


def waits(commons: Commons) -> None:
    """Wait for a rank that never calls, and print the time at which that ended."""
    try:
        commons.group.add(torch.zeros(9))
    except RuntimeError as error:
        print(time.monotonic_ns(), error, flush=True)


def reads(commons: Commons) -> None:
    """Take orders until the ranks stop, and check them; the board counts them."""
    number = 0
    while not commons.stopped:
        if commons.ring.wait(0.5):
            number = drained(commons, number)
            commons.board.taken(number)


def drained(commons: Commons, number: int | None = None) -> int | None:
    """Take all orders that are there, which begin with `number`, and return the next number."""
    while (got := commons.ring.take()) is not None:
        number = int.from_bytes(got[:8], "little") if number is None else number
        assert got == frame(number), number
        number += 1
    return number


def writes(commons: Commons, number: int) -> None:
    """Put orders for ever, as fast as there is room."""
    while True:
        order = frame(number)
        while not commons.ring.room(len(order)):
            pass
        commons.ring.put(order)
        number += 1


def forked(commons: Commons, rank: int, body: Callable[[Commons], None]) -> int:
    """Run the body as a rank in a process that is forked off; return the process's number."""
    if child := os.fork():
        return child
    try:
        body(Commons.attach(os.dup(commons.fd), Share(rank, commons.share.world)))
    except BaseException as error:
        print(repr(error), flush=True)
    os._exit(1)


def kills_writers(commons: Commons) -> None:
    """Read all that a writer has put until it is killed, many times."""
    rng, number = random.Random(1), 0
    for _ in range(30):
        child = forked(commons, 0, lambda one, number=number: writes(one, number))
        assert commons.ring.wait(LATE)
        for _ in range(rng.randrange(40)):
            number = drained(commons, number)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        number = drained(commons, number)
    print("all", number > 100, flush=True)


def kills_readers(commons: Commons) -> None:
    """Write while readers are killed, one after another; what they leave, the next one takes."""
    rng, number = random.Random(2), 0

    def read(one: Commons) -> None:
        at: int | None = None
        while one.ring.wait(LATE):
            at = drained(one, at)
            one.board.taken(at)

    leader = Commons.attach(os.dup(commons.fd), commons.share.of(0))
    for _ in range(30):
        child, end = forked(commons, 1, read), number + rng.randrange(2000)
        while number < end:
            if leader.ring.room(len(frame(number))):
                leader.ring.put(frame(number))
                number += 1
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while leader.ring.room(len(frame(number))):  # a dead reader leaves the room that it had
            leader.ring.put(frame(number))
            number += 1
    assert drained(commons) == number
    print("all", leader.ring.room(MOST_FRAME), flush=True)


def forks(commons: Commons) -> None:
    """Print what a process that is forked off gets from a call."""
    child = os.fork()
    if not child:
        try:
            commons.group.add(torch.zeros(9))
        except RuntimeError as error:
            print(error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)


def main() -> None:
    name, fd, rank, world = sys.argv[1:]
    program = {one.__name__: one for one in (calls, waits, reads, kills_writers, kills_readers, forks)}[name]
    torch.set_num_threads(1)
    commons = Commons.attach(int(fd), Share(int(rank), int(world)))
    commons.board.enter(1)
    program(commons)


if __name__ == "__main__":
    main()
