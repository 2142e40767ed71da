"""Keyword arguments of LLM under other engines' names: set, without effect, or answered by name."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from gapless.base.config import EngineConfig
from gapless.base.errors import ConfigError, RequestError
from gapless.base.spellings import METHODS
from gapless.engine.arguments import make_config
from gapless.engine.llm import LLM, adapter_names


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"dtype": "half"}, {"dtype": "float16"}),
        ({"context_length": 4096, "mem_fraction_static": 0.5}, {"max_model_len": 4096, "gpu_memory_utilization": 0.5}),
        ({"model_path": "x"}, {"model": "x"}),
        ({"enable_prefix_caching": None, "max_model_len": None, "enforce_eager": True}, {"enforce_eager": True}),
        ({"async_scheduling": False}, {"depth": "1"}),
        ({"disable_cuda_graph": True, "disable_radix_cache": False}, {"enforce_eager": True}),
        ({"kv_offloading_size": 4}, {"kv_tiers": ("host:4GiB",)}),
        ({"lora_paths": ["a=b", "c=d"]}, {"lora_modules": ("a=b", "c=d")}),
        ({"watchdog_timeout": 300}, {"watchdog_seconds": 300.0}),
        ({"speculative_config": {"method": "ngram"}}, {"speculative_config": '{"method": "ngram"}'}),
    ],
)
def test_an_argument_sets_the_field_that_it_is_here(given, meant):
    assert make_config("m", given) == EngineConfig(**{"model": "m", **meant})


def test_a_dtype_of_torch_is_read_by_its_name():
    class Bfloat16:
        def __str__(self) -> str:
            return "torch.bfloat16"

    assert make_config("m", {"dtype": Bfloat16()}).dtype == "bfloat16"


def test_an_argument_that_changes_nothing_is_logged(caplog):
    given = {"pipeline_parallel_size": 1, "trust_remote_code": True, "swap_space": 4}
    unasked = {"enable_lora": False, "quantization": None, "enable_sleep_mode": False}
    with caplog.at_level(logging.WARNING, "gapless"):
        assert make_config("m", {**given, **unasked}) == EngineConfig(model="m")
    assert [record.getMessage().split("=")[0] for record in caplog.records] == list(given)
    assert "pipeline_parallel_size=1 changes nothing: an engine has the ranks of " in caplog.text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_model_length": 3}, r"^unknown engine argument 'max_model_length'; did you mean max_model_len\?$"),
        ({"zzzz": 3}, r"^unknown engine argument 'zzzz'; known: model, tokenizer, "),
        (
            {"pipeline_parallel_size": 2},
            "^pipeline_parallel_size=2 is not available in gapless yet: an engine has the ranks",
        ),
        ({"tensor_parallel_size": 0}, "^tensor_parallel_size must be a whole number from 1 to 16, got 0$"),
        ({"tensor_parallel_size": 2, "device_ids": [0]}, "^device_ids must be 2 numbers, one for each rank"),
        ({"tensor_parallel_size": 2, "model_impl": "transformers"}, "^model_impl: the Transformers backend does not"),
        ({"enable_lora": "yes"}, "^enable_lora='yes' is not accepted: it takes true or false$"),
        ({"max_loras_per_batch": "two"}, "^max_loras_per_batch must be a whole number, got 'two'$"),
        ({"tokenizer_revision": "a"}, "^tokenizer_revision='a' is not available in gapless yet"),
        ({"hf_token": "pa55"}, "^hf_token is not accepted: other users of this machine would see it; set HF_TOKEN"),
        ({"kv_transfer_config": {"a": 1}}, "^kv_transfer_config is not accepted: write kv_tier host:SIZE"),
        ({"speculative_model": "x"}, "^speculative_model is not accepted: write speculative_config"),
        ({"enable_hierarchical_cache": True}, "^enable_hierarchical_cache is not accepted: write kv_tier"),
    ],
)
def test_an_argument_that_cannot_be_met_is_named(given, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make_config("m", given)
    assert "pa55" not in str(caught.value)


def test_the_adapter_of_a_lora_request_is_the_one_of_its_name():
    request = SimpleNamespace(lora_name="sql", lora_int_id=1, lora_path="/x")
    assert adapter_names("sql", None) == adapter_names("", request) == "sql"
    assert adapter_names("", [request, None]) == ["sql", ""]
    for adapter, wrong in (("sql", request), ("", 3)):
        with pytest.raises(RequestError, match="lora_request"):
            adapter_names(adapter, wrong)


def test_a_method_that_is_not_there_names_the_one_that_is():
    llm = LLM.__new__(LLM)
    for name, why in METHODS.items():
        assert not hasattr(llm, name)
        with pytest.raises(AttributeError, match=f"^LLM has no {name!r}: ") as caught:
            getattr(llm, name)
        assert why in str(caught.value)
    with pytest.raises(AttributeError, match=r"^LLM has no 'genrate'; did you mean generate\?$"):
        llm.genrate()
    with pytest.raises(AttributeError, match=r"^LLM has no 'zzzz'$"):
        llm.zzzz()
