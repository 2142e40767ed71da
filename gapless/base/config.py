"""EngineConfig: one frozen record is the flags, the keyword arguments of LLM, and the documentation."""

from __future__ import annotations

import json
import math
import typing
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from gapless.base.errors import ConfigError
from gapless.base.peers import KEY_VARIABLE, LISTEN, PEER_TIERS, ROLES, PeerFiles, PeerPlan, role_plan
from gapless.base.plug_ins import check_name
from gapless.base.processors import processor_paths
from gapless.base.speculative import SpeculativeConfig
from gapless.base.tiers import TierConfig, parse_tiers

DEMO_MODEL = "demo"
KV_DTYPES = ("auto", "fp8", "k8v4")
"""Served name of the model embedded in the package."""

DEVICES = ("auto", "cpu", "cuda", "rocm", "xpu", "ascend", "npu", "gaudi", "hpu", "mps")
"""The devices of `--device`, by the names of their records or of torch's types"""
GENERAL = "accelerator:"
"""Prefix of a type of torch's, which then runs by nothing but the things that all accelerators share"""
DEVICE_PLUG_INS = "gapless.devices"
"""Entry points of this group are further devices: their names, and classes that implement `device.seam.Device`."""
MAX_DEPTH = 8
MAX_RANKS = 16
MAX_ENGINES = 64
_INT32, _INT64 = 2**31 - 1, 2**63 - 1


def flag(
    default: Any,
    help: str,
    *,
    aliases: tuple[str, ...] = (),
    group: str = "Model",
    choices: tuple[str, ...] = (),
    low: float = -math.inf,
    high: float = math.inf,
) -> Any:
    """A config field that is also a command-line flag; `aliases` are the other spellings accepted for it.

    `check_fields` holds the value to `choices`, or to numbers from `low` to `high`.
    """
    meta = {"help": help, "aliases": aliases, "group": group, "choices": choices, "low": low, "high": high}
    return field(default=default, metadata=meta)


_device, _scheduling, _adapters = (partial(flag, group=group) for group in ("Device", "Scheduling", "Adapters"))


def check_fields(record: Any) -> None:
    """Types, bounds and choices of a record made of `flag` fields. Raises ConfigError naming the field."""
    hints = typing.get_type_hints(type(record))
    for f in fields(record):
        value, (kind, many, optional) = getattr(record, f.name), field_kind(hints[f.name])
        if value is None and optional:
            continue
        if many:
            if not isinstance(value, tuple) or not all(isinstance(text, str) and text for text in value):
                raise ConfigError(f"{f.name} must be texts, none of them empty")  # they may be keys
            continue
        _check_value(f.name, kind, value, f.metadata)


def field_kind(hint: Any) -> tuple[type, bool, bool]:
    """Return the kind of a flag's value, whether there are many, and whether it may be None, of a type such as int,
    `int | None` or `tuple[str, ...]`."""
    args = typing.get_args(hint)
    kind = next((arg for arg in args if arg is not type(None)), hint)
    return kind, typing.get_origin(hint) is tuple, type(None) in args


def _check_value(name: str, kind: type, value: object, meta: typing.Mapping[str, Any]) -> None:
    choices, low, high = meta["choices"], meta["low"], meta["high"]
    accepted = (int, float) if kind is float else kind
    good = isinstance(value, accepted) and (kind is bool or not isinstance(value, bool))
    if good and kind in (int, float):
        good = low <= value <= high  # NaN is refused by any comparison
    if not good:
        bounds = "" if math.isinf(low) else f" from {low} to {high}"
        raise ConfigError(f"{name} must be {_EXPECTED[kind]}{bounds}, got {value!r}")
    if choices and value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


_EXPECTED = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def read_adapter(text: str) -> tuple[str, str]:
    """Return name and directory of `name=directory`, or of JSON as in vLLM and SGLang; "" for a missing part."""
    name, _, path = text.partition("=")
    if text.startswith("{"):
        try:
            given = json.loads(text)
        except ValueError:
            return "", ""
        name, path = (str(given.get(key) or given.get(f"lora_{key}") or "") for key in ("name", "path"))
    return name, path


@dataclass(frozen=True)
class EngineConfig:
    """Configuration of an engine. Sizes are in tokens unless named otherwise."""

    model: str = flag(
        DEMO_MODEL,
        "a Hugging Face checkpoint: its directory, or its name on the hub (org/name); or 'demo'",
        aliases=("--model-path", "--model-id", "-m"),
    )
    tokenizer: str | None = flag(
        None, "another tokenizer: a directory, or a name on the hub", aliases=("--tokenizer-path",)
    )
    revision: str | None = flag(None, "branch, tag or commit of a model on the hub; default: main")
    download_dir: str | None = flag(
        None, "where files of the hub are kept; default: the cache of huggingface_hub, in $HF_HOME"
    )
    dtype: str = flag(
        "auto",
        "arithmetic of weights and KV cache; auto follows the checkpoint, or is float32 on a CPU without our C++ that "
        "computes it clearly faster",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    load_format: str = flag(
        "auto", "where weights come from; dummy makes random ones", choices=("auto", "safetensors", "dummy")
    )
    quantization: str = flag(
        "auto",
        "auto: weights as the checkpoint has them; fp8, int8, int4: a plain checkpoint's layers rounded at load",
        aliases=("--quantize",),
    )
    model_impl: str = flag(
        "auto",
        "what computes the model: native, one of our families; transformers, its class there with our attention, which "
        "the extra 'transformers' brings; auto takes a native family if one reads the checkpoint's config.json",
        choices=("auto", "native", "transformers"),
    )
    check: bool = flag(
        False,
        "compare a native family with its class in transformers by the logits of a few tokens before the model "
        "serves, and refuse it if they differ; needs the extra 'transformers'",
    )
    weights_dir: str | None = flag(
        None,
        "directory below which operators may load other weights of the same model while the engine runs, by "
        "/update_weights_from_disk; default: none",
    )
    max_model_len: int | None = flag(
        None,
        "longest sequence, prompt and output; default: what the model and memory allow",
        aliases=("--context-length", "--ctx-size", "-c"),
        low=1,
        high=_INT32,
    )
    seed: int | None = flag(
        None,
        "seed of dummy weights and of requests that bring none; default: 0; a server draws another for requests",
        aliases=("--random-seed",),
        low=-_INT64 - 1,
        high=_INT64,
    )
    generation_config: str = flag(
        "auto",
        "where sampling parameters of requests that give none come from: auto, the model's generation_config.json; "
        "vllm, nowhere; or the folder of another such file",
    )
    override_generation_config: str | None = flag(
        None, 'sampling parameters that beat those of the file, as JSON, such as {"temperature": 0.5}'
    )
    chat_template: str | None = flag(
        None, "file with (or text of) another chat template", aliases=("--chat-template-file",)
    )

    device: str = _device(
        "auto",
        "where steps run: cpu, cuda, rocm, xpu, ascend, gaudi, mps, a plug-in's name, or accelerator:TYPE for any type "
        "of torch's; auto takes the accelerator that torch sees, else the CPU",
    )
    threads: int = _device(0, "CPU threads of the compute stream of each rank; 0 chooses", low=0, high=1024)
    tensor_parallel_size: int = _device(
        1,
        "ranks, processes of this machine that compute each step together: every one has a device, and an equal share "
        "of the weights and of the KV cache",
        aliases=("-tp", "--tp", "--tp-size", "--num-shard"),
        low=1,
        high=MAX_RANKS,
    )
    data_parallel_size: int = _device(
        1,
        "engines of this machine behind one server, each with all of the model, its own devices and its own KV cache; "
        "a request goes to the engine that has most of its prompt, unless that one is busier",
        aliases=("-dp", "--dp", "--dp-size"),
        low=1,
        high=MAX_ENGINES,
    )
    device_ids: str | None = _device(
        None,
        "numbers of the CUDA devices of the ranks, such as 0,1, engine after engine; equal ones share a device, at "
        "full speed only under NVIDIA's MPS; default: 0, 1, 2 and so on",
    )
    gpu_memory_utilization: float = _device(
        0.9,
        "share of device memory for weights and KV cache",
        aliases=("--mem-fraction-static", "--cuda-memory-fraction", "--device-memory-utilization"),
        low=0.01,
        high=1,
    )
    kv_cache_memory_bytes: int | None = _device(
        None, "exact size of the KV cache; beats the share above", low=1, high=_INT64
    )

    max_num_seqs: int = _scheduling(
        0,
        "requests running at once; 0 chooses (256 on a GPU, 64 on a CPU)",
        aliases=("--max-running-requests", "-np", "--parallel", "--max-concurrent-requests"),
        low=0,
        high=16_384,
    )
    max_adjusted_seqs: int = _scheduling(
        0,
        "requests running at once with penalties, logit_bias, allowed_token_ids, bad_words or logits_processors, more "
        "of them wait; each takes 8 bytes of device memory a token of the vocabulary; 0 chooses (max-num-seqs, 128 MiB "
        "at most)",
        low=0,
        high=16_384,
    )
    max_num_batched_tokens: int = _scheduling(
        0,
        "token budget of one step; 0 chooses (8192 on a GPU, 512 with --role prefill; 1024 on a CPU, less where "
        "decoding rows would wait)",
        aliases=("--chunked-prefill-size", "--max-prefill-tokens", "-b"),
        low=0,
        high=2**24,
    )
    max_itl: float | None = _scheduling(
        None,
        "milliseconds that a step in which requests decode shall take at most: as many prompt tokens run beside them "
        "as fit by measured times, 16 at least; steps that take longer all the same are counted by cause; default: on "
        "a CPU 20, or three to eight times what the decoding requests take, the more prompts wait; with "
        "max-num-batched-tokens and on a GPU no bound",
        low=1,
        high=10**6,
    )
    kv_cache_dtype: str = _scheduling(
        "auto",
        "how keys and values are stored: auto, in the model's dtype; fp8, as e4m3, half the bytes of bfloat16; k8v4, "
        "keys as e4m3 and values in 4 bits, 0.38 of the bytes at heads of 128; scales are powers of two that the start "
        "measures",
        choices=KV_DTYPES,
    )
    block_size: int = _scheduling(
        16, "tokens of one KV page", aliases=("--page-size", "--cb-block-size"), low=1, high=2**16
    )
    num_gpu_blocks_override: int | None = _scheduling(
        None, "exact number of KV pages", aliases=("--cb-num-blocks",), low=1, high=_INT32
    )
    enable_prefix_caching: bool = _scheduling(True, "share KV pages of equal prefixes", aliases=("--cache-prompt",))
    kv_tiers: tuple[str, ...] = _scheduling(
        (),
        "keep copies of KV pages beyond the device, so that what it no longer holds is loaded and not computed again: "
        "host:SIZE, such as host:8GiB, for memory of the host; below it disk:PATH:SIZE, redis://HOST:PORT/DB (with TLS "
        "rediss://) and tiers of plug-ins",
        aliases=("--kv-tier",),
    )
    role: str | None = _scheduling(
        None,
        "prefill computes prompts and gives their KV pages to peers, decode takes them and goes on, both does either; "
        "adds host:1GiB and peer:1GiB to kv-tiers if they give no size",
        choices=ROLES,
    )
    kv_peers: tuple[str, ...] = _scheduling(
        (),
        "engines that this one takes KV pages from, each HOST:PORT or unix:PATH",
        aliases=("--kv-peer",),
    )
    kv_peer_listen: str | None = _scheduling(
        None,
        f"where peers take KV pages, HOST:PORT or unix:PATH; default of prefill and both: {LISTEN}",
    )
    kv_peer_key_file: str | None = _scheduling(
        None, f"file with the key of all peers, 16 bytes or more, needed over TCP; default: the key in ${KEY_VARIABLE}"
    )
    kv_peer_ssl_certfile: str | None = _scheduling(
        None,
        "certificate of this engine for TLS with peers over TCP, which other machines need; a decoder checks that it "
        "names the prefiller's host",
    )
    kv_peer_ssl_keyfile: str | None = _scheduling(None, "private key of that certificate, without a password")
    kv_peer_ssl_ca_certs: str | None = _scheduling(None, "certificates of the authorities that sign those of peers")
    scheduling_policy: str = _scheduling(
        "fcfs", "order of waiting requests", choices=("fcfs", "priority"), aliases=("--schedule-policy",)
    )
    max_num_queued_reqs: int = _scheduling(
        1024,
        "waiting requests at most; more are refused with 503",
        aliases=("--max-queued-requests",),
        low=1,
        high=_INT32,
    )
    depth: str = _scheduling("auto", "steps in flight at most: auto or 1..8; 1 waits for every step")
    enforce_eager: bool = _scheduling(False, "capture no steps as graphs; every step is launched operator by operator")
    batch_invariant: bool = _scheduling(
        False,
        "a row's logits are the same to the bit whatever else is in its batch, so that tokens do not depend on load, "
        "depth, chunks, preemption or prefix hits; slower. Without it they may differ if two tokens nearly tie, on "
        "a GPU and with float32 on a CPU",
    )
    max_cudagraph_capture_size: int | None = _scheduling(
        None,
        "most running requests of a step that is captured as a graph, on any device; default: max-num-seqs",
        aliases=("--cuda-graph-max-bs",),
        low=1,
        high=_INT32,
    )
    lora_modules: tuple[str, ...] = _adapters(
        (), "LoRA adapters to serve beside the model, each name=directory; a request names one as its model"
    )
    lora_dir: str | None = _adapters(
        None,
        "directory below which operators may load adapters while the engine runs, by /v1/load_lora_adapter, and unload "
        "any; default: adapters are those of --lora-modules",
    )
    max_loras: int = _adapters(4, "adapters on the device at once; requests for others wait", low=1, high=1024)
    max_lora_rank: int = _adapters(16, "largest rank of an adapter", low=1, high=256)
    speculative_config: str | None = _scheduling(
        None,
        "guess tokens and verify several in one step: JSON with method (ngram: what followed the same tokens before; "
        "suffix: that, and what followed them in other answers to the same tenant; grammar: what a form of output "
        "leaves no choice about, which the first two draft too; eagle3: a trained head; "
        "draft_model: a small model of the same vocabulary; model is either's directory or its name on the hub; mtp: "
        "layers of the checkpoint) and, as you like, num_speculative_tokens, prompt_lookup_min, prompt_lookup_max and "
        "suffix_decoding_*; the tokens are the same",
        aliases=("-sc",),
    )
    logits_processors: tuple[str, ...] = _scheduling(
        (),
        "torch functions that change the logits of requests which ask for them, each module:function or "
        "name=module:function; imported at start, from the Python path",
        aliases=("--logits-processor",),
    )
    controllers: tuple[str, ...] = _scheduling(
        (),
        "names of installed controllers (of the depth, of prompt tokens beside decoding rows, of drafts, of loads), "
        "each in place of the built-in one",
    )
    watchdog_seconds: float = _scheduling(
        60.0,
        "work without progress for this long fails the engine; if the largest step may honestly take longer (at 20 "
        "billion operations a second on a CPU, 10 trillion on a GPU), that time counts instead; 0 turns it off",
        low=0,
        high=10**9,
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "depth", str(self.depth))  # LLM(depth=4) is natural
        for name in ("lora_modules", "logits_processors", "controllers", "kv_tiers", "kv_peers"):
            if isinstance(values := getattr(self, name), list):  # so is a list, and JSON has nothing else
                object.__setattr__(self, name, tuple(values))
        if isinstance(self.speculative_config, dict):  # as vLLM's LLM takes it
            object.__setattr__(self, "speculative_config", json.dumps(self.speculative_config))
        if isinstance(self.device_ids, (list, tuple)):
            object.__setattr__(self, "device_ids", ",".join(map(str, self.device_ids)))
        check_fields(self)
        parse_depth(self.depth)
        if not self.device.startswith(GENERAL):
            check_name("device", self.device, DEVICES, DEVICE_PLUG_INS)
        self.speculation, self.processors, self.tiers, self.peer_plan, self.devices  # noqa: B018 - to find mistakes now
        if self.check and self.load_format == "dummy":
            raise ConfigError("check compares a checkpoint's weights, and load_format dummy has none: leave out one")
        if (self.adapters or self.lora_dir) and self.batch_invariant:
            raise ConfigError("batch_invariant does not hold for rows with adapters: leave it out, or these")
        if self.tiers and not self.enable_prefix_caching:
            raise ConfigError("kv_tiers keep prefixes, which enable_prefix_caching turns off: leave one of them out")
        if self.tensor_parallel_size > 1:
            for name, has, what in NEEDS_ONE_RANK:
                if has(self):
                    raise ConfigError(f"{name}: {what} with tensor_parallel_size above 1 yet: leave out one of them")

    @property
    def base_seed(self) -> int:
        """The seed where a server has drawn no other."""
        return self.seed or 0

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """How tokens are guessed; None for not at all. Raises ConfigError."""
        return None if self.speculative_config is None else SpeculativeConfig.parse(self.speculative_config)

    @property
    def adapters(self) -> dict[str, str]:
        """The directory of each adapter, by name. Raises ConfigError for anything but name=directory."""
        found: dict[str, str] = {}
        for text in self.lora_modules:
            name, path = read_adapter(text)
            if not (name and path and name.isprintable()) or name in found:
                raise ConfigError(f"lora_modules must be name=directory, each name once, got {text!r}")
            found[name] = path
        return found

    @property
    def tiers(self) -> dict[str, TierConfig]:
        """Return where copies of KV pages are kept, by kind. Raises ConfigError."""
        kinds = {tier.partition(":")[0] for tier in self.kv_tiers}
        defaults = [tier for tier in PEER_TIERS if self.peer_plan and tier.partition(":")[0] not in kinds]
        return parse_tiers([*self.kv_tiers, *defaults])

    @property
    def peer_plan(self) -> PeerPlan:
        """Return whom this engine gives KV pages and takes them from, without the key. Raises ConfigError."""
        files = [getattr(self, name) for name in TLS_FIELDS]
        return role_plan(self.role, self.kv_peer_listen, self.kv_peers, files)

    @property
    def devices(self) -> tuple[int, ...]:
        """Return the number of each rank's CUDA device, engine after engine. Raises ConfigError."""
        ranks, engines = self.tensor_parallel_size, self.data_parallel_size
        if self.device_ids is None:
            return tuple(range(ranks * engines))
        numbers = self.device_ids.split(",")
        # One of several engines has its own ones alone.
        if len(numbers) not in (ranks, ranks * engines) or not all(number.strip().isdecimal() for number in numbers):
            of = "tensor_parallel_size" + " in each engine of data_parallel_size" * (engines > 1)
            text = f"device_ids must be {ranks * engines} numbers, one for each rank of {of}, such as "
            raise ConfigError(f"{text}{','.join(map(str, range(ranks * engines)))}, got {self.device_ids!r}")
        return tuple(map(int, numbers))

    @property
    def file_without_peers(self) -> str | None:
        """Return the field of a file for peers that is given where there are none."""
        names = ("kv_peer_key_file", *TLS_FIELDS)
        return next((name for name in names if getattr(self, name) and not self.peer_plan), None)

    @property
    def processors(self) -> dict[str, str]:
        """The module:function of each logits processor, by name. Raises ConfigError."""
        return processor_paths(self.logits_processors)


TLS_FIELDS = tuple([f"kv_peer_ssl_{name}" for name in PeerFiles._fields])


NEEDS_ONE_RANK: tuple[tuple[str, Callable[[EngineConfig], object], str], ...] = (
    ("model_impl", lambda config: config.model_impl == "transformers", "the Transformers backend does not work"),
)
"""Features of one rank alone: a field, whether a config asks for it, and the reason"""


def parse_depth(text: str) -> int | None:
    """Steps in flight as an integer; None for auto."""
    if text == "auto":
        return None
    try:
        depth = int(text)
    except ValueError:
        depth = 0
    if not 1 <= depth <= MAX_DEPTH:
        raise ConfigError(f"depth must be auto or a whole number from 1 to {MAX_DEPTH}, got {text!r}")
    return depth
