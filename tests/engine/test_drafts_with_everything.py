"""The demo model with drafts, beside what else a request may ask for: outputs are those of a run without drafts."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
from adapter_files import write_adapter

from gapless import LLM, SamplingParams, StructuredOutputs
from gapless.base.structured import Thinking
from gapless.demo import weights_dir
from gapless.engine.outputs import CompletionOutput
from gapless.model.config import read_model_config
from gapless.pace.draft_gate import WITHOUT_DRAFTS, DraftGate, Verify

SMALL = {"device": "cpu", "dtype": "float32", "max_num_seqs": 8, "max_model_len": 256}
SUM = "Mia has 14 pens and buys 7 more. How many pens does Mia have?"
AFTER_THINKING = StructuredOutputs(regex=r" ?\d{1,3} pens in all, and no more", thinking=Thinking("", "####"))
CITY = {"type": "string", "enum": ["Oslo", "Paris"]}
SCHEMA = {"type": "object", "properties": {"city": CITY}, "required": ["city"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
CALLS = {"tools": TOOLS, "tool_choice": "required"}
ASKED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "stop": ("Repeat: ribbons Prague flowers buttons ribbons Prague flowers", {"stop": ["uttons", "no such text"]}, {}),
    "n": ("Tell me about ribbons and Prague.", {"n": 3, "temperature": 1.2, "seed": 5}, {}),
    "form": (f"Add: 14 + 7 = 21.\n#### 21 pens in all, and no more. {SUM}", {"structured_outputs": AFTER_THINKING}, {}),
    "adapter": (SUM, {"ignore_eos": True}, {"adapter": "a"}),
    "tools": ("What is the weather in Paris?", {"temperature": 1, "seed": 3}, CALLS),
}
"""What is said, sampling parameters beside the usual ones, and what else `LLM.chat` is given. A run of drafts, from the
prompt, goes past the end of thinking into the form."""


class Played(NamedTuple):
    outputs: list[CompletionOutput]
    drafts: int
    """Drafts that were verified for them"""

    @property
    def said(self) -> list[tuple[list[int], str, str | int | None]]:
        return [(output.token_ids, output.text, output.stop_reason) for output in self.outputs]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters") / "a"
    return f"a={write_adapter(folder, read_model_config(weights_dir()), 8, size=0.05)}"


def play(adapter: str, depth: str, speculative: dict[str, Any] | None) -> dict[str, Played]:
    """Ask everything, one request after the other."""
    played = {}
    with LLM("demo", **SMALL, depth=depth, lora_modules=(adapter,), speculative_config=speculative) as llm:
        for name, (text, sampling, more) in ASKED.items():
            before = llm.stats().drafts.draft_tokens
            params = SamplingParams(**{"max_tokens": 80, "temperature": 0} | sampling)
            (output,) = llm.chat([{"role": "user", "content": text}], params, use_tqdm=False, **more)
            played[name] = Played(output.outputs, llm.stats().drafts.draft_tokens - before)
    return played


@pytest.fixture(scope="module")
def plain(adapter):
    """What is asked, without drafts, once it is what it was meant to be."""
    played = play(adapter, "1", None)
    first = {name: one.outputs[0] for name, one in played.items()}
    assert first["stop"].stop_reason == "uttons" and len({output.text for output in played["n"].outputs}) == 3
    assert re.search(f"\n####{AFTER_THINKING.regex}$", first["form"].text)
    assert len(first["adapter"].token_ids) == 80 and first["tools"].tool_calls[0].function.name == "get_weather"
    return played


@pytest.mark.seeds
@pytest.mark.parametrize("method", ["ngram", "suffix", "eagle3"])
def test_whatever_a_request_asks_for_comes_with_drafts_as_without(method, adapter, plain, monkeypatch):
    everything = Verify(5, drafts=True)  # whatever pays
    monkeypatch.setattr(DraftGate, "decide", lambda gate, decode: everything if decode else WITHOUT_DRAFTS)
    played = play(adapter, "4", {"method": method})
    for name, one in played.items():
        assert one.said == plain[name].said, name
        assert one.drafts or (method == "eagle3" and name in ("form", "tools")), "a head drafts nothing for forms"
