"""Ours beside other servers on one machine: speed, start, memory, in rounds of ours, peer, ours, peer.

    PYTHONPATH=. python benchmarks/peers.py --out peers --model tiny=DIR --model small=DIR \\
        --peer 'vllm-uni1@tiny=COMMAND' --peer 'vllm-uni2@small=COMMAND' --peer 'llama@tiny,small:1=COMMAND or URL'

A command may hold {model} (the directory), {name}, {port}, {kv_gib}, {kv_bytes}, {device} and {prefix_caching} (the
flag for what the row needs). peer_work.py says what the kinds of rows are; `--rows` chooses among them.
docs/notes/2026-11-peers.md says how to get the peers and the models, what the figures mean, and which of them compare.
`--read FILE...` shows results again, several runs as one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from peer_clients import LoadClients
from peer_servers import Server, Spec, parse_spec
from peer_table import AGAIN, OURS, markdown, row_of
from peer_work import (
    CASES,
    KINDS,
    MIXED,
    OPEN,
    PLAIN,
    SHARED,
    Case,
    Sizes,
    departures,
    longest_prompt,
    open_rate,
    parse_case,
    takes_part,
)

from gapless.lab.arms import server_facts
from gapless.lab.datasets import Lengths, Prompt, Source, random_prompts
from gapless.lab.environment import describe_host, load_average, wait_until_quiet
from gapless.lab.http import Client
from gapless.lab.probe import one_reply, try_fields
from gapless.lab.records import LoadRun
from gapless.lab.same_tokens import compare_tokens
from gapless.lab.summary import SUMMARY_METRICS, parse_goodput, result_json, summarise
from gapless.lab.target import Target
from gapless.lab.top import Page, grown

COMMAND = (
    f"{sys.executable} -m gapless serve --model {{model}} --served-model-name m --port {{port}} --max-model-len 2048 "
    "--kv-cache-memory-bytes {kv_bytes} {prefix_caching} --device {device}"
)
WARM_UP_SEED = 1 << 40
CAPACITY_SEED = 1 << 41
KIND_SEEDS = 1 << 24
FILL_AT_ONCE = 64
SAME_TOKENS = 24
FIRST_TOKENS = 128
"""Tokens of a prompt that only asks whether a server answers, at most: a long one may take minutes."""
ANSWER_SECONDS = 3600.0


class Bench:
    """One whole measurement. `result` is written to a file after every case."""

    def __init__(self, args: argparse.Namespace, clients: LoadClients) -> None:
        self.args = args
        self.clients = clients
        self.models = dict(text.split("=", 1) for text in args.model)
        self.specs = [Spec(OURS, args.ours), *args.peer]
        self.end = time.monotonic() + 60 * args.minutes
        self.folder = Path(tempfile.mkdtemp(prefix="peers-"))
        self.goals = parse_goodput(args.goodput)
        self.sizes = {name: self.sizes_of(name, Path(folder)) for name, folder in self.models.items()}
        self.servers: dict[str, Server] = {}
        """Running servers, by name."""
        self.result: dict[str, Any] = {
            "schema": 1,
            "host": describe_host(),
            "lengths": [args.input_len, args.output_len],
            "device": args.device,
            "goodput": self.goals,
            "kv_gib": args.kv_gib,
            "sides": {},
            "versions": {},
            "cases": [],
            "starts": {},
            "memory": {},
            "tokens": {},
        }

    def sizes_of(self, model: str, folder: Path) -> Sizes:
        args = self.args
        mixed = any(case.model == model and case.kind in (MIXED, OPEN) for case in args.case)
        most = longest_prompt(folder, args.max_model_len) if mixed else 0
        return Sizes(args.input_len, args.output_len, most, args.vocab)

    def run(self) -> None:
        for server in dict.fromkeys(case.server for case in self.args.case):
            self.beside([case for case in self.args.case if case.server == server])
            self.servers.clear()
            self.save()

    def beside(self, cases: Sequence[Case]) -> None:
        """The cases that share their servers."""
        first = cases[0]
        specs = [spec for spec in self.specs if any(takes_part(spec, case) for case in cases)]
        last = self.start_alone(first, specs)
        with ExitStack() as stack:
            for spec in specs:
                self.servers[spec.name] = stack.enter_context(self.started(spec, first, last))
            self.memory(first.server, "ready")
            if self.args.same_prompts:
                self.same_tokens(first.server)
            for case in cases:
                self.case(case)
                self.save()
            self.memory(first.server, "after load")
            if first.server in self.args.fill and self.fill(first.server):
                self.memory(first.server, "KV filled")

    def start_alone(self, case: Case, specs: Sequence[Spec]) -> int:
        """All starts but the last, ours and the others in turn, each alone on the machine. Returns how many rounds."""
        rounds: int = self.args.starts.get(case.server, 1) - 1
        for k in range(rounds):
            for spec in specs:
                if not spec.runs_already and not self.late(90.0):
                    with self.started(spec, case, k):
                        pass
        return rounds

    @contextmanager
    def started(self, spec: Spec, case: Case, k: int) -> Iterator[Server]:
        """Return a server for this case that has answered once."""
        size = int(self.args.kv_gib * 2**30)
        words = {"model": self.models[case.model], "name": case.model, "prefix_caching": case.prefix_caching}
        words |= {"kv_gib": f"{self.args.kv_gib:g}", "kv_bytes": str(size), "device": self.args.device}
        server = Server(spec, words, self.folder / f"{spec.name}-{case.model}-{case.kind}.log")
        busy = wait_until_quiet(self.args.quiet, self.args.quiet_wait)
        try:
            server.start()
            begun = time.monotonic()
            self.first_answer(server)
            if server.ready_seconds is not None:
                first = server.ready_seconds + time.monotonic() - begun
                start = {"round": k, "ready_s": server.ready_seconds, "first_answer_s": first, "busy_before": busy}
                self.result["starts"].setdefault(case.server, {}).setdefault(spec.name, []).append(start)
                say(f"{spec.name} serves {case.server}: ready after {server.ready_seconds:.2f} s, answer {first:.2f} s")
            yield server
        finally:
            server.stop()

    def same_tokens(self, model: str) -> None:
        """Compare the first greedy tokens of each peer with ours, one request at a time."""
        prompts = self.prompts(self.args.same_prompts, WARM_UP_SEED - 1, SAME_TOKENS)
        answers = {name: self.play(s, prompts, 1, return_token_ids=True).samples for name, s in self.servers.items()}
        for name in answers.keys() - {OURS}:
            found = compare_tokens([(0, answers[OURS], answers[name])])
            differ = f"{found['differ']} of {found['compared']} answers differ from ours"
            text = f"{differ} ({SAME_TOKENS} tokens, by {found['by']})"
            self.result["tokens"].setdefault(model, {})[name] = text
            say(f"{name} {model}: {text} {found['first'] or ''}")

    def target(self, server: Server) -> Target:
        return Target(server.url, self.args.model_name, timeout=ANSWER_SECONDS)

    def first_answer(self, server: Server) -> None:
        """Check that the server accepts a request of the case's kind. Raises RuntimeError."""

        async def ask() -> None:
            async with Client(self.target(server)) as client:
                content = self.prompts(1, WARM_UP_SEED)[0].content[:FIRST_TOKENS]
                _, reply = await one_reply(client, content, 2)
                if reply.error or (await try_fields(client, content, 2)).omit:
                    raise RuntimeError(f"{server.spec.name} refuses the load: {reply.error or 'ignore_eos or usage'}")

        asyncio.run(ask())
        facts = server_facts(server.url)
        if "version" in facts:
            self.result["versions"][server.spec.name] = facts["version"]
        told = f"{facts.get('owned_by', '')} {facts.get('version', '')} {facts.get('settings', '')}"
        self.result["sides"][server.spec.name] = " ".join(told.split())

    def prompts(self, count: int, seed: int, output_len: int = 0) -> list[Prompt]:
        args = self.args
        lengths = Lengths(args.input_len), Lengths(output_len or args.output_len)
        return random_prompts(Source(range(args.vocab)), count, *lengths, seed=seed)

    def case(self, case: Case) -> None:
        sides = [(name, s) for name, s in self.servers.items() if takes_part(s.spec, case)]
        if case.model in self.args.again:
            sides.append((AGAIN, self.servers[OURS]))
        record: dict[str, Any] = {"model": case.model, "kind": case.kind, "concurrency": case.concurrency}
        record |= {"requests": case.requests, "problems": [], "runs": {name: [] for name, _ in sides}}
        self.result["cases"].append(record)
        for _, server in sides if self.args.warm_up else ():
            self.play(server, self.warm_up(case), case.concurrency)
        if case.kind == OPEN and not self.find_capacity(case, record):
            return
        roof = case.kind == PLAIN and case.model in self.args.roofline and case.concurrency == 1
        before = bandwidth() if roof else 0.0
        longest = 0.0
        for k in range(case.rounds):
            if self.late(longest):
                record["problems"].append(f"{k} of {case.rounds} rounds: the time was up")
                break
            begun = time.monotonic()
            turn = k % len(sides)  # no side is always first
            for name, server in sides[turn:] + sides[:turn]:
                self.one_run(case, k, name, server, record)
            longest = max(longest, time.monotonic() - begun)
        if roof:
            size = weight_bytes(Path(self.models[case.model]))
            record["roofline"] = {"before_gb_s": before, "after_gb_s": bandwidth(), "bytes_per_token": size}

    def warm_up(self, case: Case) -> list[Prompt]:
        count, seed = max(self.args.warm_up, case.concurrency), WARM_UP_SEED + case.concurrency
        return self.prompts(count, seed, 16) if case.kind == PLAIN else self.drawn(case, count, seed)

    def drawn(self, case: Case, count: int, seed: int) -> list[Prompt]:
        return self.sizes[case.model].prompts(case.kind, count, seed)

    def find_capacity(self, case: Case, record: dict[str, Any]) -> bool:
        """What each side reaches in a closed loop, and the rate of the open one; whether there is a rate."""
        prompts = self.drawn(case, case.requests, self.args.seed + CAPACITY_SEED)
        found: dict[str, float] = {}
        for name, server in self.servers.items():
            if takes_part(server.spec, case):
                time.sleep(self.args.pause)
                wait_until_quiet(self.args.quiet, self.args.quiet_wait)
                run = self.play(server, prompts, case.concurrency)
                if problem := wrong(run, prompts):
                    record["problems"].append(f"capacity of {name}: {problem}; left out")
                else:
                    found[name] = len(prompts) / run.duration
        record |= {"capacity": found, "rate": open_rate(found)}
        say(f"{case.key}: closed loop {found} requests/s, so {record['rate']:.2f} in the open loop")
        return bool(found)

    def late(self, needed: float) -> bool:
        return bool(time.monotonic() + needed > self.end)

    def one_run(self, case: Case, k: int, name: str, server: Server, record: dict[str, Any]) -> None:
        """One side of one round; what goes wrong is noted, and that run does not count."""
        # The prompts of the second run of ours are others, or its prefix cache would know them.
        seed = self.args.seed + 1000 * case.concurrency + 2 * k + (name == AGAIN) + KIND_SEEDS * KINDS.index(case.kind)
        prompts = self.drawn(case, case.requests, seed)
        times = departures(case.requests, record.get("rate", 0.0), seed)
        limit = None if record.get("rate") else case.concurrency
        time.sleep(self.args.pause)
        busy = wait_until_quiet(self.args.quiet, self.args.quiet_wait)
        load = load_average()
        before = {each: s.cpu_seconds() for each, s in self.servers.items()}
        page = server.metrics()
        run = self.play(server, prompts, limit, times)
        used = {each: s.cpu_seconds() - before[each] for each, s in self.servers.items()}
        if problem := wrong(run, prompts):
            record["problems"].append(f"round {k}, {name}: {problem}; left out")
            say(f"{case.key} {case.kind} round {k} {name}: {problem}")
            return
        goals = self.goals if case.kind == OPEN else None
        summary = summarise(run, prompts, percents=(99.0,), goodput=goals)
        numbers = result_json(summary, SUMMARY_METRICS)
        client = numbers.pop("client")
        own = used.pop(server.spec.name)
        numbers |= {"round": k, "seed": seed, "busy_before": busy, "load_before": load}
        numbers |= {"server_cores": own / run.duration, "other_cores": sum(used.values()) / run.duration}
        numbers |= {"client_cores": client["cpu_share"], "client_late_p99_ms": client["loop_delay_p99_ms"]}
        numbers["client_lag_p99_ms"] = client["send_lag_p99_ms"]
        if case.kind == SHARED and (share := prefix_hits(page, server.metrics())) is not None:
            numbers["prefix_hits"] = share
        record["runs"][name].append(numbers)
        say(
            f"{case.key} {case.kind} round {k} {name}: {numbers['output_throughput']:.1f} tok/s, TTFT "
            f"{numbers['median_ttft_ms']:.1f}, TPOT {numbers['mean_tpot_ms']:.3f}, ITL p50 "
            f"{numbers['median_itl_ms']:.3f} ms, cores {numbers['server_cores']:.2f} + {numbers['other_cores']:.2f} + "
            f"client {numbers['client_cores']:.2f}, {run.duration:.1f} s, busy before {busy}"
        )

    def play(
        self, server: Server, prompts: list[Prompt], limit: int | None, times: Sequence[float] = (), **fields: Any
    ) -> LoadRun:
        """A closed loop of `limit` at a time, unless there are `times` at which the prompts leave."""
        target = replace(self.target(server), extra_body=fields)
        return self.clients.play(target, prompts, times or [0.0] * len(prompts), limit)

    def memory(self, model: str, point: str) -> None:
        time.sleep(self.args.pause)
        for name, server in self.servers.items():
            if found := server.memory():
                self.result["memory"].setdefault(model, {}).setdefault(name, {})[point] = found._asdict()
                say(f"{name} {model}, {point}: PSS {found.pss / 2**30:.2f}, RSS {found.rss / 2**30:.2f} GiB")

    def fill(self, model: str) -> bool:
        """Requests that together need the whole KV cache, all under way at once; whether there was time for it."""
        tokens = self.args.kv_gib * 2**30 / kv_bytes_per_token(Path(self.models[model]))
        longest = self.args.max_model_len
        length = min(longest, math.ceil(tokens / FILL_AT_ONCE))
        output = 32  # so that the first still run when the last has its pages
        source = Source(range(self.args.vocab))
        for name, server in self.servers.items():
            if self.late(120.0):
                return False
            lengths = Lengths(max(1, length - output)), Lengths(output)
            prompts = random_prompts(source, FILL_AT_ONCE, *lengths, seed=self.args.seed + (1 << 30))
            say(f"{name} {model}: {FILL_AT_ONCE} requests of {length} tokens at once fill the cache")
            run = self.play(server, prompts, FILL_AT_ONCE)
            if problem := wrong(run, prompts):
                say(f"filling {name}: {problem}")
        return True

    def save(self) -> None:
        Path(f"{self.args.out}.json").write_text(json.dumps(self.result, indent=1), encoding="utf-8")
        Path(f"{self.args.out}.md").write_text(markdown(self.result), encoding="utf-8")


def wrong(run: LoadRun, prompts: Sequence[Prompt]) -> str:
    """Return why a run does not count; empty if it counts."""
    failed = [sample.error for sample in run.samples if sample.error]
    if failed:
        return f"{len(failed)} of {len(run.samples)} requests failed: {failed[0]}"
    if any(sample.counted for sample in run.samples):
        return "the server sends no usage"
    short = sum(s.output_tokens != p.output_len for s, p in zip(run.samples, prompts, strict=True))
    return f"{short} answers are not as long as asked for" if short else ""


def prefix_hits(before: Page, after: Page) -> float | None:
    """Share of the prompt tokens looked up between two pages of /metrics that the prefix cache had; 0 where it is off.

    None where the server has no such series.
    """
    names = ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
    hits, asked = (grown(before.total(name), after.total(name)) for name in names)
    if hits is None or asked is None:
        return None
    return hits / asked if asked else 0.0


def say(text: str) -> None:
    print(f"# {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def weight_bytes(model: Path) -> int:
    """Bytes of weights that one token of decoding reads: all but the embedding table, unless the head is tied to it."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    total = 0
    for file in model.glob("*.safetensors"):
        with file.open("rb") as data:
            header = json.loads(data.read(struct.unpack("<Q", data.read(8))[0]))
        for name, tensor in header.items():
            table = "embed_tokens" in name and not config.get("tie_word_embeddings", False)
            if name != "__metadata__" and not table:
                total += tensor["data_offsets"][1] - tensor["data_offsets"][0]
    return total


def kv_bytes_per_token(model: Path) -> int:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    heads = config["num_key_value_heads"]
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * 2 * int(config["num_hidden_layers"] * heads * width)


READ = """
import time, torch
x = torch.ones(1 << 28)
def once():
    begun = time.perf_counter()
    x.sum()
    return time.perf_counter() - begun
print(x.numel() * 4 / min(once() for _ in range(8)) / 1e9)
"""


def bandwidth() -> float:
    """GB/s at which all cores together read 1 GiB: the best of 8, in a process of its own."""
    return float(subprocess.run([sys.executable, "-c", READ], capture_output=True, text=True, check=True).stdout)


def merged(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge several runs of one machine; of a case in two of them the later counts."""
    parts = ("starts", "memory", "sides", "versions", "tokens")
    whole: dict[str, Any] = {**results[0], "cases": [], **{part: {} for part in parts}}
    for result in results:
        known = set(map(row_of, result["cases"]))
        whole["cases"] = [case for case in whole["cases"] if row_of(case) not in known] + list(result["cases"])
        for part in parts:
            whole[part] |= result.get(part, {})
    return whole


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="prefix of the results, .json and .md")
    parser.add_argument("--read", nargs="+", type=Path, metavar="FILE", help="only show these results")
    parser.add_argument("--model", action="append", default=[], metavar="NAME=DIR")
    parser.add_argument("--ours", default=COMMAND, help="our command line or URL")
    parser.add_argument("--peer", action="append", type=parse_spec, default=[], metavar="NAME[@CASES]=COMMAND")
    parser.add_argument(
        "--case",
        nargs="+",
        type=parse_case,
        default=[parse_case(text) for text in CASES],
        help="MODEL:CONCURRENCY:REQUESTS:ROUNDS[:KIND]",
    )
    parser.add_argument("--rows", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of cases to measure")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="for {device} in commands")
    parser.add_argument("--goodput", nargs="+", default=["ttft:450", "tpot:40"], help="of open rows, ms")
    parser.add_argument("--again", nargs="*", default=[], metavar="MODEL", help="ours twice in each round: the noise")
    parser.add_argument(
        "--starts", nargs="*", default=["small:3"], metavar="MODEL:N", help="starts, the first included"
    )
    parser.add_argument("--roofline", nargs="*", default=["small"], metavar="MODEL")
    parser.add_argument("--fill", nargs="*", default=["small"], metavar="MODEL", help="fill the KV cache, then memory")
    parser.add_argument("--same-prompts", type=int, default=4, help="first tokens of so many are held against ours")
    parser.add_argument("--warm-up", type=int, default=4, metavar="N", help="requests to each side first; 0: none")
    parser.add_argument("--minutes", type=float, default=60.0, help="no round begins that would end later")
    parser.add_argument("--rounds", type=int, help="of every case")
    parser.add_argument("--kv-gib", type=float, default=2.0)
    parser.add_argument("--model-name", default="m")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=2000, help="prompts are ids below this")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause", type=float, default=1.5, help="seconds before each run: a server that spins stops")
    parser.add_argument("--quiet", type=float, default=0.1)
    parser.add_argument("--quiet-wait", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=1, help="processes that play a load together")
    parser.add_argument("--client-priority", choices=("none", "nice", "rt"), default="rt")
    return parser


def main() -> None:
    parser = options()
    args = parser.parse_args()
    if args.read:
        print(markdown(merged([json.loads(file.read_text(encoding="utf-8")) for file in args.read])), end="")
        return
    if not args.out or not args.model:
        parser.error("--out and --model are needed")
    if args.rounds:
        args.case = [replace(case, rounds=args.rounds) for case in args.case]
    args.case = [case for case in args.case if case.kind in args.rows]
    if not args.case:
        parser.error(f"--case has no row of the kinds that --rows asks for: {', '.join(args.rows)}")
    if args.device == "cuda":
        args.roofline, args.fill = [], []  # both look at the memory of the processor
    args.starts = {name: int(count) for name, count in (text.split(":") for text in args.starts)}
    if unknown := {case.model for case in args.case} - {text.partition("=")[0] for text in args.model}:
        parser.error(f"no --model for {', '.join(sorted(unknown))}")
    with LoadClients(args.clients, args.client_priority) as clients:
        try:
            bench = Bench(args, clients)
        except ValueError as error:
            parser.error(str(error))
        try:
            bench.run()
        finally:
            bench.save()
            say(f"logs of the servers: {bench.folder}")
    print(markdown(bench.result), end="")


if __name__ == "__main__":
    main()
