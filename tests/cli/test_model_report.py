"""`gapless doctor MODEL`: what is reported of a model by its config alone."""

from __future__ import annotations

import json

import pytest

from gapless.base import host
from gapless.base.config import NEEDS_ONE_RANK, EngineConfig
from gapless.cli import checks, rank_report
from gapless.cli.main import main
from gapless.cli.model_report import rows
from gapless.cli.rank_report import engine_rows, rank_rows
from gapless.comm.shared import COMM_NAME
from gapless.device import CudaDevice, build
from gapless.model import registry
from gapless.model.config import read_model_config

COMMON = {"vocab_size": 100, "max_position_embeddings": 512, "dtype": "bfloat16"}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 8}
QWEN2 = {
    **COMMON, **SIZES, "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2, "sliding_window": 1024,
    "use_sliding_window": True, "max_window_layers": 3,
}  # fmt: skip
GPT2 = {
    **COMMON, "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4,
    "n_positions": 512,
}  # fmt: skip
COHERE = {**COMMON, **SIZES, "architectures": ["CohereForCausalLM"], "model_type": "cohere"}


def write(directory, values):
    (directory / "config.json").write_text(json.dumps(values))
    return directory


REPORTS = (
    (
        QWEN2,
        {
            "architecture": ["Qwen2ForCausalLM"],
            "computed by": ["native: it has a native family"],
            "layers": ["4: 3 full, 1 window 1,024"],
            "KV": ["256 bytes a token in bfloat16", "for 512 tokens"],
            "kernels, CUDA": ["fused for few rows"],
            "adapters": ["q_proj", "down_proj"],
            "drafts": ["EAGLE-3", "MTP"],
        },
    ),
    (
        GPT2,
        {
            "layers": ["2: 2 full (no rope)"],
            "KV": ["256 bytes a token"],
            "kernels, CUDA": ["one by one", "LayerNorm", "GELU_TANH without a gate", "learned positions"],
            "adapters": ["c_attn"],
        },
    ),
    (COHERE, {"kernels, CUDA": ["one by one", "LayerNorm", "parallel norms"]}),
)


@pytest.mark.parametrize(("values", "wanted"), REPORTS)
def test_the_report_of_a_native_model_follows_from_its_config(tmp_path, values, wanted):
    found = dict(rows(read_model_config(write(tmp_path, values))))
    for name, parts in wanted.items():
        assert [part for part in parts if part not in found[name]] == [], found[name]


def test_mtp_layers_are_offered_when_they_are_computed(tmp_path):
    for values, offered in ((QWEN2, True), (GPT2, False), (COHERE, False)):
        assert ("MTP" in dict(rows(read_model_config(write(tmp_path, values))))["drafts"]) == offered


def test_doctor_reports_a_refused_model_in_one_line_and_fails(tmp_path, monkeypatch, capsys):
    only = [(name, getattr(checks, name)) for name in ()]
    for name in (
        "torch_version",
        "libraries",
        "machine",
        "memory",
        "accelerators",
        "native",
        "demo_model",
        "hub",
        "python",
    ):
        monkeypatch.setattr(checks, name, lambda: only)
    monkeypatch.setattr(checks, "devices", lambda config: only)
    monkeypatch.setattr(checks, "free_port", lambda port: only)
    write(tmp_path, {**COMMON, **SIZES, "architectures": ["MambaForCausalLM"], "model_type": "mamba"})
    assert main(["doctor", str(tmp_path), "--json"]) == 1
    (check,) = json.loads(capsys.readouterr().out)["checks"]
    assert check["status"] == "fail"
    assert check["detail"].startswith(f"refused: {tmp_path / 'config.json'}: model_type keeps a state")


def rank_lines(directory, **fields):
    config = EngineConfig(model=str(directory), device="cpu", **fields)
    return list(rank_rows(config, read_model_config(directory)))


def test_the_share_of_each_rank_is_reported_with_its_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "usable_cores", lambda: 2)
    first, second, refused, links = rank_lines(write(tmp_path, QWEN2), tensor_parallel_size=2)
    # Of 4 heads, 2 of keys and values, 48 units and 100 tokens. In a layer half the products, and whole norms.
    layer = 2 * (32 * (16 + 8 + 8) + 32 + 32 * 16 + 32 * 48 + 32 * 24) + 2 * 4 * 32
    of_layers = "heads {} of 4, heads of keys and values {} of 2, MLP units {} of 48, tokens {} of 100; {:.0f} kB of"
    tokens = 2 * 2 * 32
    assert first[:2] == ("rank 0", "ok") and second[:2] == ("rank 1", "ok")
    assert first[2].startswith(of_layers.format("0 to 1", 0, "0 to 23", "0 to 63", (4 * layer + 64 * tokens) / 1e3))
    assert second[2].startswith(of_layers.format("2 to 3", 1, "24 to 47", "64 to 99", (4 * layer + 36 * tokens) / 1e3))
    assert first[2].endswith("weights in bfloat16, 2,048 bytes a page of 16 tokens")  # of 256 bytes a token
    assert refused[1] == "ok" and all(f"{name}, {why}" in refused[2] for name, _, why in NEEDS_ONE_RANK)
    assert links == ("links", "ok", "2 ranks share the host's memory, and its 2 usable cores")
    monkeypatch.setattr(host, "usable_cores", lambda: 1)
    assert rank_lines(tmp_path, tensor_parallel_size=2)[-1][1] == "warn"


def test_ranks_that_a_model_does_not_divide_by_are_refused_by_name(tmp_path):
    ((name, status, text),) = rank_lines(write(tmp_path, QWEN2), tensor_parallel_size=3)
    assert (name, status) == ("ranks", "fail")
    assert text == "refused: tensor_parallel_size: 4 heads cannot be shared by 3 ranks: 1, 2 or 4 can"


def test_ranks_without_their_memory_are_refused_as_by_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "outcomes", {COMM_NAME: build.Outcome(None, "the cache cannot be written", 0.0)})
    ((_, status, text),) = rank_lines(write(tmp_path, QWEN2), tensor_parallel_size=2)
    assert status == "fail" and text.startswith("refused: tensor_parallel_size: ranks need C++ that is not there (the")


@pytest.mark.parametrize(
    ("ids", "apart", "wanted"),
    [
        ("0,1", (), [("ok", "the devices reach each other's memory")]),
        ("0,1", [(1, 0)], [("fail", "CUDA devices 0 and 1 do not reach each other's memory")]),
        ("1,1", (), [("warn", "unless NVIDIA's MPS runs"), ("ok", "")]),
        ("0,2", (), [("fail", "there is no CUDA device 2, torch sees 2: name others by --device-ids")]),
    ],
)
def test_links_between_the_devices_of_ranks_are_reported(tmp_path, monkeypatch, ids, apart, wanted):
    monkeypatch.setattr(rank_report, "device_class", lambda name: CudaDevice)
    monkeypatch.setattr(rank_report, "gpus", lambda: [("H", 1)] * 2)
    monkeypatch.setattr(rank_report, "reaches", lambda one, other: (one, other) not in apart)
    lines = rank_lines(write(tmp_path, QWEN2), tensor_parallel_size=2, device_ids=ids)[3:]
    assert [(status, text.endswith(end)) for (_, status, text), (_, end) in zip(lines, wanted, strict=True)] == [
        (status, True) for status, _ in wanted
    ]


def test_the_part_of_each_engine_is_reported(monkeypatch):
    monkeypatch.setattr(host, "usable_cores", lambda: 3)
    enough, few = (EngineConfig(device="cpu", data_parallel_size=count) for count in (3, 4))
    assert list(engine_rows(enough)) == [("engines", "ok", "3 engines share the host's memory, and its 3 usable cores")]
    assert next(engine_rows(few))[1] == "warn"
    monkeypatch.setattr(rank_report, "device_class", lambda name: CudaDevice)
    monkeypatch.setattr(rank_report, "gpus", lambda: [("H", 1)] * 3)
    config = EngineConfig(tensor_parallel_size=2, data_parallel_size=2)
    assert list(engine_rows(config)) == [
        ("engine 0", "ok", "CUDA devices 0, 1"),
        ("engine 1", "fail", "there is no CUDA device 3, torch sees 3: name others by --device-ids"),
    ]


def test_doctor_reports_a_missing_tokenizer_after_the_model(tmp_path):
    found = list(checks.model(EngineConfig(model=str(write(tmp_path, QWEN2)))))
    assert [check.name for check in found][:2] == ["architecture", "computed by"]
    assert found[-1].status == "fail" and "tokenizer.json" in found[-1].detail


def test_the_report_of_a_model_of_transformers_names_its_class_and_what_is_refused(tmp_path):
    values = {**QWEN2, "architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2"}
    found = dict(rows(read_model_config(write(tmp_path, values), impl=registry.Impl.AUTO)))
    assert found["computed by"] == "transformers: no native family reads it"
    assert "transformers.Starcoder2ForCausalLM" in found["class"] and "LoRA" in found["refused"]
    assert found["layers"] == "4" and "million" in found["parameters"]
