"""Weight files: every way in which they can be wrong is one error that names the file and the tensor."""

from __future__ import annotations

import json
import struct

import pytest
import torch
import transformers
from model_harness import SIZES, reference, reference_logits
from paging_driver import Driver, Sequence, load, prompt, relative_error
from safetensors.torch import load_file, save_file

from gapless.base.errors import CheckpointError

NAME = "model.layers.1.self_attn.k_proj.weight"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def single(tmp_path):
    reference("llama").save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    reference("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    return tmp_path


def edit(path, change):
    """Rewrite a safetensors file after `change` has altered its dict of tensors."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def edit_header(path, change):
    """Rewrite the raw JSON header of a safetensors file; the data stay."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def edit_index(directory, change):
    path = directory / INDEX
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def home(directory, tensor=NAME):
    return directory / json.loads((directory / INDEX).read_text())["weight_map"][tensor]


def refused(directory, *words, **options):
    with pytest.raises(CheckpointError) as caught:
        load(directory, **options)
    text = str(caught.value)
    assert all(str(word) in text for word in words), text
    assert "\n" not in text


BIAS, BEYOND = NAME.replace("weight", "bias"), "model.layers.2.mlp.up_proj.weight"
WRONG_TENSORS = {
    "missing": (lambda tensors: tensors.pop(NAME), (NAME, "missing")),
    "of another shape": (lambda tensors: {NAME: tensors[NAME][:, :5].contiguous()}, (NAME, "[16, 5]", "[16, 32]")),
    "transposed, of as many numbers": (lambda tensors: {NAME: tensors[NAME].t().contiguous()}, (NAME, "[32, 16]")),
    "left over": (lambda tensors: {BEYOND: torch.zeros(2)}, (BEYOND, "unexpected")),
    "a bias that the config denies": (lambda tensors: {BIAS: torch.zeros(16)}, (BIAS, "unexpected")),
    "of a wrong dtype": (lambda tensors: {NAME: tensors[NAME].to(torch.int8)}, (NAME, "I8", "BF16")),
}


@pytest.mark.parametrize("mistake", WRONG_TENSORS)
def test_a_wrong_tensor_is_named(single, mistake):
    change, words = WRONG_TENSORS[mistake]

    def apply(tensors):
        changed = change(tensors)
        tensors.update(changed if isinstance(changed, dict) else {})

    edit(single / SINGLE, apply)
    refused(single, single / SINGLE, *words)


def test_a_truncated_file_names_the_first_tensor_lost(single):
    path = single / SINGLE
    raw = path.read_bytes()
    path.write_bytes(raw[:-100])
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    last = max((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"][1])
    refused(single, path, "truncated", last)


@pytest.mark.parametrize("keep", (0, 5, 8, 60))
def test_a_file_cut_in_its_header_is_refused(single, keep):
    path = single / SINGLE
    path.write_bytes(path.read_bytes()[:keep])
    refused(single, path, "fetch it again")


MALFORMED = (
    None,
    [],
    {"dtype": "F32"},
    {"dtype": "F32", "shape": [16, -2], "data_offsets": [0, 1]},
    {"dtype": "F32", "shape": [16, 32], "data_offsets": [0]},
    {"dtype": "F32", "shape": 5, "data_offsets": [0, 1]},
)


@pytest.mark.parametrize("entry", MALFORMED)
def test_a_malformed_header_entry_is_refused(single, entry):
    edit_header(single / SINGLE, lambda header: header.update({NAME: entry}))
    refused(single, single / SINGLE, NAME, "malformed")


def test_offsets_that_do_not_fit_are_refused(single):
    def shorten(header):
        header[NAME]["data_offsets"][1] -= 4

    def overlap(header):
        header[NAME]["data_offsets"] = header[NAME.replace("k_proj", "v_proj")]["data_offsets"]

    edit_header(single / SINGLE, shorten)
    refused(single, single / SINGLE, NAME, "2044 bytes, which is not F32 [16, 32]")
    edit_header(single / SINGLE, overlap)
    refused(single, single / SINGLE, "safetensors")


def test_a_shard_that_is_missing_is_named_with_its_index(sharded):
    lost = home(sharded)
    lost.unlink()
    first = next(t for t, f in json.loads((sharded / INDEX).read_text())["weight_map"].items() if f == lost.name)
    refused(sharded, lost, INDEX, first, "no such file")


def test_a_shard_that_lacks_a_tensor_is_named(sharded):
    edit(home(sharded), lambda tensors: tensors.pop(NAME))
    refused(sharded, home(sharded), NAME, INDEX)


def test_an_index_that_lacks_a_tensor_and_its_shard_is_named(sharded):
    shard = home(sharded)
    edit(shard, lambda tensors: tensors.pop(NAME))
    edit_index(sharded, lambda index: index["weight_map"].pop(NAME))
    refused(sharded, sharded / INDEX, NAME, "missing")


def test_an_index_decides_between_two_shards_with_a_tensor(sharded, caplog):
    other, value = home(sharded, "model.norm.weight"), load_file(home(sharded))[NAME]
    assert other != home(sharded)
    edit(other, lambda tensors: tensors.update({NAME: torch.zeros_like(value)}))
    (found,) = Driver(load(sharded)).step(chunks=[(Sequence(), prompt(9))])
    assert relative_error(found, reference_logits(reference("llama"), prompt(9))) < 1e-5
    assert f"{other}: tensor {NAME!r} is not read: {INDEX} has it in {home(sharded).name}" in caplog.text
    edit_index(sharded, lambda index: index["weight_map"].pop(NAME))
    refused(sharded, NAME, "also in")


@pytest.mark.parametrize("family", ("qwen2", "qwen3"))
@pytest.mark.parametrize("kept", ("both equal", "other head", "one row", "head alone", "embedding alone", "in shards"))
def test_a_head_that_is_not_the_embedding_is_used_as_transformers_does(tmp_path, caplog, family, kept):
    theirs = reference(family)
    theirs.save_pretrained(tmp_path)
    embedding = theirs.model.embed_tokens.weight.data
    head = embedding.clone()
    if kept in ("other head", "in shards"):
        head = 0.2 * torch.randn(embedding.shape, generator=torch.Generator().manual_seed(9))
    if kept == "one row":
        head[-1] += 0.1
    extra = {} if kept == "embedding alone" else {"lm_head.weight": head.contiguous()}
    edit(tmp_path / SINGLE, lambda tensors: tensors.update(extra))
    if kept == "head alone":
        edit(tmp_path / SINGLE, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    if kept == "in shards":
        tensors = load_file(tmp_path / SINGLE)
        save_file({"lm_head.weight": tensors.pop("lm_head.weight")}, tmp_path / "b.safetensors")
        save_file(tensors, tmp_path / "a.safetensors")
        (tmp_path / SINGLE).unlink()
        where = {**dict.fromkeys(tensors, "a.safetensors"), "lm_head.weight": "b.safetensors"}
        (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    own = kept in ("other head", "one row", "in shards")
    model = load(tmp_path)
    assert model.config.spec.tied is not own
    assert ("'lm_head.weight' is not the embedding" in caplog.text) is own
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    tokens = prompt(12)
    (found,) = Driver(model).step(chunks=[(Sequence(), tokens)])
    assert relative_error(found, reference_logits(read.eval(), tokens)) < 1e-5


def test_weights_beside_those_that_count_are_named(single, caplog):
    for name in ("old.safetensors", "consolidated.safetensors"):
        (single / name).write_bytes((single / SINGLE).read_bytes())
    load(single)
    assert f"{single / 'old.safetensors'}: is not read: {SINGLE} counts" in caplog.text
    assert "consolidated" not in caplog.text


@pytest.mark.parametrize(
    "name", ("../model.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "x.bin", 5, None)
)
def test_an_index_that_points_elsewhere_is_refused(sharded, name):
    edit_index(sharded, lambda index: index["weight_map"].update({NAME: name}))
    refused(sharded, sharded / INDEX, NAME, repr(name))


def test_an_index_without_a_map_or_json_is_refused(sharded):
    for weight_map in (None, {}, []):
        edit_index(sharded, lambda index, given=weight_map: index.update(weight_map=given))
        refused(sharded, sharded / INDEX, "weight_map")
    (sharded / INDEX).write_text("{")
    refused(sharded, sharded / INDEX, "JSON")


def test_a_directory_without_a_file_of_tensors_is_refused(single):
    path = single / SINGLE
    path.write_bytes(struct.pack("<Q", 16) + b"<html>not found>" + bytes(64))
    refused(single, path, "not valid JSON")
    path.rename(single / "pytorch_model.bin")
    refused(single, single / "pytorch_model.bin", "pickle", "safetensors")
    (single / "pytorch_model.bin").unlink()
    refused(single, single, SINGLE, INDEX)
    path.mkdir()
    refused(single, path, "cannot be read")


def test_some_tensors_may_be_left_over(tmp_path):
    """Old checkpoints hold rotary frequencies, and some hold the tied head twice."""
    theirs = reference("qwen2")
    theirs.save_pretrained(tmp_path)
    head = theirs.model.embed_tokens.weight.data.clone()
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4), "lm_head.weight": head}
    edit(tmp_path / SINGLE, lambda tensors: tensors.update(extra))
    model = load(tmp_path)
    torch.testing.assert_close(model.embedding, theirs.model.embed_tokens.weight.data)


def test_files_may_be_links(single, tmp_path):
    """A download cache keeps a directory of links to the files."""
    links = tmp_path / "links"
    links.mkdir()
    for name in ("config.json", SINGLE):
        (links / name).symlink_to(single / name)
    assert load(links).vocab_size == SIZES["vocab_size"]


def test_dummy_weights_follow_the_seed_and_need_no_files(single):
    (single / SINGLE).unlink()
    before = torch.random.get_rng_state()
    first, again, other = (load(single, load_format="dummy", seed=seed).embedding for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert abs(first.std().item() - 0.02) < 0.002
    assert len(torch.unique(first, dim=0)) == len(first)
    assert torch.equal(torch.random.get_rng_state(), before), "the process's own random numbers go on"
    model = load(single, load_format="dummy")
    assert torch.equal(model.last_norm.weight, torch.ones(32))
    assert all(torch.equal(block.first_norm, torch.ones(32)) for block in model.blocks)
