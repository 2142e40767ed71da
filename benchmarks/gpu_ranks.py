"""Ranks on several GPUs of one host, or on one: one question a run, each a short table.

`PYTHONPATH=.:benchmarks python benchmarks/gpu_ranks.py --only sums [--device-ids 0,1]`

sums   us of a sum in a graph, with and without the norm, and of what the leader tells and gathers
late   replays that the host launches ahead of a rank that does not come, and the time from the stop word to idle
tp     tokens/s of one rank and of several in turn, and of several at depth 1
death  a rank is killed under load: until its end is named, and until another engine is ready
peer   tokens/s of vLLM with as many ranks, in a process of its own, beside ours
pd     prefill and decode apart beside two mixed servers (prefill_decode.py), on the first two GPUs

`--device cpu` runs sums, tp and death on processors.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rows import measured
from shapes import SHAPES, make_qwen

from gapless import LLM, SamplingParams
from gapless.base.errors import GaplessError
from gapless.base.share import Share
from gapless.comm.join import group_on
from gapless.comm.seam import Group
from gapless.comm.shared import Commons
from gapless.device import Device, open_device
from gapless.engine import checkers

MODES = ("sums", "late", "tp", "death", "peer", "pd")
CALLS, REPLAYS, AHEAD, LATE_CALLS = 50, 20, 600, 65
VOCABULARY = 151936


def row(*cells: object) -> None:
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def head(*cells: str) -> None:
    row(*cells)
    row(*["---", *["---:"] * (len(cells) - 1)])


class Rank(NamedTuple):
    """One rank of a run without an engine."""

    commons: Commons
    device: Device
    group: Group

    @classmethod
    def of(cls, commons: Commons, options: argparse.Namespace) -> Rank:
        ids = options.device_ids or [*range(options.ranks)]
        device = open_device(options.device, 1, ids[commons.share.rank] if options.device == "cuda" else 0)
        return cls(commons, device, group_on(device, commons))

    def graph(self, name: object, program: Callable[[], object]) -> Any:
        with self.group.muted():
            return self.device.capture(name, program)

    def replay(self, graph: Any) -> float:
        """Return the seconds from the launch until the end is seen."""
        begin = time.perf_counter()
        graph.launch(self.device.compute)
        self.device.compute.record().wait()
        return time.perf_counter() - begin


def ranks(options: argparse.Namespace, work: Callable[[Rank, argparse.Namespace], None]) -> None:
    """Do some work as all ranks: this process leads."""
    commons = Commons.create(options.ranks)
    command = [sys.executable, __file__, *sys.argv[1:], "--fd", str(commons.fd)]
    peers = [subprocess.Popen([*command, "--rank", str(n)], pass_fds=[commons.fd]) for n in range(1, options.ranks)]
    try:
        work(Rank.of(commons, options), options)
        assert not any([peer.wait(120) for peer in peers]), "a rank failed"
    finally:
        commons.group.stop()
        for peer in peers:
            peer.kill()


def sums(rank: Rank, options: argparse.Namespace) -> None:
    group, device, share = rank.group, rank.device.torch_device, rank.group.share
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    if share.leads:
        head(f"{share.world} ranks, {options.device}, {dtype}", "us, median", "least")

    def check() -> None:
        numbers = torch.arange(options.width, device=device).remainder(7).to(dtype).repeat(3, 1)
        assert torch.equal(group.add(numbers * (share.rank + 1)), numbers * (share.world * (share.world + 1) // 2))

    rank.device.run(check)
    for rows in options.rows:
        x, y = (torch.zeros(rows, options.width, dtype=dtype, device=device) for _ in range(2))
        weight = torch.ones(options.width, device=device)
        part = torch.zeros(rows, VOCABULARY // share.world, dtype=dtype, device=device)
        out = torch.zeros(rows, part.shape[1] * share.world if share.leads else 0, dtype=dtype, device=device)
        news = torch.zeros(rows, 16, dtype=torch.int32, device=device)
        works: dict[str, Callable[[], object]] = {
            f"sum of {rows} x {options.width}": lambda y=y: group.add(y),
            "sum, residual and norm": lambda x=x, y=y, weight=weight: group.add_norm(x, y, weight, 1e-6),
            f"columns of {rows} x {VOCABULARY} gathered": lambda part=part, out=out: group.gather(part, out),
            f"{rows} x 16 words told": lambda news=news: group.tell(news),
        }
        for name, once in works.items():
            graph = rank.graph((name, rows), lambda once=once: [once() for _ in range(CALLS)] and None)
            found = sorted(1e6 * rank.replay(graph) / CALLS for _ in range(3 + REPLAYS))[:-3]
            if share.leads:
                row(name, f"{statistics.median(found):.2f}", f"{found[0]:.2f}")


def late(rank: Rank, options: argparse.Namespace) -> None:
    y = torch.zeros(1, options.width, dtype=torch.bfloat16, device=rank.device.torch_device)
    graph = rank.graph("late", lambda: [rank.group.add(y) for _ in range(LATE_CALLS)] and None)
    rank.replay(graph)  # together
    if not rank.group.share.leads:
        while not rank.commons.ring.wait(1.0):
            assert not rank.commons.stopped
        for _ in range(AHEAD):
            graph.launch(rank.device.compute)
        rank.device.compute.record().wait()
        while not rank.commons.stopped:  # a process that ends stops the ranks
            time.sleep(0.01)
        return
    launched: list[float] = []

    def launch() -> None:
        for _ in range(AHEAD):
            begin = time.perf_counter()
            graph.launch(rank.device.compute)
            launched.append(1e6 * (time.perf_counter() - begin))

    thread = threading.Thread(target=launch)
    thread.start()
    time.sleep(1.5)
    ahead = len(launched)
    rank.commons.ring.put(b"come")
    thread.join()
    rank.device.compute.record().wait()
    head(f"{rank.group.share.world} ranks", "found")
    row(f"replays of {LATE_CALLS} sums ahead of a late rank, of {AHEAD}", ahead)
    row("us a launch, median", f"{statistics.median(launched):.1f}")
    graph.launch(rank.device.compute)  # the others do not come
    fence = rank.device.compute.record()
    time.sleep(0.3)
    assert not fence.done(), "it did not wait"
    begin = time.perf_counter()
    rank.group.stop()
    try:
        fence.wait()
    except GaplessError:
        row("ms from the stop word to idle", f"{1e3 * (time.perf_counter() - begin):.2f}")


def engine(options: argparse.Namespace, folder: Path, size: str, world: int, **more: Any) -> LLM:
    given: dict[str, Any] = {"device": options.device, "load_format": "dummy", "max_num_seqs": max(options.rows)}
    if options.device == "cpu":
        given |= {"threads": options.threads, "dtype": "float32", "kv_cache_memory_bytes": 256 << 20}
    else:
        given |= {"kv_cache_memory_bytes": 8 << 30}
    if world > 1:
        given |= {"tensor_parallel_size": world, "device_ids": options.device_ids}
    model = options.model or str(make_qwen(folder / size, size=size))
    given |= {"model": model, "max_model_len": 1024, "enable_prefix_caching": False, **more}
    if options.model:
        given.pop("load_format")
    return LLM(**given)


def tp(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for size in options.size:
            arms = {
                "one rank": engine(options, Path(folder), size, 1),
                f"{options.ranks} ranks": engine(options, Path(folder), size, options.ranks),
                f"{options.ranks} ranks, depth 1": engine(options, Path(folder), size, options.ranks, depth="1"),
            }
            head(f"{options.model or size}, {options.device}: tokens/s", *arms, "ranks : one", "auto : 1")
            for rows in options.rows:
                found: dict[str, list[float]] = {arm: [] for arm in arms}
                for turn in range(1 + options.rounds):
                    for arm in sorted(arms, reverse=turn % 2 > 0):
                        speed, _ = measured(arms[arm], rows, options.prompt, options.output)
                        found[arm] += [speed] if turn else []
                one, many, apart = (statistics.median(found[arm]) for arm in arms)
                row(
                    f"{rows} rows",
                    *(f"{v:.1f}" for v in (one, many, apart)),
                    f"{many / one:.2f}",
                    f"{many / apart:.2f}",
                )
            for llm in arms.values():
                llm.close()


def followers() -> list[int]:
    """The processes of ranks that this one has started, or a process that it has started."""
    parents, found = {}, []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
            command = (status.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if b"gapless.engine.follower" in command:
            found.append(int(status.parent.name))

    def ours(pid: int) -> bool:
        while pid > 1 and pid != os.getpid():
            pid = parents.get(pid, 0)
        return pid == os.getpid()

    return sorted(pid for pid in found if ours(pid))


def death(options: argparse.Namespace) -> None:
    head(f"{options.ranks} ranks, {options.device}", "named after, s", "ready again, s", "said")
    with tempfile.TemporaryDirectory() as folder:
        for killed in range(options.ranks - 1):
            llm = engine(options, Path(folder), options.size[0], options.ranks)
            victim, ended, said = followers()[killed], threading.Event(), []

            def work(llm: LLM = llm, said: list[str] = said, ended: threading.Event = ended) -> None:
                try:
                    params = SamplingParams(max_tokens=800, ignore_eos=True)
                    llm.generate([[5, 6, 7]] * min(8, max(options.rows)), params, use_tqdm=False)
                except GaplessError as error:
                    said.append(str(error))
                ended.set()

            threading.Thread(target=work, daemon=True).start()
            time.sleep(options.seconds)
            begin = time.perf_counter()
            os.kill(victim, signal.SIGKILL)
            assert ended.wait(60), "a killed rank was not noticed"
            named = time.perf_counter() - begin
            llm.close()
            engine(options, Path(folder), options.size[0], options.ranks).close()
            row(f"rank {1 + killed}", f"{named:.2f}", f"{time.perf_counter() - begin:.1f}", (said or ["-"])[0][:80])


PEER = """
import json, sys, time
from vllm import LLM, SamplingParams
given = json.loads(sys.argv[1])
llm = LLM(model=given["model"], load_format="dummy", tensor_parallel_size=given["ranks"], max_model_len=1024,
          max_num_seqs=max(given["rows"]), enable_prefix_caching=False, kv_cache_memory_bytes=8 << 30)
params = SamplingParams(temperature=0.0, max_tokens=given["output"], ignore_eos=True)
for rows in given["rows"]:
    prompts = [{"prompt_token_ids": [(7 * r + 13 * p) % 200 + 5 for p in range(given["prompt"])]} for r in range(rows)]
    for turn in range(1 + given["rounds"]):
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        if turn:
            print("FOUND", rows, rows * given["output"] / (time.perf_counter() - begin), flush=True)
"""


def peer(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for size in options.size:
            model = str(make_qwen(Path(folder) / size, size=size))
            given = {
                "model": model,
                **{name: getattr(options, name) for name in ("ranks", "rows", "prompt", "output", "rounds")},
            }
            done = subprocess.run([options.peer_python, "-c", PEER, json.dumps(given)], capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"vLLM failed:\n{done.stderr[-2000:]}")
            theirs: dict[int, list[float]] = {rows: [] for rows in options.rows}
            for line in done.stdout.splitlines():
                if line.startswith("FOUND"):
                    _, rows, speed = line.split()
                    theirs[int(rows)].append(float(speed))
            llm = engine(options, Path(folder), size, options.ranks)
            head(f"{size}, {options.ranks} ranks: tokens/s", "ours", "vLLM", "ours : vLLM")
            for count in options.rows:
                speeds = [measured(llm, count, options.prompt, options.output)[0] for _ in range(1 + options.rounds)][
                    1:
                ]
                ours, other = statistics.median(speeds), statistics.median(theirs[count])
                row(f"{count} rows", f"{ours:.0f}", f"{other:.0f}", f"{ours / other:.2f}")
            llm.close()


def pd(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_qwen(Path(folder), size=options.size[0]))
        command = [sys.executable, str(Path(__file__).with_name("prefill_decode.py")), "--model", model]
        flags = ["--", "--device", options.device, "--load-format", "dummy"]
        devices = ",".join(map(str, options.device_ids or (0, 1)))
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": devices}
        sys.exit(subprocess.run([*command, "--rounds", str(options.rounds), *flags], env=environment).returncode)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODES, required=True)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device-ids", type=lambda text: [int(one) for one in text.split(",")])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--size", nargs="+", choices=SHAPES, default=["8B"])
    parser.add_argument("--model", help="a model with weights, instead of a size")
    parser.add_argument("--threads", type=int, default=1, help="of each rank on a CPU")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of load before a rank is killed")
    parser.add_argument("--peer-python", default="python", help="that has vLLM")
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    checkers.connect()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA GPU here: nothing was run")
    if options.device == "cpu" and options.only not in ("sums", "tp", "death"):
        sys.exit(f"--only {options.only} needs GPUs")
    alone: dict[str, Callable[[Rank, argparse.Namespace], None]] = {"sums": sums, "late": late}
    if options.rank:
        commons = Commons.attach(options.fd, Share(options.rank, options.ranks))
        alone[options.only](Rank.of(commons, options), options)
    elif options.only in alone:
        ranks(options, alone[options.only])
    else:
        {"tp": tp, "death": death, "peer": peer, "pd": pd}[options.only](options)


if __name__ == "__main__":
    main()
