"""Checkpoints of several families by their names on the hub: what is fetched, and that each is served."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest
import torch
import transformers
from hub.loopback import folder_files
from server.server_harness import VOCAB, write_model

from gapless.base.config import EngineConfig
from gapless.engine.frontdoor import locate
from gapless.model.config import read_model_config
from gapless.model.registry import Impl

ROOT = Path(__file__).resolve().parents[2]
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "dtype": "float32", "pad_token_id": None,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
OF_FAMILIES = (
    # class of transformers, changes of its config, what computes it here
    ("LlamaForCausalLM", {}, "native"),
    ("GPT2LMHeadModel", GPT2, "native"),
    ("CohereForCausalLM", {}, "native"),
    ("Starcoder2ForCausalLM", {}, "transformers"),
    ("NemotronForCausalLM", {}, "transformers"),
)
CODE = {"modeling_own.py": b"raise SystemExit", "pytorch_model.bin": b"\x80", "training.pt": b"\x80"}
"""Files of a repository that are never fetched"""


def checkpoint(folder: Path, name: str, changes: dict[str, object]) -> transformers.PreTrainedModel:
    """A tiny random model of this class, saved as a user's directory."""
    folder.mkdir()
    torch.manual_seed(7)
    made = getattr(transformers, name)
    net = made(made.config_class(**SIZES, **changes)).eval()
    net.generation_config.eos_token_id = None
    write_model(folder)
    net.save_pretrained(folder)
    return net


def greedy(net: transformers.PreTrainedModel, ids: list[int], count: int) -> list[int]:
    """Tokens of the class's own eager, cache-less run."""
    for _ in range(count):
        with torch.no_grad():
            ids = [*ids, int(net(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())]
    return ids[-count:]


@contextmanager
def serving(model: str) -> Iterator[str]:
    """`gapless serve MODEL`; yields its address."""
    command = [sys.executable, "-m", "gapless", "serve", model, "--device", "cpu", "--port", "0", "--enforce-eager"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().rpartition(" at ")[2].partition(",")[0]
        finally:
            server.terminate()


@pytest.mark.process
@pytest.mark.parametrize(("name", "changes", "impl"), OF_FAMILIES, ids=[name for name, *_ in OF_FAMILIES])
def test_serve_answers_as_the_class_of_transformers_when_given_a_name_on_the_hub(hub, tmp_path, name, changes, impl):
    net, ids = checkpoint(tmp_path / "saved", name, changes), [5, 9, 2, 11, 3]
    assert read_model_config(tmp_path / "saved", impl=Impl.AUTO).impl == impl
    hub.add("org/model", folder_files(tmp_path / "saved") | CODE)
    with serving("org/model") as url:
        assert url.startswith("http")
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            (model,) = client.models.list().data
            done = client.completions.create(
                model=model.id, prompt=ids, max_tokens=8, temperature=0,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )  # fmt: skip
    assert model.id == "org/model" and done.choices[0].token_ids == greedy(net, ids, 8)
    assert not set(hub.fetched()) & set(CODE)


def test_only_files_without_code_are_fetched_when_a_repository_has_code(hub, tmp_path):
    checkpoint(tmp_path / "saved", "LlamaForCausalLM", {})
    hub.add("org/model", folder_files(tmp_path / "saved") | CODE)
    folder = Path(locate(EngineConfig(model="org/model")).config.model)
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors",
    }  # fmt: skip
