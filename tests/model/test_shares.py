"""Ranks that share a model: their sums are one rank's results, and their weights are cuts of one rank's."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from adapter_files import write_adapter
from model.format_cases import CASES, write_checkpoints
from model.model_harness import EVERY, reference
from model.paging_driver import CPU, VOCAB, Driver, Sequence, prompt, relative_error
from model.test_adapters import MODULES, AdaptedDriver
from model.test_gguf import Type, write
from model.thread_ranks import on_ranks
from sharpest import sharpest
from tiny_models import tiny_config

from gapless.base.config import EngineConfig
from gapless.base.errors import ConfigError
from gapless.base.files import SINGLE
from gapless.base.share import Share
from gapless.comm.alone import ONE_RANK
from gapless.demo import weights_dir
from gapless.model.adapters import Adapter
from gapless.model.config import read_model_config, resolve_model_dir
from gapless.model.dummy import fill_dummy
from gapless.model.fingerprint import weights_digest
from gapless.model.loader import load_model, read_params
from gapless.model.params import PRODUCTS, allocate
from gapless.model.quantization import asked_quantization
from gapless.model.shares import check_share
from gapless.model.update import put_weights, read_weights

WORLDS = sharpest((4, 2))
TOLERANCE = 1e-5


def logits_of(config, group=None, steps=12):
    """The logits of a prompt in two chunks and of greedy tokens after it, and these tokens."""
    model = load_model(config, CPU, **({} if group is None else {"group": group}))
    driver, sequence, tokens = Driver(model, pages=24, page_size=4), Sequence(), prompt(19, 3)
    found = [driver.step(chunks=[(sequence, part)])[0] for part in (tokens[:7], tokens[7:])]
    taken = []
    for _ in range(steps):
        last = found[-1][-1:]
        token = torch.full((1,), 0, dtype=torch.int32)
        if group is None or group.share.leads:
            token[0] = int(last.argmax())
        token = token if group is None else group.tell(token)
        taken.append(int(token))
        found.append(driver.step(decode=[(sequence, int(token))])[0])
    return torch.cat(found), taken


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", EVERY)
def test_ranks_of_a_family_compute_the_logits_and_tokens_of_one(tmp_path, name, world):
    reference(name).save_pretrained(tmp_path)
    config = EngineConfig(model=str(tmp_path), dtype="float32", max_model_len=80)
    wanted, tokens = logits_of(config)
    (got, taken), *others = on_ranks(world, lambda group: logits_of(config, group))
    assert relative_error(got, wanted) < TOLERANCE
    assert taken == tokens
    assert all(one.shape == (len(wanted), 0) for one, _ in others)
    assert wanted.shape[1] == VOCAB


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ("qwen3", "gpt2", "cohere-biased", "phi3-part"))
def test_rows_with_adapters_have_the_logits_of_one_rank_when_ranks_share_them(tmp_path, name, world):
    reference(name).save_pretrained(tmp_path)
    config = EngineConfig(model=str(tmp_path), lora_modules=("x=y",), max_loras=2)
    named = MODULES.get(name.partition("-")[0], ([], []))[0]
    kind = {"rank": 5, "size": 0.2} | ({"modules": named} if named else {})
    path = write_adapter(tmp_path / "adapter", read_model_config(tmp_path), 3, **kind)

    def logits(group=ONE_RANK):
        model = load_model(config, CPU, group=group)
        tables = model.adapters
        Adapter.read(path, model.config, 16).fill(tables.slot(2), model.config, tables.rank, tables.share)
        driver, rows = AdaptedDriver(model), [Sequence(), Sequence()]
        driver.slots = [2, 0]
        found = driver.step(chunks=[(row, prompt(9, i)) for i, row in enumerate(rows)])
        return torch.cat([*found, *driver.step(decode=[(row, 7) for row in rows])])

    wanted, (got, *_) = logits(), on_ranks(world, logits)
    assert relative_error(got, wanted) < TOLERANCE
    assert relative_error(wanted[:9], logits_of(config, steps=0)[0][:9]) > 0.01


SHARP = ("fp8_128", "ct_int4_zeros", "gptq_order", "awq")
FORMATS = sharpest(sorted(CASES, key=lambda case: case.name not in SHARP), len(SHARP))
DENSE_NAMES = ("gpt2", "cohere-biased", "phi3-part", "olmo3", "llama-biased", "qwen3", "gpt2-wide", "gemma2-biased")


def cut_of(config, whole, rank, world):
    """The tensors of a rank's share of a layer, cut here from one rank's parameters by the rule of heads alone."""
    at, hidden = config.spec.layer.attention, config.spec.hidden_size
    dim, parts = at.head_dim, {}
    heads = range(rank * at.heads // world, (rank + 1) * at.heads // world)
    keys = sorted({head // (at.heads // at.kv_heads) for head in heads})
    rows = [*heads, *(at.heads + key for key in keys), *(at.heads + at.kv_heads + key for key in keys)]
    rows = torch.tensor([row * dim + i for row in rows for i in range(dim)])
    inputs = torch.tensor([head * dim + i for head in heads for i in range(dim)])
    width = config.spec.layer.mlp.width
    middle = torch.arange(rank * width // world, (rank + 1) * width // world)
    many = 2 if config.spec.layer.mlp.gated else 1
    both = torch.cat([middle + i * width for i in range(many)])
    for name, index in (("qkv", rows), ("gate_up", both)):
        matrix = getattr(whole, name)
        parts[name] = [tensor[index] for tensor in matrix.tensors], None if matrix.bias is None else matrix.bias[index]
    for name, index in (("output", inputs), ("down", middle)):
        matrix = getattr(whole, name)
        wide = matrix.values()[:, index]
        parts[name] = [wide], matrix.bias if rank == 0 else None
    norms = None if whole.qk_norm is None else whole.qk_norm[[*heads, *(at.heads + key for key in keys)]]
    assert hidden == len(whole.output.values())
    return parts, norms


def assert_cut(config, whole, own, rank, world):
    """Every tensor of a rank's parameters is the same bits as the part of one rank's."""
    for layer, part in zip(whole.layers, own.layers, strict=True):
        wanted, norms = cut_of(config, layer, rank, world)
        for name in PRODUCTS:
            matrix, (tensors, bias) = getattr(part, name), wanted[name]
            if name in ("output", "down"):
                assert matrix.values().equal(tensors[0]), name
            else:
                assert all(map(torch.equal, matrix.tensors, tensors)), name
            assert (matrix.bias is None) == (bias is None)
            assert bias is None or matrix.bias.equal(bias)
            assert matrix.layout == getattr(layer, name).layout
        assert norms is None or part.qk_norm.equal(norms)
        for mine, theirs in zip(part.norms(), layer.norms(), strict=True):
            assert mine.weight.equal(theirs.weight)
    for name in ("embedding", "head"):
        assert (own.head is own.embedding) == (whole.head is whole.embedding)
        tokens = slice(*config.spec.own_tokens(own.share))
        assert getattr(own, name).equal(getattr(whole, name)[tokens])
    assert own.positions is None or own.positions.equal(whole.positions)


def shares_of(config, read, world):
    """One rank's parameters, and those of each rank of a world; `read` fills them."""
    made = [
        allocate(config, torch.float32, CPU, share=share)
        for share in (Share(), *(Share(r, world) for r in range(world)))
    ]
    return [read(one) for one in made]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", sharpest(DENSE_NAMES, 4))
def test_a_share_of_a_checkpoint_is_the_cut_of_the_whole(tmp_path, name, world):
    reference(name).save_pretrained(tmp_path)
    config = read_model_config(tmp_path)
    whole, *own = shares_of(config, lambda params: read_params(params, tmp_path, config), world)
    for rank, params in enumerate(own):
        assert_cut(config, whole, params, rank, world)


@pytest.mark.parametrize("world", sharpest((3, 2)))
@pytest.mark.parametrize("kind", (None, "fp8", "int8", "int4"))
@pytest.mark.parametrize("name", ("qwen2", "llama-biased", "gpt2"))
def test_a_share_of_dummy_weights_is_the_cut_of_the_whole(tmp_path, name, kind, world):
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 3 if world == 3 else 2, "hidden_size": 768}
    reference(name, **sizes, intermediate_size=768).save_pretrained(tmp_path)
    config = read_model_config(tmp_path)
    config = replace(config, quantization=kind and asked_quantization(kind, None))

    def fill(params):
        fill_dummy(params, 5, config)
        return params

    whole, *own = shares_of(config, fill, world)
    for rank, params in enumerate(own):
        assert_cut(config, whole, params, rank, world)


REFUSED = {
    "heads": ({"num_attention_heads": 14, "num_key_value_heads": 14, "intermediate_size": 56, "head_dim": 8}, 4,
              "tensor_parallel_size: 14 heads cannot be shared by 4 ranks: 1, 2, 7 or 14 can"),
    "keys": ({"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 48, "head_dim": 8}, 3,
             "tensor_parallel_size: 4 heads of keys and values cannot be shared by 3 ranks: 1, 2, 4 or 12 can"),
    "width": ({"intermediate_size": 55}, 4,
              "tensor_parallel_size: an MLP of width 55 cannot be shared by 4 ranks: 1 can"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_share_of_heads_or_widths_that_do_not_divide_is_refused_with_what_can(tmp_path, case):
    changes, world, text = REFUSED[case]
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(**changes)))
    with pytest.raises(ConfigError) as caught:
        check_share(read_model_config(tmp_path), world)
    assert str(caught.value) == text
    check_share(read_model_config(tmp_path), 1)


def test_a_share_of_groups_of_inputs_that_ranks_would_cut_is_refused_with_what_can(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(hidden_size=256, head_dim=64, intermediate_size=384)))
    config = replace(read_model_config(tmp_path), quantization=asked_quantization("int4", None))
    text = "384 inputs of down in int4 by 128, cut at multiples of 128, cannot be shared by 2 ranks: 1 can"
    with pytest.raises(ConfigError, match=text):
        check_share(config, 2)


def test_a_share_of_a_model_of_the_transformers_backend_is_refused_by_name():
    config = EngineConfig(model="demo", model_impl="transformers")
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: .* Transformers backend, which has one rank"):
        on_ranks(2, lambda group: load_model(config, CPU, group=group))


@pytest.mark.parametrize(
    ("tokens", "world"), ((97, 2), (97, 4), (48, 3), (47, 3), (32, 3), (33, 3), (151_936, 8), (5, 5))
)
def test_a_vocabulary_is_shared_in_whole_blocks_if_each_rank_gets_one(tokens, world):
    spec = replace(read_model_config(weights_dir()).spec, vocab_size=tokens)
    parts = [spec.own_tokens(Share(rank, world)) for rank in range(world)]
    assert [first for first, _ in parts] == [0, *(last for _, last in parts[:-1])]
    assert parts[-1][1] == tokens and all(first < last for first, last in parts)
    if tokens >= 16 * world:
        assert not any(first % 16 for first, _ in parts)


def test_digests_of_weights_differ_by_contents_sizes_and_seeds(tmp_path):
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        reference("llama").save_pretrained(path)
    one, other, third = ((path / SINGLE) for path in paths)
    assert weights_digest(paths[0]) == weights_digest(paths[1])
    data = bytearray(one.read_bytes())
    data[-1] ^= 1
    other.write_bytes(data)
    third.write_bytes(bytes(data) + b"\0")
    assert len({weights_digest(path) for path in paths}) == 3
    assert weights_digest(paths[0], 1) == weights_digest(paths[1], 1) != weights_digest(paths[0], 2)


@pytest.mark.parametrize("case", FORMATS, ids=lambda case: case.name)
def test_a_share_of_a_quantised_checkpoint_is_the_cut_of_the_whole(tmp_path, case):
    """Three heads of one key; 768 inputs of `down` are whole groups for each rank."""
    folder, _ = write_checkpoints(tmp_path, case, hidden_size=384, head_dim=128, intermediate_size=768)
    config = read_model_config(folder)
    check_share(config, 3)
    whole, *own = shares_of(config, lambda params: read_params(params, folder, config), 3)
    for rank, params in enumerate(own):
        assert_cut(config, whole, params, rank, 3)


@pytest.mark.parametrize("kind", ("int8", "int4", "fp8"))
@pytest.mark.parametrize("name", ("cohere", "gpt2"))
def test_a_share_of_weights_rounded_at_load_is_the_cut_of_the_whole(tmp_path, name, kind):
    """Interleaved ropes put rows of queries and keys in another order, and GPT-2's weights are turned."""
    reference(name, hidden_size=256, intermediate_size=256, num_hidden_layers=1).save_pretrained(tmp_path)
    config = read_model_config(tmp_path)
    config = replace(config, quantization=asked_quantization(kind, None))
    whole, *own = shares_of(config, lambda params: read_params(params, tmp_path, config), 2)
    for rank, params in enumerate(own):
        assert_cut(config, whole, params, rank, 2)


@pytest.mark.parametrize("changes", ({"num_key_value_heads": 1}, {"num_key_value_heads": 3, "vocab_size": 100}))
@pytest.mark.parametrize("quantization", ("none", "fp8"))
def test_three_ranks_compute_the_logits_of_one_when_they_repeat_keys_or_have_one_each(tmp_path, changes, quantization):
    sizes = {"num_attention_heads": 6, "hidden_size": 96, "intermediate_size": 57, "vocab_size": VOCAB}
    reference("llama-biased", **sizes | changes).save_pretrained(tmp_path)
    config = EngineConfig(model=str(tmp_path), max_model_len=80, quantization=quantization)
    wanted, tokens = logits_of(config)
    (got, taken), *_ = on_ranks(3, lambda group: logits_of(config, group))
    assert relative_error(got, wanted) < TOLERANCE
    assert taken == tokens


def test_ranks_measure_the_scales_of_keys_and_values_that_one_rank_measures(tmp_path):
    """Each has other heads; equal scales make equal names of pages, and numbers of one rank."""
    model = reference("qwen3-mha")
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight[-16:] *= 64  # the last head, of the last rank
    model.save_pretrained(tmp_path)
    config = EngineConfig(model=str(tmp_path), max_model_len=80, kv_cache_dtype="fp8")

    def scales(group=ONE_RANK):
        model = load_model(config, CPU, group=group)
        before = model.kv_scales.clone()
        new = read_weights(tmp_path, model.config, model.dtype, group.share)
        new.params.layers[1] = new.params.layers[1]._replace(qk_norm=new.params.layers[1].qk_norm * 64)
        assert all(put_weights(model, new.params))
        return before, model.kv_scales, model.kv_origin

    wanted = scales()
    assert not wanted[0].equal(wanted[1])
    for found in on_ranks(4, scales):
        assert found[0].equal(wanted[0]) and found[1].equal(wanted[1])
        assert found[2] == wanted[2]


def test_new_weights_of_ranks_give_the_logits_of_one_with_them(tmp_path):
    for i, name in enumerate("ab"):
        model = reference("llama-biased")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * i * torch.randn_like(parameter))
        model.save_pretrained(tmp_path / name)
    first, second = (EngineConfig(model=str(tmp_path / name), max_model_len=80) for name in "ab")
    tokens = prompt(11, 2)

    def logits(group, config=first, new=second):
        model = load_model(config, CPU, group=group)
        if new is not None:
            read = read_weights(tmp_path / "b", model.config, model.dtype, group.share)
            assert all(put_weights(model, read.params))
        return Driver(model, pages=24).step(chunks=[(Sequence(), tokens)])[0]

    wanted, before = logits(ONE_RANK, second, None), logits(ONE_RANK, first, None)
    got, *_ = on_ranks(2, logits)
    assert relative_error(got, wanted) < TOLERANCE < relative_error(before, wanted)


@pytest.mark.parametrize("kinds", ([Type.Q8_0], [Type.Q4_0, Type.Q6_K], [Type.F16]), ids=str)
@pytest.mark.parametrize("architecture", ("llama", "qwen2"))
def test_a_share_of_a_gguf_file_is_the_cut_of_the_whole(tmp_path, monkeypatch, architecture, kinds):
    """Rows of queries and keys are turned in files of llama."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file, _ = write(tmp_path, architecture, kinds)
    folder = resolve_model_dir(str(file))
    config = read_model_config(folder)
    whole, *own = shares_of(config, lambda params: read_params(params, folder, config), 4)
    for rank, params in enumerate(own):
        assert_cut(config, whole, params, rank, 4)
