"""Logits processors of an engine: imported and tried out at start, asked for by name, kept from other rows."""

from __future__ import annotations

import re

import pytest
from harness import VOCAB, sizes

from gapless import LLM, ConfigError, RequestError, SamplingParams
from gapless.base.config import EngineConfig
from gapless.device import CpuDevice
from gapless.engine.messages import decode_to_core, encode, pack_request, unpack_request
from gapless.engine.processors import import_processors, try_out
from gapless.testing.checksum import ChecksumModel
from gapless.testing.loops import loop_of
from gapless.testing.sim import SimDevice

PROMPT = "Question: Mia has 14 pens and buys 7 more. How many pens does Mia have?\nAnswer:"
OPTIONS = {"device": "cpu", "max_num_seqs": 4, "max_model_len": 256}


@pytest.fixture(scope="module")
def llm():
    paths = ["torch_processors:counts_both", "ahead=torch_processors:favours"]
    with LLM("demo", **OPTIONS, logits_processors=paths) as one:
        yield one


def asking(*calls, **asks):
    return SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logits_processors=calls, **asks)


def test_a_processor_changes_its_own_request_alone(llm):
    assert llm.info.processors == ("counts_both", "ahead")
    ahead = asking({"qualname": "ahead", "args": [1000.0]})
    greedy = asking()
    plain = llm.generate([PROMPT], greedy, use_tqdm=False)[0].outputs[0].token_ids
    first, second, third = llm.generate([PROMPT] * 3, [greedy, ahead, greedy], use_tqdm=False)
    assert first.outputs[0].token_ids == third.outputs[0].token_ids == plain
    start = len(first.prompt_token_ids)
    assert second.outputs[0].token_ids == list(range(start, start + 40))


def test_a_processor_sees_the_counts_that_penalties_use(llm):
    by_processor = asking({"qualname": "counts_both", "args": [1.25]}, n=2)
    by_penalty = asking(frequency_penalty=1.25)
    ours, theirs = llm.generate([PROMPT] * 2, [by_processor, by_penalty], use_tqdm=False)
    assert [one.token_ids for one in ours.outputs] == [theirs.outputs[0].token_ids] * 2
    assert theirs.outputs[0].token_ids != llm.generate([PROMPT], asking(), use_tqdm=False)[0].outputs[0].token_ids


def test_a_form_of_output_holds_whatever_a_processor_does(llm):
    wild = asking({"qualname": "ahead", "args": [1000.0]}, structured_outputs={"choice": ["yes", "no"]})
    assert llm.generate([PROMPT], wild, use_tqdm=False)[0].outputs[0].text in ("yes", "no")


def test_a_request_for_an_unknown_processor_is_refused_with_the_known_names(llm):
    with pytest.raises(RequestError, match="there is no 'favours'; those of this engine: counts_both, ahead") as caught:
        llm.generate([PROMPT], asking("favours"))
    assert caught.value.param == "logits_processors"


def test_calls_of_processors_cross_to_another_process(llm):
    calls = ("ahead", {"qualname": "counts_both", "args": [1, 2.5]})
    (request,) = llm.resolver.resolve(PROMPT, asking(*calls)).requests
    assert request.processors == ((1, ()), (0, (1.0, 2.5)))
    (add,) = decode_to_core(encode([pack_request(request)]))
    assert unpack_request(add)._replace(tokens=request.tokens) == request


REFUSED = {
    "syncs": r"syncs cannot be captured: .*torch_processors\.py:\d+: .*",
    "uploads": r"uploads cannot be captured: .*torch_processors\.py:\d+: .*",
    "returns_a_row": r"returns_a_row must return float32 \[1, 97\] on cpu, not float32 \[97\] on cpu",
    "returns_halves": r"returns_halves must return float32 \[1, 97\] on cpu, not float16 \[1, 97\] on cpu",
    "returns_nothing": r"returns_nothing must return a tensor, not NoneType",
    "mixes_rows": r"mixes_rows gives a row other logits when it has other neighbours",
    "counts_rows": r"counts_rows gives a row other logits when it has other neighbours",
    "draws": r"draws gives a row other logits when it has other neighbours: .* draw no random numbers",
    "raises": r"raises raised RuntimeError: .*size of tensor",
}


@pytest.mark.parametrize("device", [CpuDevice, SimDevice])
@pytest.mark.parametrize("name", REFUSED)
def test_a_processor_that_no_step_may_run_is_refused_with_the_reason(name, device):
    with pytest.raises(ConfigError, match=REFUSED[name]):
        tried_out(f"torch_processors:{name}", device(1))


@pytest.mark.parametrize("name", ["favours", "counts_both", "spoils_its_input", "WithConstants"])
def test_a_processor_that_keeps_the_rules_is_taken(name):
    tried_out(f"torch_processors:{name}", SimDevice(1))


def test_a_batch_invariant_engine_takes_no_processor_that_rounds_by_its_batch():
    tried_out("torch_processors:rounds_by_rows", SimDevice(1))
    with pytest.raises(ConfigError, match="other logits"):
        tried_out("torch_processors:rounds_by_rows", SimDevice(1), exact=True)


def tried_out(path, device, exact=False):
    shape = sizes(0)._replace(slots=2)
    processors = import_processors(EngineConfig(logits_processors=(path,)).processors, device)
    loop = loop_of(device, ChecksumModel(VOCAB, shape.max_len), shape, 2, processors=processors)
    try:
        try_out(loop.launcher.program, device, exact)
    finally:
        device.close()


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("no_such_module:f", "no_such_module:f cannot be loaded: ModuleNotFoundError: .* folder in PYTHONPATH"),
        ("torch_processors:no_such", "cannot be loaded: AttributeError"),
        ("torch_processors:not_a_function", "is a int, and must be a function"),
    ],
)
def test_a_processor_that_cannot_be_imported_is_refused_at_start(path, reason):
    with pytest.raises(ConfigError, match=reason):
        LLM("demo", **OPTIONS, logits_processors=(path,))


@pytest.mark.parametrize("given", [("f",), ("m:",), (":f",), ("=m:f",), ("m:f", "n:f"), ("x=m:f", "x=m:g")])
def test_a_flag_that_names_no_function_or_one_twice_is_refused(given):
    with pytest.raises(ConfigError, match=re.escape("logits_processors must be module:function or name=module:fun")):
        EngineConfig(logits_processors=given)


def test_an_engine_takes_only_a_few_processors():
    with pytest.raises(ConfigError, match="holds 9 processors, at most 8"):
        EngineConfig(logits_processors=tuple(f"m:f{number}" for number in range(9)))
    assert EngineConfig(logits_processors=["m:f", "x=a.b:c.d"]).processors == {"f": "m:f", "x": "a.b:c.d"}
