"""Families of transformers behind the `Model` protocol: logits of the class's own eager run, or a refusal."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from paging_driver import relative_error
from torch import nn
from transformers_rows import REFUSED, SERVED, VOCAB, Row, make

from gapless.base.config import EngineConfig
from gapless.base.errors import CheckpointError, ConfigError
from gapless.engine import checkers
from gapless.kernels import native, plain
from gapless.model import transformers_backend, transformers_load
from gapless.model.config import read_model_config
from gapless.model.fields import Fields
from gapless.model.loader import load_model
from gapless.model.self_check import paged_logits, tokens
from gapless.model.transformers_config import count_sizes

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def _connected() -> None:
    checkers.connect()


def saved(row: Row, path: Path, **fields: object) -> Path:
    """The directory of a model, with some fields of its config.json changed."""
    make(row).save_pretrained(path)
    if fields:
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return path


def load(
    path: Path, dtype: torch.dtype = torch.float32, max_model_len: int = 64
) -> transformers_backend.TransformersModel:
    return transformers_load.load(path, dtype, CPU, native.load() or plain.KERNELS, max_model_len)


QUICK = ("deepseek-v3", "gemma3", "gpt-oss", "gpt2", "llama4", "mixtral", "olmo2", "opt", "phi3-longrope")


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in QUICK else pytest.mark.seeds) for name in SERVED]
)
def test_a_model_has_the_logits_of_its_class_when_it_runs_over_pages(family: str, tmp_path: Path) -> None:
    net = make(SERVED[family])
    net.save_pretrained(tmp_path)
    model = load(tmp_path)
    ids = tokens(VOCAB, CPU)
    net.set_attn_implementation("eager")
    with torch.no_grad():
        want, got = net(ids[None], use_cache=False).logits[0], paged_logits(model, ids)
    assert relative_error(got, want) < 2e-5


@pytest.mark.parametrize("family", REFUSED)
def test_a_model_is_refused_by_its_reason_when_it_cannot_be_computed(family: str, tmp_path: Path) -> None:
    row, why = REFUSED[family]
    with pytest.raises(CheckpointError, match=why) as raised:
        load(saved(row, tmp_path))
    assert str(tmp_path / "config.json") in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "modeling.py"}}, "auto_map asks for code"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quant_method"),
        ({"vision_config": {"hidden_size": 8}}, "pictures"),
        ({"model_type": "no-such-model"}, "model_type must be 'olmo'"),
        ({"architectures": ["OlmoForSequenceClassification"]}, "a decoder of transformers"),
        ({"architectures": None}, "must name a model's class"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"transformers_weights": "https://example.com/x"}, "its class fails with ValueError"),
    ],
)
def test_a_config_is_refused_by_its_field_when_it_asks_for_something_else(
    fields: dict[str, object], why: str, tmp_path: Path
) -> None:
    saved(SERVED["olmo"], tmp_path, **fields)
    with pytest.raises(CheckpointError, match=why):
        read_model_config(tmp_path, impl="transformers")
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda found: found.pop("model.layers.1.mlp.up_proj.weight"), "up_proj.weight' is missing"),
        (lambda found: found.update({"model.extra.weight": torch.ones(3)}), "unexpected tensor 'model.extra.weight'"),
        (lambda found: found.update({"lm_head.weight": torch.ones(3, 64)}), "lm_head.weight' has shape"),
    ],
    ids=["missing", "unexpected", "of another shape"],
)
def test_a_checkpoint_is_refused_by_its_tensor_when_it_does_not_fit(change, why: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    saved(SERVED["olmo"], tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    change(found)
    save_file(found, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=why):
        load(tmp_path)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"position_bias": torch.ones(1)}, "the argument position_bias"),
        ({"head_mask": torch.ones(4)}, "the argument head_mask"),
        ({"dropout": 0.1}, "the argument dropout"),
        ({"is_causal": False}, "the argument is_causal"),
        ({"attention_mask": torch.ones(1)}, "a mask of its own"),
        ({"s_aux": torch.ones(4)}, "s_aux"),
    ],
)
def test_a_layer_is_refused_by_the_argument_when_attention_does_not_honour_it(
    given: dict[str, object], why: str, tmp_path: Path
) -> None:
    usual, name = transformers_backend.our_attention, transformers_backend.OURS
    transformers_backend.AttentionInterface.register(
        name,
        lambda module, q, k, v, mask=None, **known: usual(module, q, k, v, **{"attention_mask": mask} | known | given),
    )
    try:
        with pytest.raises(CheckpointError, match=why):
            load(saved(SERVED["olmo"], tmp_path))
    finally:
        transformers_backend.AttentionInterface.register(name, usual)


def test_a_model_is_refused_when_its_class_computes_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_backend.Survey, "read", lambda *args: transformers_backend.Attend(0.2))
    with pytest.raises(CheckpointError, match="computes something that this engine does not"):
        load(saved(SERVED["olmo"], tmp_path))


@pytest.mark.parametrize("window", [4, 5, 7])
def test_a_window_reads_the_last_tokens_alone_when_it_is_shorter_than_a_prompt(window: int, tmp_path: Path) -> None:
    row = SERVED["mistral"]
    net = make(row._replace(fields=row.fields | {"sliding_window": window}))
    net.save_pretrained(tmp_path)
    net.set_attn_implementation("eager")
    ids = tokens(VOCAB, CPU)
    with torch.no_grad():
        want = net(ids[None], use_cache=False).logits[0]
    assert relative_error(paged_logits(load(tmp_path), ids), want) < 2e-5


def test_a_layer_has_no_window_when_only_the_config_has_one(tmp_path: Path) -> None:
    model = load(saved(SERVED["olmo"], tmp_path, sliding_window=6))
    assert [layer.attend.size for layer in model.layers.values()] == [0, 0]


def test_long_factors_serve_all_positions_when_sequences_may_be_longer_than_the_original(tmp_path: Path) -> None:
    rope = SERVED["phi3-longrope"].fields["rope_parameters"] | {"original_max_position_embeddings": 32}
    path = saved(SERVED["phi3-longrope"], tmp_path, rope_parameters=rope, original_max_position_embeddings=32)
    inverse = next(b for n, b in load(path).base.named_buffers() if n == "rotary_emb.inv_freq")
    assert inverse[0] == 0.5  # 1 / (2.0 * theta ** 0)


def test_the_first_layers_have_every_kind_when_a_model_is_cut(tmp_path: Path) -> None:
    model = load(saved(SERVED["cohere2"], tmp_path)).first_layers()
    assert len(model.base.layers) == 4  # three windows, then one without
    assert len(load(saved(SERVED["olmo"], tmp_path / "olmo")).first_layers().base.layers) == 1


def test_weights_in_bfloat16_are_checked_in_float32(tmp_path: Path) -> None:
    model = load(saved(SERVED["gpt-oss"], tmp_path), torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert torch.isfinite(paged_logits(model, tokens(VOCAB, CPU))).all()


def test_norms_and_products_are_our_kernels_when_they_compute_the_same(tmp_path: Path) -> None:
    for family, weight in (("gemma", 1.0), ("olmo2", 0.0)):
        net = make(SERVED[family])
        norm = net.model.norm
        assert isinstance(norm, nn.Module)
        own = norm.weight.detach().clone()
        transformers_backend.swap(net, plain.KERNELS, products=True)
        assert torch.equal(net.model.norm.weight, own + weight)
        kinds = {type(part).__name__ for part in net.model.layers.modules()}
        assert "Linear" not in kinds
        assert not any(kind.endswith("RMSNorm") for kind in kinds)


@pytest.mark.parametrize("asked", [{"lora_modules": ("a=/x",)}, {"batch_invariant": True}])
def test_a_feature_is_refused_by_name_when_the_backend_lacks_it(asked: dict[str, object], tmp_path: Path) -> None:
    path = saved(SERVED["olmo"], tmp_path)
    with pytest.raises(ConfigError, match=next(iter(asked))):
        load_model(EngineConfig(model=str(path), **asked), CPU)


def test_nothing_is_fetched_when_a_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(SERVED["gpt-oss"], tmp_path)

    def refuse(*args: object) -> None:
        raise AssertionError("something was asked of the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    load(path)


def test_transformers_is_not_imported_when_a_native_model_is_loaded() -> None:
    code = (
        "import sys, torch; from gapless.base.config import EngineConfig; from gapless.model.loader import load_model;"
        "load_model(EngineConfig(model='demo'), torch.device('cpu')); assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_config_chooses_no_implementation_of_attention(tmp_path: Path) -> None:
    asked = {"_attn_implementation": "some/kernel", "attn_implementation": "flash_attention_2"}
    saved(SERVED["olmo"], tmp_path, **asked, experts_implementation="deepgemm")
    assert count_sizes(Fields.of_file(tmp_path / "config.json")).layers == 2
    load(tmp_path)


def test_llama4_is_refused_when_sequences_reach_its_scaled_positions(tmp_path: Path) -> None:
    saved(SERVED["llama4"], tmp_path, floor_scale=64)
    load(tmp_path, max_model_len=63)
    with pytest.raises(CheckpointError, match="attn_temperature_tuning scales from floor_scale"):
        load(tmp_path, max_model_len=64)


def test_weights_are_copies_when_the_file_has_their_dtype(tmp_path: Path) -> None:
    model = load(saved(SERVED["olmo"], tmp_path))
    before = model.base.embed_tokens.weight.clone()
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(model.base.embed_tokens.weight, before)
