"""EngineConfig: one frozen record is the flags, the keyword arguments of LLM, and the documentation."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from gapless.base.errors import ConfigError

DEMO_MODEL = "demo"
"""The name under which the model embedded in the package is served."""

MAX_DEPTH = 8


def flag(
    default: Any, help: str, *, aliases: tuple[str, ...] = (), group: str = "Model", choices: tuple[str, ...] = ()
) -> Any:
    """A config field that is also a command-line flag; `aliases` are the other spellings accepted for it."""
    meta = {"help": help, "aliases": aliases, "group": group, "choices": choices}
    if isinstance(default, list):
        return field(default_factory=lambda: tuple(default), metadata=meta)
    return field(default=default, metadata=meta)


@dataclass(frozen=True)
class EngineConfig:
    """How the engine is built. Sizes are in tokens unless named otherwise."""

    model: str = flag(
        DEMO_MODEL, "directory of a Hugging Face checkpoint, or 'demo'", aliases=("--model-path", "--model-id", "-m")
    )
    tokenizer: str | None = flag(None, "directory of another tokenizer", aliases=("--tokenizer-path",))
    dtype: str = flag(
        "auto",
        "arithmetic of weights and KV cache; auto follows the checkpoint",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    load_format: str = flag(
        "auto", "where weights come from; dummy makes random ones", choices=("auto", "safetensors", "dummy")
    )
    max_model_len: int | None = flag(
        None,
        "longest sequence, prompt and output; default: what the model and memory allow",
        aliases=("--context-length", "--ctx-size", "-c", "--max-total-tokens"),
    )
    seed: int = flag(0, "seed of dummy weights and of requests that bring none", aliases=("--random-seed",))
    chat_template: str | None = flag(
        None, "file with (or text of) another chat template", aliases=("--chat-template-file",)
    )

    device: str = flag(
        "auto", "where steps run; auto takes CUDA when there is one", group="Device", choices=("auto", "cpu", "cuda")
    )
    threads: int = flag(0, "CPU threads of the compute stream; 0 chooses", group="Device")
    gpu_memory_utilization: float = flag(
        0.9,
        "share of device memory for weights and KV cache",
        group="Device",
        aliases=("--mem-fraction-static", "--cuda-memory-fraction", "--device-memory-utilization"),
    )
    kv_cache_memory_bytes: int | None = flag(None, "exact size of the KV cache; beats the share above", group="Device")

    max_num_seqs: int = flag(
        0,
        "requests running at once; 0 chooses (256 on a GPU, 64 on a CPU)",
        group="Scheduling",
        aliases=("--max-running-requests", "-np", "--parallel", "--max-concurrent-requests"),
    )
    max_num_batched_tokens: int = flag(
        0,
        "token budget of one step; 0 chooses (8192 on a GPU, 1024 on a CPU)",
        group="Scheduling",
        aliases=("--chunked-prefill-size", "--max-prefill-tokens", "-b"),
    )
    block_size: int = flag(16, "tokens of one KV page", group="Scheduling", aliases=("--page-size", "--cb-block-size"))
    num_gpu_blocks_override: int | None = flag(
        None, "exact number of KV pages", group="Scheduling", aliases=("--cb-num-blocks",)
    )
    enable_prefix_caching: bool = flag(
        True, "share KV pages of equal prefixes", group="Scheduling", aliases=("--cache-prompt",)
    )
    scheduling_policy: str = flag(
        "fcfs",
        "order of waiting requests",
        group="Scheduling",
        choices=("fcfs", "priority"),
        aliases=("--schedule-policy",),
    )
    max_num_queued_reqs: int = flag(
        1024,
        "waiting requests at most; more are refused with 503",
        group="Scheduling",
        aliases=("--max-queued-requests",),
    )
    depth: str = flag("auto", "steps in flight at most: auto or 1..8; 1 waits for every step", group="Scheduling")
    watchdog_seconds: float = flag(
        60.0, "work without progress for this long fails the engine; 0 turns it off", group="Scheduling"
    )

    def __post_init__(self) -> None:
        for name, low in (
            ("max_num_seqs", 0),
            ("max_num_batched_tokens", 0),
            ("block_size", 1),
            ("threads", 0),
            ("max_num_queued_reqs", 1),
        ):
            if getattr(self, name) < low:
                raise ConfigError(f"{name} must be at least {low}, got {getattr(self, name)}")
        for name in ("max_model_len", "num_gpu_blocks_override", "kv_cache_memory_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"gpu_memory_utilization must be above 0 and at most 1, got {self.gpu_memory_utilization}"
            )
        if not self.watchdog_seconds >= 0.0:
            raise ConfigError(f"watchdog_seconds must be at least 0, got {self.watchdog_seconds}")
        for f in fields(self):
            choices = f.metadata["choices"]
            if choices and getattr(self, f.name) not in choices:
                raise ConfigError(f"{f.name} must be one of {', '.join(choices)}, got {getattr(self, f.name)!r}")
        parse_depth(self.depth)


def parse_depth(text: str | int) -> int | None:
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
