"""GGUF files, written by the rules of llama.cpp's converter: the same numbers, tokens and texts as the checkpoint."""

from __future__ import annotations

import json
import struct

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from gapless import LLM, SamplingParams
from gapless.base.errors import CheckpointError, ConfigError
from gapless.base.files import SINGLE
from gapless.cli.main import main
from gapless.kernels.kinds import WeightKind
from gapless.model.config import read_model_config, resolve_model_dir
from gapless.model.formats.of_model import layouts_of
from gapless.model.gguf_tokenizer import tokenizer_files
from gapless.model.loader import read_params
from gapless.model.params import PRODUCTS, allocate

Type = gguf.GGMLQuantizationType
SIZES = {
    "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 512, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
}  # fmt: skip
MODELS = {
    "llama": (transformers.LlamaConfig, {"tie_word_embeddings": False}),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 64, "tie_word_embeddings": True}),
}
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
TEXTS = ["Hello, world!  It's 1234 o'clock.\n\n", "naïve café ☕ 你好 <|end|>", " x", "def f(x):\n    return x\t# ok"]


def name_of(name):
    module, _, kind = name.rpartition(".")
    if module in NAMES:
        return f"{NAMES[module]}.{kind}"
    _, _, number, part = module.split(".", 3)
    return f"blk.{number}.{NAMES[part]}.{kind}"


def turned(weight, heads):
    """`permute` of llama.cpp's converter, which it applies to queries and keys of Llama."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def blocks_of(weight, kind):
    """A weight's blocks, and the numbers that the package reads of them; of kinds that it cannot write random ones."""
    if kind in (Type.F16, Type.F32):
        data = weight.astype(np.float16 if kind is Type.F16 else np.float32)
        return data, data.astype(np.float32)
    try:
        data = gguf.quantize(weight, kind)
    except NotImplementedError:
        size, nbytes = gguf.GGML_QUANT_SIZES[kind]
        data = np.random.default_rng(1).integers(0, 256, (len(weight), weight.shape[1] // size, nbytes), np.uint8)
        places = (0, 2) if kind is Type.Q4_K else (nbytes - 2,)
        for place in places:  # scales that are small and finite
            data[:, :, place : place + 2] = np.array([0.001], np.float16).view(np.uint8)
        data = data.reshape(len(weight), -1)
    return data, gguf.dequantize(data, kind)


def tokenizer_of():
    """A tokenizer of 300 tokens, the first of which is control."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(QWEN2), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(TEXTS * 3, trainers.BpeTrainer(vocab_size=300, initial_alphabet=sorted(
        pre_tokenizers.ByteLevel.alphabet()), special_tokens=["<|end|>"]))  # fmt: skip
    return made


QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write(folder, architecture, kinds, change=None):
    """A toy as model.gguf, and as a checkpoint of the numbers in it."""
    tokenizer = tokenizer_of()
    vocab = tokenizer.get_vocab_size()
    made, options = MODELS[architecture]
    config = made(**SIZES, **options, vocab_size=vocab, eos_token_id=0)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    writer = gguf.GGUFWriter(folder / "model.gguf", architecture)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    plain = {}
    for i, (name, tensor) in enumerate(model.state_dict().items()):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weight, part = tensor.numpy() * 3, name.split(".")[-2]
        turns = architecture == "llama" and part in heads
        weight = turned(weight, heads[part]) if turns else weight
        kind = kinds[i % len(kinds)] if weight.ndim == 2 else Type.F32
        data, numbers = blocks_of(weight, kind)
        writer.add_tensor(name_of(name), data, raw_dtype=kind)
        if turns:
            numbers = numbers.reshape(heads[part], -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        plain[name] = torch.from_numpy(np.ascontiguousarray(numbers))
    describe(writer, config, tokenizer)
    if change:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder / "plain")
    save_file(plain, folder / "plain" / SINGLE)
    tokenizer.save(str(folder / "plain" / "tokenizer.json"))
    return folder / "model.gguf", folder / "plain"


def describe(writer, config, tokenizer):
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(5e5)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head)
    writer.add_value_length(head)
    vocab = sorted(tokenizer.get_vocab(), key=tokenizer.token_to_id)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(vocab)
    writer.add_token_types([3 if token == "<|end|>" else 1 for token in vocab])
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0].content }}")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


KINDS = [[Type.F32], [Type.F16], [Type.Q8_0], [Type.Q4_0], [Type.Q4_K, Type.Q6_K], [Type.Q4_0, Type.Q6_K, Type.Q8_0]]


@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: "-".join(kind.name for kind in kinds))
@pytest.mark.parametrize("architecture", MODELS)
def test_a_file_has_the_numbers_that_its_own_library_reads(tmp_path, architecture, kinds):
    file, plain = write(tmp_path, architecture, kinds)
    found = {}
    for key, folder in (("gguf", resolve_model_dir(str(file))), ("plain", plain)):
        config = read_model_config(folder)
        params = allocate(config, torch.float32, torch.device("cpu"))
        read_params(params, folder, config)
        found[key] = config.spec, params
    (spec, ours), (wanted, theirs) = found["gguf"], found["plain"]
    assert spec == wanted
    assert ours.embedding.equal(theirs.embedding) and ours.head.equal(theirs.head)
    layouts = set()
    for one, other in zip(ours.layers, theirs.layers, strict=True):
        for name in PRODUCTS:
            assert getattr(one, name).values().equal(getattr(other, name).tensors[0]), name
            layouts.add(str(getattr(one, name).layout))
        assert all(a.weight.equal(b.weight) for a, b in zip(one.norms(), other.norms(), strict=True))
    kept = {Type.Q8_0: "int8 by 32", Type.Q4_0: "int4 by 32"}
    if len(kinds) == 1:
        assert layouts == {kept.get(kinds[0], WeightKind.DENSE)}


def test_blocks_that_no_kernel_has_are_told_when_they_are_multiplied_out(tmp_path):
    for kind, layout in ((Type.Q6_K, ("dense", "no kernel has Q6_K")), (Type.Q4_0, ("int4 by 32", ""))):
        (folder := tmp_path / kind.name).mkdir()
        file, _ = write(folder, "llama", [kind])
        assert {*layouts_of(read_model_config(resolve_model_dir(str(file))))} == {layout}


def test_a_file_is_served_with_its_tokenizer_and_template(tmp_path):
    file, plain = write(tmp_path, "llama", [Type.F16])
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    options = {"device": "cpu", "dtype": "float32"}
    with LLM(str(file), **options) as llm, LLM(str(plain), **options) as other:
        for text in TEXTS:
            (one,), (two,) = (made.generate([text], params, use_tqdm=False) for made in (llm, other))
            assert one.prompt_token_ids == two.prompt_token_ids
            assert one.outputs[0].token_ids == two.outputs[0].token_ids and one.outputs[0].text == two.outputs[0].text
        assert llm.chat([{"role": "user", "content": "Hi"}], params, use_tqdm=False)[0].outputs[0].token_ids


def test_pieces_of_sentencepiece_are_merged_by_their_scores():
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "c", "ab", "▁ab", "bc"]
    scores = [0.0] * 259 + [-9.0, -9.0, -9.0, -9.0, -2.0, -3.0, -1.0]
    kinds = [2, 3, 3] + [6] * 256 + [1] * 7
    files = tokenizer_files({
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": pieces, "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    })  # fmt: skip
    made = Tokenizer.from_str(json.dumps(files["tokenizer.json"]))
    assert made.encode("ab").tokens == ["<s>", "▁ab"]
    assert made.encode("abc").tokens == ["<s>", "▁", "a", "bc"], "bc scores more than ab"
    assert made.encode("é").tokens == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert made.decode(made.encode("abc é").ids) == "abc é"


def lacks(name):
    return lambda writer: writer.kv_data[0].pop(f"llama.{name}")


def has(name, value):
    kind = gguf.GGUFValueType.get_type(value)
    return lambda writer: writer.kv_data[0].__setitem__(f"llama.{name}", gguf.GGUFValue(value, kind))


WHOLE, EPSILON = "must be a whole number above 0, got", "llama.attention.layer_norm_rms_epsilon must be a number above"
REFUSED = [
    *((lacks(name), f"model.gguf: llama.{name} {WHOLE} None")
      for name in ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count")),
    *((has("attention.head_count", value), f"llama.attention.head_count {WHOLE} {value!r}")
      for value in (0, "four", 4.0, True, -4)),
    (has("attention.head_count_kv", 0), f"llama.attention.head_count_kv {WHOLE} 0"),
    (has("rope.freq_base", "much"), "llama.rope.freq_base must be a number above 0, got 'much'"),
    (lacks("attention.layer_norm_rms_epsilon"), f"{EPSILON} 0, got None"),
    (has("attention.layer_norm_rms_epsilon", float("nan")), f"{EPSILON} 0, got nan"),
    (lambda writer: writer.tensors[0].pop("token_embd.weight"), "token_embd.weight must have two dimensions, got 0"),
    (lambda writer: writer.kv_data[0].__setitem__("general.architecture", gguf.GGUFValue(
        ["llama"], gguf.GGUFValueType.ARRAY)), r"general.architecture must be one of .*got \['llama'\]"),
    (lambda writer: writer.add_expert_count(4), "llama.expert_count is not known"),
    (lambda writer: writer.add_rope_dimension_count(16), "rope.dimension_count must be the size of a head, 32"),
    (lambda writer: writer.add_tensor("blk.0.ffn_gate_inp.weight", np.ones((4, 256), np.float32)), "unexpected tensor"),
    (lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "supported are linear and yarn"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_metadata_is_refused_by_name_when_it_is_not_known(tmp_path, change, says):
    file, _ = write(tmp_path, "llama", [Type.F16], change)
    with pytest.raises(CheckpointError, match=says):
        resolve_model_dir(str(file))


def test_a_file_that_is_cut_or_none_is_refused(tmp_path):
    file, _ = write(tmp_path, "llama", [Type.F16])
    file.write_bytes(file.read_bytes()[:-40_000])
    with pytest.raises(CheckpointError, match="truncated"):
        resolve_model_dir(str(file))
    file.write_bytes(b"GGUG" * 100)
    with pytest.raises(CheckpointError, match="no GGUF file"):
        resolve_model_dir(str(file))
    part = file.rename(tmp_path / "model-00001-of-00002.gguf")
    with pytest.raises(ConfigError, match="gguf-split --merge"):
        resolve_model_dir(str(part))


def stated(kind, *values, keys=1, tensors=0):
    """A file of one key with a value of these bytes, 100 in all."""
    text = struct.pack("<4sIQQQ1sI", b"GGUF", 3, tensors, keys, 1, b"k", kind) + b"".join(values)
    return text.ljust(100, b"\0")


LENGTHS = {
    "array": stated(9, struct.pack("<IQ", 0, 1 << 40)),
    "array of strings": stated(9, struct.pack("<IQ", 8, 1 << 40)),
    "array of arrays": stated(9, struct.pack("<IQIQ", 9, 1, 9, 1)),
    "wide array": stated(9, struct.pack("<IQ", 12, 40)),
    "string": stated(8, struct.pack("<Q", 2**64 - 1)),
    "type": stated(99),
    "keys": stated(0, keys=1 << 40),
    "tensors": stated(0, tensors=1 << 40),
    "empty": b"",
    "header": b"GGUF\3\0\0\0",
}


@pytest.mark.parametrize("content", LENGTHS.values(), ids=LENGTHS)
def test_a_length_beyond_the_file_is_refused_before_it_is_counted_off(tmp_path, content):
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.gguf: is truncated or no GGUF file"):
        resolve_model_dir(str(tmp_path / "model.gguf"))


def test_a_token_of_sentencepiece_is_refused_when_it_is_long():
    values = {"model": "llama", "tokens": ["a", "a" * 1001], "scores": [0.0, 0.0]}
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.tokens has a token of 1001 characters"):
        tokenizer_files({f"tokenizer.ggml.{name}": value for name, value in values.items()})


def test_an_unknown_tokenizer_is_told_and_another_one_may_be_given(tmp_path, caplog):
    file, _ = write(tmp_path, "llama", [Type.F16], lambda writer: writer.kv_data[0].__setitem__(
        "tokenizer.ggml.pre", gguf.GGUFValue("deepseek", gguf.GGUFValueType.STRING)))  # fmt: skip
    folder = resolve_model_dir(str(file))
    assert "tokenizer.ggml.pre must be one of" in caplog.text and "--tokenizer" in caplog.text
    assert not (folder / "tokenizer.json").exists()


def test_frequencies_of_llama_3_are_read_exactly(tmp_path):
    factors = np.linspace(1, 8, 16, dtype=np.float32)
    file, _ = write(tmp_path, "llama", [Type.F16], lambda writer: writer.add_tensor("rope_freqs.weight", factors))
    (rope,) = read_model_config(resolve_model_dir(str(file))).spec.ropes
    assert rope.short_factor == rope.long_factor == tuple(factors.tolist()) and rope.attention_factor == 1


def test_a_file_is_a_model_of_the_command_line(tmp_path, capsys):
    file, _ = write(tmp_path, "qwen3", [Type.Q4_0])
    assert not main(["run", "--model", str(file), "Hi", "--max-tokens", "4", "--device", "cpu"])
