# ruff: noqa: E501 - command lines stand as they were published
"""Command lines from the public recipes of vLLM, SGLang and llama.cpp: each starts, or is answered as said here.

Models and sizes are changed where a line would else need several devices or a GGUF file.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from gapless.base.config import EngineConfig
from gapless.cli.errors import UsageError
from gapless.cli.flags import Command
from gapless.server.config import ServerConfig
from gapless.text.replies import form_name
from gapless.text.reply_tables import REASONING_NAMES, REASONING_TABLES, TOOL_NAMES, TOOL_TABLES

LLAMA3 = "examples/tool_chat_template_llama3.1_json.jinja"
MTP = {"method": "mtp", "num_speculative_tokens": 1}
AN_EAGLE = {"method": "eagle3", "model": "jamesliu1/sglang-EAGLE3-Llama-3.1-Instruct-8B", "num_speculative_tokens": 3}
A_DRAFT = {"method": "draft_model", "model": "Qwen/Qwen2.5-1.5B-Instruct", "num_speculative_tokens": 4}
TP, KV8, GGUF = "a model has one device here", "the KV cache has the dtype of the weights", "GGUF files are not read"

STARTS: list[tuple[str, dict[str, Any], str]] = [
    # vLLM's recipes and manual. What follows is what the line sets, the model left out, and which flags are noted.
    ("vllm serve Qwen/Qwen3-4B --host 0.0.0.0 --port 8000", {"host": "0.0.0.0", "port": 8000}, ""),
    ("vllm serve openai/gpt-oss-20b", {}, ""),
    (
        "vllm serve Qwen/Qwen3-8B --max-num-batched-tokens 16384 --gpu-memory-utilization 0.8",
        {"max_num_batched_tokens": 16384, "gpu_memory_utilization": 0.8},
        "",
    ),
    (
        "vllm serve meta-llama/Llama-3.3-70B-Instruct --tensor-parallel-size 1 --disable-log-requests",
        {},
        "--tensor-parallel-size --disable-log-requests",
    ),
    (
        "vllm serve Qwen/Qwen3-4B --seed 42 --disable-log-requests --gpu-memory-utilization 0.98 "
        "--max-num-batched-tokens 1024 --max-num-seqs 128 --tensor-parallel-size 1 --max-model-len 4096",
        {
            "seed": 42,
            "gpu_memory_utilization": 0.98,
            "max_num_batched_tokens": 1024,
            "max_num_seqs": 128,
            "max_model_len": 4096,
        },
        "--disable-log-requests --tensor-parallel-size",
    ),
    (
        "vllm serve openai/gpt-oss-20b --tool-call-parser openai --enable-auto-tool-choice",
        {"tool_call_parser": "openai"},
        "--enable-auto-tool-choice",
    ),
    (
        "vllm serve meta-llama/Llama-3.1-8B-Instruct --enable-auto-tool-choice --tool-call-parser llama3_json "
        f"--chat-template {LLAMA3}",
        {"tool_call_parser": "llama3_json", "chat_template": LLAMA3},
        "--enable-auto-tool-choice",
    ),
    (
        "vllm serve JetBrains/Mellum2-12B-A2.5B-Instruct --max-model-len auto --trust-remote-code "
        "--tensor-parallel-size 1 --enable-auto-tool-choice --tool-call-parser hermes",
        {"max_model_len": None, "tool_call_parser": "hermes"},
        "--trust-remote-code --tensor-parallel-size --enable-auto-tool-choice",
    ),
    (
        "vllm serve arcee-ai/Trinity-Large-Thinking --dtype bfloat16 --reasoning-parser deepseek_r1 "
        "--enable-auto-tool-choice --tool-call-parser qwen3_coder",
        {"dtype": "bfloat16", "reasoning_parser": "deepseek_r1", "tool_call_parser": "qwen3_coder"},
        "--enable-auto-tool-choice",
    ),
    (
        "vllm serve deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B --reasoning-parser deepseek_r1",
        {"reasoning_parser": "deepseek_r1"},
        "",
    ),
    ("vllm serve LiquidAI/LFM2.5-1.2B-Thinking --reasoning-parser qwen3", {"reasoning_parser": "qwen3"}, ""),
    ("vllm serve LiquidAI/LFM2.5-8B-A1B --no-enable-prefix-caching", {"enable_prefix_caching": False}, ""),
    ("vllm serve LiquidAI/LFM2.5-1.2B-Instruct --optimization-level 3", {}, "--optimization-level"),
    (
        "vllm serve Qwen/Qwen3Guard-Gen-0.6B --host 0.0.0.0 --max-model-len 32768",
        {"host": "0.0.0.0", "max_model_len": 32768},
        "",
    ),
    (
        "vllm serve pfnet/plamo-2-translate --trust-remote-code --max-model-len 8192",
        {"max_model_len": 8192},
        "--trust-remote-code",
    ),
    (
        'vllm serve Qwen/Qwen3.6-27B-FP8 --speculative-config \'{"method": "mtp", "num_speculative_tokens": 1}\' '
        "--reasoning-parser qwen3",
        {"speculative_config": MTP, "reasoning_parser": "qwen3"},
        "",
    ),
    (
        "vllm serve zai-org/GLM-4.5-FP8 --speculative-config.method mtp --speculative-config.num_speculative_tokens 1 "
        "--tool-call-parser glm45 --reasoning-parser glm45 --enable-auto-tool-choice",
        {"speculative_config": MTP, "tool_call_parser": "glm45", "reasoning_parser": "glm45"},
        "--enable-auto-tool-choice",
    ),
    (
        "vllm serve XiaomiMiMo/MiMo-V2-Flash --served-model-name mimo_v2_flash --trust-remote-code "
        "--tool-call-parser qwen3_xml --reasoning-parser qwen3",
        {"served_model_name": ("mimo_v2_flash",), "tool_call_parser": "qwen3_xml", "reasoning_parser": "qwen3"},
        "--trust-remote-code",
    ),
    (
        "vllm serve MiniMaxAI/MiniMax-M2 --tool-call-parser minimax_m2 --reasoning-parser minimax_m2 "
        "--enable-auto-tool-choice --trust-remote-code",
        {"tool_call_parser": "minimax_m2", "reasoning_parser": "minimax_m2"},
        "--enable-auto-tool-choice --trust-remote-code",
    ),
    (
        'vllm serve google/gemma-4-31B-it --max-model-len 8192 --limit-mm-per-prompt \'{"image": 4, "audio": 1}\'',
        {"max_model_len": 8192},
        "--limit-mm-per-prompt",
    ),
    (
        "vllm serve Qwen/Qwen3.5-27B-FP8 --language-model-only --reasoning-parser qwen3 --enable-prefix-caching",
        {"reasoning_parser": "qwen3", "enable_prefix_caching": True},
        "--language-model-only",
    ),
    (
        "vllm serve meta-llama/Llama-2-7b-hf --enable-lora --lora-modules sql-lora=/models/sql-lora",
        {"lora_modules": ("sql-lora=/models/sql-lora",)},
        "--enable-lora",
    ),
    (
        "vllm serve amd/gpt-oss-120b --tensor-parallel-size=1 --attention-backend ROCM_AITER_UNIFIED_ATTN "
        "-cc.pass_config.fuse_rope_kvcache=True -cc.use_inductor_graph_partition=True --gpu-memory-utilization 0.95 "
        "--block-size=64",
        {"gpu_memory_utilization": 0.95, "block_size": 64},
        "--tensor-parallel-size --attention-backend -cc.pass_config.fuse_rope_kvcache -cc.use_inductor_graph_partition",
    ),
    (
        "vllm serve inclusionAI/Ling-3.0-flash --trust-remote-code --dtype bfloat16 --tensor-parallel-size 1 "
        "--gpu-memory-utilization 0.9 --enable-chunked-prefill "
        '--compilation-config \'{"cudagraph_mode":"FULL_AND_PIECEWISE"}\' --enable-prefix-caching',
        {"dtype": "bfloat16", "gpu_memory_utilization": 0.9, "enable_prefix_caching": True},
        "--trust-remote-code --tensor-parallel-size --enable-chunked-prefill --compilation-config",
    ),
    (
        "vllm serve Qwen/Qwen3-VL-235B-A22B-Instruct --max-model-len 128000 --async-scheduling",
        {"max_model_len": 128_000, "depth": "auto"},
        "--async-scheduling",
    ),
    (
        "python3 -m vllm.entrypoints.openai.api_server --model Qwen/Qwen2.5-7B-Instruct --dtype half "
        "--kv-cache-dtype auto --swap-space 4 --guided-decoding-backend xgrammar",
        {"dtype": "float16"},
        "--kv-cache-dtype --swap-space --guided-decoding-backend",
    ),
    (
        "vllm serve facebook/opt-125m --kv-offloading-size 8 --kv-offloading-backend native",
        {"kv_tiers": ("host:8GiB",)},
        "--kv-offloading-size --kv-offloading-backend",
    ),
    # SGLang's manual
    ("python -m sglang.launch_server --model-path Qwen/Qwen3-8B", {}, ""),
    (
        "python3 -m sglang.launch_server --model-path qwen/qwen2.5-0.5b-instruct --host 0.0.0.0 --log-level warning",
        {"host": "0.0.0.0", "log_level": "warning"},
        "",
    ),
    (
        "python -m sglang.launch_server --model-path meta-llama/Meta-Llama-3-8B-Instruct --mem-fraction-static 0.7",
        {"gpu_memory_utilization": 0.7},
        "",
    ),
    (
        "python -m sglang.launch_server --model-path meta-llama/Meta-Llama-3-8B-Instruct --chunked-prefill-size 4096",
        {"max_num_batched_tokens": 4096},
        "",
    ),
    (
        "python3 -m sglang.launch_server --model-path Qwen/Qwen2.5-7B-Instruct --tool-call-parser qwen25 "
        "--host 0.0.0.0 --log-level warning",
        {"tool_call_parser": "qwen25", "host": "0.0.0.0", "log_level": "warning"},
        "",
    ),
    (
        "python3 -m sglang.launch_server --model-path deepseek-ai/DeepSeek-R1-Distill-Qwen-7B --host 0.0.0.0 "
        "--reasoning-parser deepseek-r1",
        {"host": "0.0.0.0", "reasoning_parser": "deepseek-r1"},
        "",
    ),
    (
        "python3 -m sglang.launch_server --model meta-llama/Meta-Llama-3.1-8B-Instruct --speculative-algorithm EAGLE3 "
        "--speculative-draft-model-path jamesliu1/sglang-EAGLE3-Llama-3.1-Instruct-8B --speculative-num-steps 3 "
        "--speculative-eagle-topk 4 --speculative-num-draft-tokens 16 --mem-fraction-static 0.7 --cuda-graph-max-bs 8 "
        "--dtype float16 --log-level warning",
        {
            "speculative_config": AN_EAGLE,
            "gpu_memory_utilization": 0.7,
            "max_cudagraph_capture_size": 8,
            "dtype": "float16",
            "log_level": "warning",
        },
        "--speculative-algorithm --speculative-draft-model-path --speculative-num-steps --speculative-eagle-topk "
        "--speculative-num-draft-tokens",
    ),
    (
        "python3 -m sglang.launch_server --model XiaomiMiMo/MiMo-7B-RL --host 0.0.0.0 --trust-remote-code "
        "--speculative-algorithm EAGLE --speculative-num-steps 1 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 2 --mem-fraction-static 0.7 --cuda-graph-max-bs 8 --log-level warning",
        {
            "host": "0.0.0.0",
            "speculative_config": MTP,
            "gpu_memory_utilization": 0.7,
            "max_cudagraph_capture_size": 8,
            "log_level": "warning",
        },
        "--trust-remote-code --speculative-algorithm --speculative-num-steps --speculative-eagle-topk "
        "--speculative-num-draft-tokens",
    ),
    (
        "python3 -m sglang.launch_server --model Qwen/Qwen2.5-7B-Instruct --speculative-algorithm STANDALONE "
        "--speculative-draft-model-path Qwen/Qwen2.5-1.5B-Instruct --speculative-num-steps 4 "
        "--speculative-eagle-topk 2 --speculative-num-draft-tokens 7 --mem-fraction-static 0.7 --cuda-graph-max-bs 8",
        {"speculative_config": A_DRAFT, "gpu_memory_utilization": 0.7, "max_cudagraph_capture_size": 8},
        "--speculative-algorithm --speculative-draft-model-path --speculative-num-steps --speculative-eagle-topk "
        "--speculative-num-draft-tokens",
    ),
    (
        "python -m sglang.launch_server --model-path Qwen/Qwen3-8B --enable-hierarchical-cache "
        "--hicache-mem-layout layer_first --hicache-size 8 --page-size 1 --tp-size 1",
        {"kv_tiers": ("host:8GB",), "block_size": 1},
        "--enable-hierarchical-cache --hicache-mem-layout --hicache-size --tp-size",
    ),
    (
        "python -m sglang.launch_server --model-path Qwen/Qwen3-8B-AWQ --context-length 8192 --host 0.0.0.0 "
        "--port 8081 --tool-call-parser qwen25 --dp 1 --max-prefill-tokens 2048",
        {
            "max_model_len": 8192,
            "host": "0.0.0.0",
            "port": 8081,
            "tool_call_parser": "qwen25",
            "max_num_batched_tokens": 2048,
        },
        "--dp",
    ),
    (
        "python3 -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B-Instruct --attention-backend triton "
        "--enable-metrics --enable-cache-report --page-size 64",
        {"enable_prompt_tokens_details": True, "block_size": 64},
        "--attention-backend --enable-metrics",
    ),
    (
        "python3 -m sglang.launch_server --model meta-llama/Llama-3.1-8B-Instruct --enable-torch-compile",
        {},
        "--enable-torch-compile",
    ),
    (
        "python3 -m sglang.launch_server --model-path Qwen/Qwen3-8B --attention-backend flashinfer "
        "--enable-deterministic-inference",
        {"batch_invariant": True},
        "--attention-backend --enable-deterministic-inference",
    ),
    (
        "python3 -m sglang.launch_server --model-path meta-llama/Meta-Llama-3.1-8B-Instruct --host 0.0.0.0 "
        "--grammar-backend xgrammar --disable-radix-cache --disable-overlap-schedule",
        {"host": "0.0.0.0", "enable_prefix_caching": False, "depth": "1"},
        "--grammar-backend --disable-radix-cache --disable-overlap-schedule",
    ),
    (
        "python3 -m sglang.launch_server --model-path meta-llama/Meta-Llama-3.1-8B-Instruct --enable-lora "
        "--lora-paths lora0=algoprog/lora0 lora1=algoprog/lora1 --max-loras-per-batch 2 --lora-backend csgmv",
        {"lora_modules": ("lora0=algoprog/lora0", "lora1=algoprog/lora1"), "max_loras": 2},
        "--enable-lora --lora-paths --max-loras-per-batch --lora-backend",
    ),
    # llama.cpp's manual and discussions, with a checkpoint of safetensors files for the GGUF file
    ("llama-server -m Qwen/Qwen3-0.6B --port 8080", {"port": 8080}, ""),
    (
        "llama-server -m Qwen/Qwen3-0.6B -ngl 99 -c 65536 --parallel 1",
        {"max_model_len": 65536, "max_num_seqs": 1},
        "-ngl",
    ),
    (
        "llama-server -m Qwen/Qwen3-0.6B -c 0 -fa on --jinja --no-mmap --n-gpu-layers 99",
        {"max_model_len": None},
        "-fa --jinja --no-mmap --n-gpu-layers",
    ),
    (
        "llama-server -m Qwen/Qwen3-0.6B -c 0 -fa --jinja --reasoning-format none",
        {"max_model_len": None, "reasoning_parser": "none"},
        "-fa --jinja --reasoning-format",
    ),
    (
        "llama-server -m openai/gpt-oss-20b --alias gpt-oss-20b --host 127.0.0.1 --port 8080 -c 65536 -fa 1 -np 1 --jinja",
        {
            "served_model_name": ("gpt-oss-20b",),
            "host": "127.0.0.1",
            "port": 8080,
            "max_model_len": 65536,
            "max_num_seqs": 1,
        },
        "-fa --jinja",
    ),
    (
        "llama-server -m openai/gpt-oss-20b --ctx-size 0 --jinja -ub 2048 -b 2048 -ngl 99 -fa",
        {"max_model_len": None, "max_num_batched_tokens": 2048},
        "--jinja -ub -ngl -fa",
    ),
    (
        "llama-server -m Qwen/Qwen3-0.6B -t 8 -tb 8 -np 4 -cb --metrics --mlock --no-warmup",
        {"threads": 8, "max_num_seqs": 4},
        "-t -tb -cb --metrics --mlock --no-warmup",
    ),
]

REFUSED: list[tuple[str, str]] = [
    ("vllm serve Qwen/Qwen3-32B --host 0.0.0.0 --port 8000 --tensor-parallel-size 2", f"--tensor-parallel-size 2 is not available in gapless yet: {TP}"),
    ("vllm serve deepseek-ai/DeepSeek-V3.2-Exp -tp 8", f"-tp 8 is not available in gapless yet: {TP}"),
    ("vllm serve deepseek-ai/DeepSeek-V3.2 -dp 8 --enable-expert-parallel", f"-dp 8 is not available in gapless yet: {TP}"),
    ("vllm serve nvidia/Nemotron-3-Nano-4B-FP8 --trust-remote-code --async-scheduling --kv-cache-dtype fp8", f"--kv-cache-dtype fp8 is not available in gapless yet: {KV8}"),
    ("vllm serve baidu/ERNIE-4.5-300B-A47B-PT --gpu-memory-utilization=0.95 --quantization fp8", "--quantization fp8 is not available in gapless yet: weights stay as the checkpoint has them"),
    ("vllm serve mistralai/Mistral-Large-3 --tokenizer_mode mistral --config_format mistral --load_format mistral", "--tokenizer-mode mistral is not available in gapless yet: the checkpoint's tokenizer.json is read"),
    ("vllm serve mistralai/Voxtral-4B-TTS-2603 --omni --port 8000", "--omni is not available in gapless yet: text alone is served"),
    ("vllm serve jinaai/jina-embeddings-v5-text-small --trust-remote-code --runner pooling", "--runner pooling is not available in gapless yet: text is generated"),
    ("vllm serve Qwen/Qwen3-Next-80B-A3B-Instruct --tokenizer-mode auto --no-enable-chunked-prefill", "--no-enable-chunked-prefill is not accepted: chunked prefill cannot be turned off; raise --max-num-batched-tokens instead"),
    ('vllm serve m --kv-transfer-config \'{"kv_connector":"OffloadingConnector","kv_role":"kv_both"}\'', "--kv-transfer-config is not accepted: write --kv-tier host:SIZE"),
    ("vllm serve openai/gpt-oss-120b --tool-server demo", "--tool-server demo is not available in gapless yet"),
    ("vllm serve Qwen/Qwen3-0.6B --enable-sleep-mode", "--enable-sleep-mode is not available in gapless yet: a server that has ended gives its memory back"),
    ("python -m sglang.launch_server --model-path meta-llama/Meta-Llama-3-8B-Instruct --tp 2", f"--tp 2 is not available in gapless yet: {TP}"),
    ("python -m sglang.launch_server --model-path zai-org/GLM-4.5-Air --disaggregation-mode prefill", "--disaggregation-mode is not accepted: write --role prefill or --role decode with --kv-peer"),
    ("python3 -m sglang.launch_server --model-path m --tp 1 --enable-hierarchical-cache --hicache-ratio 2", "--enable-hierarchical-cache is not accepted alone: write --kv-tier host:SIZE"),
    ("python3 -m sglang.launch_server --model-path m --hicache-size 30 --hicache-storage-backend mooncake", "--hicache-storage-backend is not accepted: write --kv-tier disk:PATH:SIZE, mooncake://HOST:PORT"),
    ("python3 -m sglang.launch_server --model meta-llama/Llama-2-7b-chat-hf --speculative-algorithm EAGLE --speculative-draft-model-path lmsys/sglang-EAGLE-llama2-chat-7B", "--speculative-config.model is of no use to mtp"),
    ("llama-server --jinja -fa -hf bartowski/Qwen2.5-7B-Instruct-GGUF:Q4_K_M", f"-hf is not available in gapless yet: {GGUF}"),
    ("llama-server -hf ggml-org/gpt-oss-20b-GGUF --ctx-size 0 --jinja -ub 2048 -b 2048", f"-hf ggml-org/gpt-oss-20b-GGUF is not available in gapless yet: {GGUF}"),
    ("llama-server -hf ggml-org/gpt-oss-20b-GGUF --n-cpu-moe 12 -c 32768 --jinja --no-mmap", f"-hf ggml-org/gpt-oss-20b-GGUF is not available in gapless yet: {GGUF}"),
    ("llama-server -m Qwen/Qwen3-0.6B -ctk q8_0 -ctv q8_0", f"-ctk q8_0 is not available in gapless yet: {KV8}"),
    ("llama-server -m Qwen/Qwen3-0.6B -ts 3,1", f"-ts 3,1 is not available in gapless yet: {TP}"),
]  # fmt: skip


SERVE = Command("serve", "", (EngineConfig, ServerConfig), model_word=True, greedy=True)


def words_of(line: str) -> list[str]:
    """The flags of a line: what follows the program and its subcommand."""
    words = shlex.split(line)
    if words[0].startswith("python"):
        return words[3:]
    return words[2:] if words[0] == "vllm" else words[1:]


def read(line: str) -> tuple[dict[str, Any], list[str]]:
    settings = SERVE.read(words_of(line), {})
    settings.build(EngineConfig), settings.build(ServerConfig)
    fields = settings.given(EngineConfig) | settings.given(ServerConfig)
    if "speculative_config" in fields:
        fields["speculative_config"] = json.loads(fields["speculative_config"])
    return fields, settings.notes


@pytest.mark.parametrize(("line", "fields", "noted"), STARTS, ids=[line[:60] for line, _, _ in STARTS])
def test_a_recipe_that_asks_for_what_is_here_starts(line: str, fields: dict[str, Any], noted: str) -> None:
    found, notes = read(line)
    assert found.pop("model")
    assert found == fields
    assert sorted(note.split()[0] for note in notes) == sorted(noted.split())
    assert form_name(found.get("tool_call_parser", "auto"), TOOL_NAMES) in {"auto", *TOOL_TABLES}
    assert form_name(found.get("reasoning_parser", "auto"), REASONING_NAMES) in {"auto", "none", *REASONING_TABLES}


@pytest.mark.parametrize(("line", "answer"), REFUSED, ids=[line[:60] for line, _ in REFUSED])
def test_a_recipe_that_asks_for_something_else_is_answered_in_one_line(line: str, answer: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(line)
    assert str(caught.value).startswith(answer)


def test_the_table_of_recipes_has_sixty_lines() -> None:
    lines = [line for line, *_ in (*STARTS, *REFUSED)]
    assert len(set(lines)) == len(lines) >= 60
