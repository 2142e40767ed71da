"""Modes of gpu_ranks.py with engines: throughput, deaths, a peer, and prefill and decode apart."""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import prefill_decode
import torch
from rank_table import Table, counted
from rows import measured
from shapes import make_qwen, token_bytes, weight_count

from gapless import LLM
from gapless.loop.timeline import Cause

ROOM, PAGE, SPARE = 0.9, 32, 3 << 30
"""Part of a GPU that arms may fill; tokens that a row takes beside its own; bytes of a rank beside weights and KV"""
WEIGHT_BYTES = {"fp8": 1.0, "int8": 1.0, "int4": 0.5}


class Arm(NamedTuple):
    """An engine of `world` ranks."""

    world: int
    depth: str = "auto"


class Found(NamedTuple):
    """One round of an arm."""

    speed: float
    idle: float
    waits: float
    """Percentages of the time with work in which the device did none, and in which it waited for other ranks"""


def kv_bytes(options: Namespace, size: str, world: int) -> int:
    """Return the bytes of KV on each rank that the largest load needs, so that no arm waits for pages."""
    if options.device == "cpu" or options.model:
        return 256 << 20 if options.device == "cpu" else 8 << 30
    return max(options.rows) * (options.prompt + options.output + PAGE) * token_bytes(size, world) + (256 << 20)


@contextmanager
def engine(options: Namespace, size: str, arm: Arm, **more: Any) -> Iterator[LLM]:
    given: dict[str, Any] = {
        "device": options.device, "max_num_seqs": max(options.rows), "max_model_len": options.prompt + options.output,
        "kv_cache_memory_bytes": kv_bytes(options, size, arm.world), "depth": arm.depth,
        "enable_prefix_caching": False, "tensor_parallel_size": arm.world,
    }  # fmt: skip
    if options.device == "cpu":
        given |= {"threads": options.threads, "dtype": "float32"}
    elif options.device_ids:
        given["device_ids"] = options.device_ids[: arm.world]
    with tempfile.TemporaryDirectory() as folder:
        dummy = {} if options.model else {"load_format": "dummy"}
        model = options.model or str(make_qwen(Path(folder) / size, size=size))
        with LLM(model, **given, **dummy, **more) as llm:
            yield llm


def fit(options: Namespace, size: str, kind: str, arms: Sequence[Arm]) -> bool:
    """Return whether all GPUs have room for all arms at once; not of a model, whose size is not known here."""
    if options.device == "cpu" or options.model:
        return options.device == "cpu"
    need: dict[int, float] = defaultdict(float)
    for arm in arms:
        for gpu in (options.device_ids or [*range(arm.world)])[: arm.world]:
            weights = weight_count(size) * WEIGHT_BYTES.get(kind, 2.0) / arm.world
            need[gpu] += weights + kv_bytes(options, size, arm.world) + SPARE
    return all(bytes_ < ROOM * torch.cuda.get_device_properties(gpu).total_memory for gpu, bytes_ in need.items())


def once(llm: LLM, rows: int, options: Namespace) -> Found:
    before = llm.stats().device
    speed, _ = measured(llm, rows, options.prompt, options.output)
    after = llm.stats().device
    lost = {cause: ns - before.idle_ns[cause] for cause, ns in after.bubbles_ns.items()}
    whole, waits = max(1, sum(lost.values()) + after.busy_ns - before.busy_ns), lost.pop(Cause.RANKS)
    return Found(speed, 100 * sum(lost.values()) / whole, 100 * waits / whole)


def played(options: Namespace, size: str, kind: str, arms: Sequence[Arm]) -> dict[tuple[Arm, int], list[Found]]:
    """Return the rounds of each arm and count of rows: in turns if all arms have room, else one arm after another."""
    found: dict[tuple[Arm, int], list[Found]] = defaultdict(list)
    every = [arms] if fit(options, size, kind, arms) else [[arm] for arm in arms]
    for together in every:
        with ExitStack() as stack:
            up = {arm: stack.enter_context(engine(options, size, arm, quantization=kind)) for arm in together}
            for rows in options.rows:
                for turn in range(1 + options.rounds):
                    for arm in together[:: -1 if turn % 2 else 1]:
                        got = once(up[arm], rows, options)
                        found[arm, rows] += [got] if turn else []
                for arm in together:  # a run that is stopped leaves these
                    print(f"  {size}, {kind}, {arm}, {counted(rows)}: {middle(found[arm, rows])}", flush=True)
        up.clear()
        gc.collect()  # parts of an engine refer to each other
        if options.device == "cuda":
            torch.cuda.empty_cache()
    return found


def middle(rounds: Sequence[Found]) -> Found:
    return Found(*map(statistics.median, zip(*rounds, strict=True)))


def tp(options: Namespace) -> None:
    """Tokens/s, medians of the rounds; idle time and waits for other ranks are the leader's at depth auto."""
    speeds = ("one rank, tokens/s", "ranks", "ranks at depth 1")
    idle = ("idle, one rank, %", "idle, %", "waits for ranks, %")
    table = Table(options, "model", "weights", "ranks", "rows", *speeds, "ranks : one", "auto : 1", *idle)
    for size in ["model"] if options.model else options.size:
        for kind in options.quantization:
            arms = [Arm(1), *(Arm(world, depth) for world in options.ranks for depth in ("auto", "1"))]
            found = {key: middle(rounds) for key, rounds in played(options, size, kind, arms).items()}
            for world in options.ranks:
                for rows in options.rows:
                    one, many, apart = (found[arm, rows] for arm in (Arm(1), Arm(world), Arm(world, "1")))
                    ratio, name = many.speed / one.speed, f"{size}, {counted(rows)}"
                    row = (f"{part.speed:.1f}" for part in (one, many, apart))
                    more = (f"{ratio:.2f}", f"{many.speed / apart.speed:.2f}")
                    more += (f"{one.idle:.1f}", f"{many.idle:.1f}", f"{many.waits:.1f}")
                    aimed = {"device idle": many.idle} | ({name: ratio} if kind == "auto" else {})
                    table.row(options.model or size, kind, world, rows, *row, *more, world=world, found=aimed)


def fields(options: Namespace, size: str, folder: str, world: int) -> dict[str, Any]:
    """Return the fields of EngineConfig of a server of these ranks."""
    model = options.model or str(make_qwen(Path(folder) / size, max(options.lengths) + options.output, size))
    given = {"model": model, "device": options.device, "tensor_parallel_size": world}
    given |= {} if options.model else {"load_format": "dummy"}
    return given | ({"threads": options.threads, "dtype": "float32"} if options.device == "cpu" else {})


def flags_of(given: Mapping[str, Any]) -> list[str]:
    """Return these fields as flags of serve, the model left out."""
    named = {"--" + name.replace("_", "-"): value for name, value in given.items() if name != "model"}
    return [word for flag, value in named.items() for word in ([flag] if value is True else [flag, str(value)])]


def death(options: Namespace) -> None:
    """Each rank is killed in turn while all streams are open; each answer is compared with the undisturbed one."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from kills.clients import questions
    from kills.streams import RankStreams, of_streams

    columns = ("streams", "open at a kill", "failed", "503 meanwhile", "longest pause, s", "ready again, s")
    table = Table(options, "model", "ranks", "killed", *columns)
    for size in ["model"] if options.model else options.size:
        for world in options.ranks:
            with tempfile.TemporaryDirectory() as folder:
                given = fields(options, size, folder, world) | {"batch_invariant": True, "max_num_seqs": 256}
                if options.device == "cuda":
                    pool = 16 << 30 if options.model else 256 * 300 * token_bytes(size, world)
                    ids = ",".join(map(str, (options.device_ids or [*range(world)])[:world]))
                    given |= {"kv_cache_memory_bytes": pool, "device_ids": ids, "max_model_len": 1024}
                asked = questions(length=20, least=16, **given)
                more = ("--served-model-name", "demo", "--disable-uvicorn-access-log")
                server = RankStreams(world, given["model"], *flags_of(given), *more)
                got = of_streams("ranks", server, options.rounds * world, asked, options.streams, 1)
            failed = len(got.faults)
            for rank in range(world):
                ready = max(got.ready[rank::world])
                cells = (got.streams, f"{got.open_at_kills:.0f}", failed, got.refused, f"{got.longest:.1f}")
                name, found = f"rank {rank}" if rank else "leader", {"ready again": ready, "failed streams": failed}
                table.row(options.model or size, world, name, *cells, f"{ready:.1f}", world=world, found=found)
            print(*got.faults[:5], sep="\n", flush=True)


PEER = """
import json, sys, time
from vllm import LLM, SamplingParams
given, out = json.loads(sys.argv[1]), sys.stdout
params = SamplingParams(temperature=0.0, max_tokens=given.pop("output"), ignore_eos=True)
prompt = given.pop("prompt")
llm = LLM(load_format="dummy", enable_prefix_caching=False, gpu_memory_utilization=0.1, **given)
for rows in map(int, sys.stdin):
    prompts = [{"prompt_token_ids": [(7 * r + 13 * p) % 200 + 5 for p in range(prompt)]} for r in range(rows)]
    begin = time.perf_counter()
    if rows:
        llm.generate(prompts, params, use_tqdm=False)
    print("FOUND", rows * params.max_tokens / (time.perf_counter() - begin), file=out, flush=True)
"""
NO_MULTICAST = {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm"}
"""vLLM 0.26's two ways to NVLink multicast, off, as in the environment of a machine that lends several GPUs"""


class Peer:
    """vLLM in a process of its own, which runs a round for each line of its input."""

    def __init__(self, options: Namespace, model: str, given: dict[str, Any], log: IO[str]) -> None:
        environment = os.environ | NO_MULTICAST | ({"PYTHONPATH": options.peer_path} if options.peer_path else {})
        if options.device_ids:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, options.device_ids))
        command = [sys.executable, "-c", PEER, json.dumps({"model": model, **given})]
        self.log, pipe = log, subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=environment)

    def round(self, rows: int) -> float:
        """Return tokens/s; of 0 rows, when it is up."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(rows, file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("FOUND"):
                return float(line.split()[1])
        self.log.seek(0)
        sys.exit(f"vLLM ended:\n{self.log.read()[-2000:]}")


def peer(options: Namespace) -> None:
    """Both engines are up, with equal bytes of KV, and take turns."""
    table = Table(options, "model", "ranks", "rows", "ours, tokens/s", "vLLM", "ours : vLLM", "least", "most")
    for size in options.size:
        for world in options.ranks:
            given = {
                "tensor_parallel_size": world, "max_num_seqs": max(options.rows), "prompt": options.prompt,
                "max_model_len": options.prompt + options.output, "output": options.output,
                "kv_cache_memory_bytes": kv_bytes(options, size, world),
            }  # fmt: skip
            with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as log:
                other = Peer(options, str(make_qwen(Path(folder) / size, size=size)), given, log)
                try:
                    other.round(0)
                    with engine(options, size, Arm(world)) as llm:
                        for rows in options.rows:
                            beside(table, size, world, rows, against(llm, other, rows, options))
                finally:
                    other.process.kill()


def against(llm: LLM, other: Peer, rows: int, options: Namespace) -> list[tuple[float, float]]:
    """Return tokens/s of both in each round but the first."""
    pairs = []
    for turn in range(1 + options.rounds):
        both = {}
        for ours in (True, False)[:: -1 if turn % 2 else 1]:
            both[ours] = once(llm, rows, options).speed if ours else other.round(rows)
        pairs.append((both[True], both[False]))
    return pairs[1:]


def beside(table: Table, size: str, world: int, rows: int, pairs: Sequence[tuple[float, float]]) -> None:
    ours, theirs = map(statistics.median, zip(*pairs, strict=True))
    ratios = sorted(one / two for one, two in pairs)
    ratio = statistics.median(ratios)
    cells = (f"{ours:.0f}", f"{theirs:.0f}", *(f"{one:.2f}" for one in (ratio, ratios[0], ratios[-1])))
    table.row(size, world, rows, *cells, world=world, found={size: ratio})


def pd(options: Namespace) -> None:
    """Apart : mixed of each figure, medians of the rounds, and the milliseconds of both."""
    table = Table(options, "model", "ranks of a side", "prompts up to", *prefill_decode.COLUMNS[:5])
    world, size = options.ranks[0], options.size[0]
    gpus = [*dict.fromkeys(map(str, options.device_ids or range(2 * world)))] if options.device == "cuda" else []
    with tempfile.TemporaryDirectory() as folder:
        server = fields(options, size, folder, world)
        pair = "--kv-tier host:256MiB --kv-tier peer:256MiB"
        if options.device == "cuda":
            pair = f"--kv-tier host:{options.tier} --kv-tier peer:{options.tier}"
            server |= {"kv_cache_memory_bytes": (16 << 30) // world}
        words = ["--model", server["model"], "--ranks", str(world), "--pair", pair, "--output", str(options.output)]
        given = prefill_decode.parser().parse_args([*words, "--gpus", *gpus, "--", *flags_of(server)])
        with prefill_decode.started(prefill_decode.pair_and_mixed(given), given) as urls:
            for length in options.lengths:
                given.shortest, given.longest, given.rounds = length // 2, length, options.rounds
                given.rate = options.load / (0.72 * length)
                given.requests = max(8, round(given.rate * options.seconds))
                found = prefill_decode.medians(prefill_decode.play(urls, given))
                ratios = [a / b for a, b in zip(found["apart"], found["mixed"], strict=True)]
                times = zip(ratios, found["apart"], found["mixed"], strict=True)
                cells = [f"{ratio:.2f} ({one:.1f} : {two:.1f} ms)" for ratio, one, two in times]
                aimed = {"TTFT p99": ratios[1], "ITL p99": ratios[3]}
                table.row(options.model or size, world, length, *cells[:5], world=len(gpus), found=aimed)
