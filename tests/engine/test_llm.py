"""LLM in process, over a core without a model."""

import gc
import os
import signal
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from fronts import CHATML, EOS, FRONT, TOKENIZER, core, front, says

import gapless
from gapless.base.errors import ConfigError, DeviceError, EngineDeadError, RequestError
from gapless.engine.llm import LLM
from gapless.engine.outputs import RequestOutput
from gapless.testing.core import next_token

Params = gapless.SamplingParams
LETTER_L = TOKENIZER.token_id("l")


def llm(one=None, **options) -> LLM:
    return LLM(core=one or core(), front=FRONT, **options)


def only(outputs: list[RequestOutput]):
    assert len(outputs) == 1 and len(outputs[0].outputs) == 1
    return outputs[0].outputs[0]


def test_results_are_in_the_order_of_the_prompts():
    # Few rows, a short queue and uneven lengths: requests end in another order than they came.
    prompts = [[1 + i, 2, 3] for i in range(40)]
    params = [Params(max_tokens=1 + (7 * i) % 11, seed=i, ignore_eos=True) for i in range(40)]
    with llm(core(max_num_seqs=3, max_queue=2)) as one:
        outputs = one.generate(prompts, params)
    for i, output in enumerate(outputs):
        (request,) = one.resolver.resolve(prompts[i], params[i]).requests
        expected = [next_token(request, count, TOKENIZER.vocab_size) for count in range(params[i].max_tokens)]
        assert output.prompt_token_ids == prompts[i]
        assert output.outputs[0].token_ids == expected
        assert output.outputs[0].finish_reason == "length"
        assert output.finished and output.prompt is None


def test_one_prompt_or_many_give_an_output_each():
    one = llm()
    for prompt in ("hello", [1, 2], {"prompt": "hello"}, {"prompt_token_ids": [1, 2]}):
        assert len(one.generate(prompt)) == 1
        assert len(one.generate([prompt, prompt])) == 2
    assert one.generate([]) == []
    assert one.generate("hello")[0].prompt == "hello"


ENDS = [
    ("你 hello", {}, ("你 hello", "stop", None, 10)),
    ("hello", {"stop_token_ids": [LETTER_L]}, ("he", "stop", LETTER_L, 3)),
    ("hello", {"stop_token_ids": [LETTER_L], "include_stop_str_in_output": True}, ("hel", "stop", LETTER_L, 3)),
    ("one", {"max_tokens": 3, "stop": "ne"}, ("o", "stop", "ne", 3)),
    ("one tw", {"stop": " two"}, ("one tw", "stop", None, 7)),
    ("a你", {"max_tokens": 2}, ("a\ufffd", "length", None, 2)),
    ("aaaabaa", {"min_tokens": 3, "stop": "a"}, ("aaa", "stop", "a", 4)),
    ("one, two, three", {"stop": [" two", "zzz"]}, ("one,", "stop", " two", 8)),
    ("one, two, three", {"stop": " two", "include_stop_str_in_output": True}, ("one, two", "stop", " two", 8)),
    ("hello", {"detokenize": False}, ("", "stop", None, 6)),
]


@pytest.mark.parametrize("lag", [0, 3])
@pytest.mark.parametrize(("said", "asked", "end"), ENDS)
def test_an_output_ends_with_its_text_and_the_reason(said, asked, end, lag):
    fake = says(said, lag=lag)
    one = llm(fake)
    for _ in range(2):  # tokens that were in flight belong to no request
        output = only(one.generate("x", Params(**{"max_tokens": 50, **asked})))
        assert (output.text, output.finish_reason, output.stop_reason, len(output.token_ids)) == end
        assert (output.token_ids[-1] == EOS) == (end[1:3] == ("stop", None))
    aborts = 2 * (output.stop_reason in (" two", "a"))
    assert len(fake.aborted) == aborts, "only a stop string before the end aborts"


def test_many_completions_differ_and_keep_their_index():
    outputs = llm().generate("hello", Params(n=4, seed=3, max_tokens=6, ignore_eos=True))[0].outputs
    assert [output.index for output in outputs] == [0, 1, 2, 3]
    assert len({tuple(output.token_ids) for output in outputs}) == 4
    alone = only(llm().generate("hello", Params(seed=3, max_tokens=6, ignore_eos=True)))
    assert alone.token_ids == outputs[0].token_ids


def test_an_error_on_the_device_row_ends_that_completion_only():
    def script(request, count):
        return -1 if request.tokens[0] == 1 and count == 2 else 5

    bad, good = llm(core(script=script)).generate([[1], [2]], Params(max_tokens=4))
    assert (bad.outputs[0].finish_reason, len(bad.outputs[0].token_ids)) == ("error", 2)
    assert (good.outputs[0].finish_reason, len(good.outputs[0].token_ids)) == ("length", 4)


def test_defaults_come_from_the_model():
    one = LLM(core=core(), front=front(defaults={"temperature": 0.5, "top_k": 20}))
    assert one.get_default_sampling_params() == Params(temperature=0.5, top_k=20)
    assert len(only(one.generate("a")).token_ids) <= 16


def test_chat_renders_and_answers():
    messages = [{"role": "user", "content": "hello"}]
    with llm(says("hi")) as one:
        answer = one.chat(messages)
        both = one.chat([messages, [*messages, {"role": "assistant", "content": "x"}]])
    assert answer[0].prompt == "<|user|>hello\n<|a|>"
    assert answer[0].prompt_token_ids == TOKENIZER.encode(answer[0].prompt, add_special_tokens=False)
    assert only(answer).text == "hi"
    assert [output.prompt for output in both] == [answer[0].prompt, "<|user|>hello\n<|assistant|>x\n<|a|>"]
    assert one.get_tokenizer().info()["chat_template"] == CHATML


@pytest.mark.parametrize(
    ("chat", "variables", "prompt"),
    [
        ([{"role": "developer", "content": "be"}], {}, "<|system|>be\n<|a|>"),
        ([{"role": "function", "content": "7", "name": "f"}], {"enable_thinking": None}, "<|tool|>7\n<|a|>"),
        ([{"role": "assistant", "content": "x", "tool_calls": []}], {"x": [1]}, "<|assistant|>x\n<|a|>"),
        ([{"role": "user", "content": ["a", {"type": "text", "text": "b"}]}], {"tool": {}}, "<|user|>ab\n<|a|>"),
    ],
)
def test_a_chat_of_other_spellings_is_read_as_over_http(chat, variables, prompt):
    with llm(says("hi")) as one:
        assert one.chat(chat, chat_template_kwargs=variables)[0].prompt == prompt
        with pytest.raises(RequestError, match=r"chat_template_kwargs\.messages"):
            one.chat(chat, chat_template_kwargs={"messages": []})


def test_a_chat_has_content_and_reasoning_beside_its_text():
    messages = [{"role": "user", "content": "hello"}]
    with llm(says("<think>hm</think>\n\nhi"), reasoning_parser="think") as one:
        answer = only(one.chat(messages, Params(max_tokens=100)))
    assert (answer.text, answer.reasoning, answer.content) == ("<think>hm</think>\n\nhi", "hm", "hi")
    with llm(says("hi")) as one:
        plain, bare = only(one.chat(messages)), only(one.generate("hello"))
    assert (plain.content, plain.reasoning, plain.tool_calls) == ("hi", None, ())
    assert (bare.text, bare.content) == ("hi", None)


def test_a_chat_has_the_calls_that_its_model_made():
    tool = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}
    messages, text = (
        [{"role": "user", "content": "hello"}],
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>",
    )
    with llm(says(text + "\n</function>\n</tool_call>"), tool_call_parser="qwen3_coder") as one:
        answer = only(one.chat(messages, Params(max_tokens=100), tools=[tool]))
        assert only(one.chat(messages, tools=[tool], tool_choice="none")).tool_calls == ()
        with pytest.raises(RequestError, match="tool_choice"):
            one.chat(messages, tools=[tool], tool_choice="sometimes")
    (call,) = answer.tool_calls
    assert (call.type, call.function.name, call.function.arguments) == ("function", "add", '{"a": 1}')
    assert answer.content is None and call.id.startswith("call_")


def test_prompts_do_not_run_when_one_is_wrong():
    fake = core()
    with pytest.raises(RequestError, match=r"^prompts\[1\]: the prompt is empty") as caught:
        llm(fake).generate(["a", []])
    assert caught.value.param == "prompt"
    with pytest.raises(RequestError, match=r"^the prompt is empty"):
        llm(fake).generate([[]])
    assert not fake.has_work()


@pytest.mark.parametrize("messages", [None, 5, "hello"])
def test_messages_must_be_a_list(messages):
    with pytest.raises(RequestError, match="messages must be a list"):
        llm().chat(messages)


@pytest.mark.parametrize("options", [{"sampling_params": [Params()]}, {"priority": [1]}])
def test_lists_must_be_as_long_as_the_prompts(options):
    with pytest.raises(RequestError, match="need as many"):
        llm().generate(["a", "b"], **options)


def test_ctrl_c_between_steps_leaves_it_usable():
    def script(request, count):
        if count == 3 and request.tokens[0] == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return 5

    fake = core(script=script, lag=2, max_num_seqs=2)
    one = llm(fake)
    with pytest.raises(KeyboardInterrupt):
        one.generate([[1], [2], [3]], Params(max_tokens=20))
    assert not fake.has_work() and len(fake.aborted) == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert len(only(one.generate([2], Params(max_tokens=20))).token_ids) == 20


def test_a_failing_core_raises_its_own_error():
    one = llm(core(fail_at_step=3))
    with pytest.raises(DeviceError, match="step 3 failed on purpose"):
        one.generate("a", Params(ignore_eos=True))
    with pytest.raises(DeviceError):
        one.generate("a")


def test_close_gives_the_core_back_once():
    fake = core()
    with llm(fake) as one:
        pass
    assert fake.closed
    one.close()
    with pytest.raises(EngineDeadError, match="closed"):
        one.generate("a")


def test_close_lets_go_of_the_core():
    fake = core()
    core_lives, one = weakref.ref(fake), llm(fake)
    del fake
    one.generate("a")
    one.close()
    gc.collect()
    assert core_lives() is None


FREED = """
import gc, torch, weakref
from gapless import LLM
def large():
    return {weakref.ref(one) for one in gc.get_objects() if type(one) is torch.Tensor and one.nbytes > 100_000}
before = large()
with LLM("demo", device="cpu", kv_cache_memory_bytes=16 << 20) as llm:
    made = large() - before
print(len(made) > 10, sum(tensor() is not None for tensor in made))
"""


@pytest.mark.process
def test_close_frees_the_weights_at_once():
    """In a process of its own, whose steps no checker holds."""
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, timeout=100)
    assert done.stdout == "True 0\n", done.stderr


def test_calls_from_several_threads_give_the_same_tokens():
    one = llm(core(max_num_seqs=2))
    params = Params(max_tokens=20, seed=1, ignore_eos=True)
    expected = [output.outputs[0].token_ids for output in one.generate([[i] for i in range(8)], params)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: only(one.generate([i], params)).token_ids, range(8)))
    assert found == expected


def test_an_unknown_argument_lists_the_known_ones():
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(core=core(), front=FRONT, max_modle_len=3)


def test_a_bar_is_shown_only_on_a_terminal(monkeypatch, capsys):
    llm().generate("a")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert len(llm().generate(["a", "b"])) == 2
    llm().generate("a", use_tqdm=False)
