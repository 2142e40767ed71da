"""Chat templates: the text that transformers gives, refusals that name the field, and a budget."""

import pytest
import transformers
from vocabularies import SPECIAL, byte_level

from gapless.base.errors import CheckpointError, RequestError
from gapless.text.chat import ChatTemplate
from gapless.text.history import canonical

CHATML = """{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""
LLAMA2 = """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}
{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}
{% set system_message = false %}{% endif %}
{% for message in loop_messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
{% if loop.index0 == 0 and system_message != false %}
{% set content = '<<SYS>>\n' + system_message + '\n<</SYS>>\n\n' + message['content'] %}
{% else %}{% set content = message['content'] %}{% endif %}
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}
{% generation %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endgeneration %}
{% endif %}{% endfor %}"""
QWEN3 = """{%- if tools %}{{- '<|im_start|>system\n# Tools\n' }}
{%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
{%- set index = (messages|length - 1) - loop.index0 %}
{%- if ns.multi_step_tool and message.role == "user" and message.content is string
       and not(message.content.startswith('<tool_response>')) %}
{%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- set content = message.content if message.content is string else '' %}
{%- set reasoning_content = '' %}
{%- if message.reasoning_content is string %}{%- set reasoning_content = message.reasoning_content %}{%- endif %}
{%- if reasoning_content and loop.index0 > ns.last_query_index %}
{{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content }}
{%- else %}{{- '<|im_start|>' ~ message.role ~ '\n' ~ content }}{%- endif %}
{%- for tool_call in message.tool_calls or [] %}{%- set call = tool_call.function %}
{{- '\n<tool_call>\n{"name": "' }}{{- call.name }}{{- '", "arguments": ' }}{{- call.arguments | tojson }}{{- '}' }}
{%- if not loop.last %}{{- ',' }}{% else %}{% break %}{%- endif %}{%- endfor %}
{{- '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""
FILTERS = """{% macro show(m, depth=0) %}{{ '  ' * depth }}{{ m.role | upper }}: {{ m.content | trim | indent(2) }}
{% endmacro %}
{% for m in messages if m.role != 'tool' %}{{ show(m, loop.index) }}{% endfor %}
{{ messages | map(attribute='role') | join(', ') }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{{ dict(a=1, b='é<') | tojson(indent=2) }} {{ '%s-%d' % ('x', 3) }} {{ '{:>4}'.format('y') }} {{ 7 // 2 }} {{ 2 ** 8 }}
{% for m in messages recursive %}{{ loop.depth }}{{ loop.length }}{{ loop.last }}{{ loop.revindex }}
{% if loop.depth == 1 and loop.first %}{{ loop([messages[-1]]) }}{% endif %}{% endfor %}
{% for role in messages | map(attribute='role') %}{{ loop.nextitem }}{{ loop.length }}{{ loop.cycle('a', 'b') }}
{% endfor %}
{% for key, value in messages[0].items() %}{{ key ~ '=' ~ value }}{% else %}never{% endfor %}{{ missing }}{{ none }}
{% filter upper %}x{{ messages | length }}{% endfilter %}{% set block %}a{{ 1 }}{% endset %}{{ block }}{{ [1, 'a'] }}
{{ [3, 1, 2] | sort | first }} {{ messages[0].content.split(' ')[0] }} {{ 'a' ~ 1 ~ none }}"""
CHAT = [
    {"role": "user", "content": "  how are you?\nfine? "},
    {"role": "assistant", "content": "é 你好 <b>"},
    {"role": "user", "content": "and now"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "x": "é<"}}}]
CALL = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "hm",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "é"}}}],
}


def reference(template: str, messages, **options) -> str:
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level().backend, **SPECIAL)
    tokenizer.chat_template = template
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


@pytest.mark.parametrize("template", [CHATML, LLAMA2, QWEN3, FILTERS], ids=["chatml", "llama2", "qwen3", "filters"])
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("system", [True, False])
def test_a_rendered_chat_equals_that_of_transformers(template: str, prompt: bool, system: bool) -> None:
    messages = [{"role": "system", "content": "be brief"}, *CHAT] if system else CHAT
    ours = ChatTemplate(template, SPECIAL).render(messages, add_generation_prompt=prompt)
    assert ours == reference(template, messages, add_generation_prompt=prompt)


def test_tools_reasoning_and_variables_equal_transformers() -> None:
    messages = [*CHAT, CALL]
    template = ChatTemplate(QWEN3, SPECIAL)
    ours = template.render(messages, tools=TOOLS, variables={"enable_thinking": False})
    assert ours == reference(QWEN3, messages, tools=TOOLS, add_generation_prompt=True, enable_thinking=False)
    assert "<think>\nhm\n</think>" in ours
    other_name = {**{k: v for k, v in CALL.items() if k != "reasoning_content"}, "reasoning": "hm"}
    assert template.render([*CHAT, other_name], tools=TOOLS, variables={"enable_thinking": False}) == ours


@pytest.mark.parametrize("template", [CHATML, LLAMA2])
@pytest.mark.parametrize("last", ["the sum is", "the sum is "])
def test_continuing_the_final_message_equals_transformers(template: str, last: str) -> None:
    messages = [CHAT[0], {"role": "assistant", "content": last}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert ChatTemplate(template, SPECIAL).render(messages, **options) == reference(template, messages, **options)


def test_the_tool_template_is_used_for_tools() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "with tools"})
    assert template.render(CHAT) == "plain"
    assert template.render(CHAT, tools=TOOLS) == "with tools"


@pytest.mark.parametrize(
    "message",
    [
        {"content": None, "refusal": "no"},
        {"refusal": "no"},
        {"content": [{"type": "refusal", "refusal": "no"}]},
        {"content": "no", "refusal": None},
        {"content": [{"type": "text", "text": "n"}, {"type": "refusal", "refusal": "o"}], "refusal": "left out"},
    ],
)
def test_a_refusal_of_the_assistant_is_its_content(message) -> None:
    template = ChatTemplate(CHATML)
    said = template.render([CHAT[0], {"role": "assistant", "content": "no"}, CHAT[2]])
    assert template.render([CHAT[0], {"role": "assistant", **message}, CHAT[2]]) == said


def test_a_refusal_of_the_template_is_an_error_of_the_request() -> None:
    with pytest.raises(RequestError, match="Roles must alternate"):
        ChatTemplate(LLAMA2, SPECIAL).render([CHAT[0], CHAT[0]])


def test_a_broken_template_is_a_checkpoint_error() -> None:
    with pytest.raises(CheckpointError, match="the chat template of x does not compile"):
        ChatTemplate("{% for %}", name="the chat template of x")


def test_no_template_says_how_to_mend_it() -> None:
    with pytest.raises(RequestError, match="--chat-template"):
        byte_level().chat(CHAT)


LOOPS = "{% for a in range(90000) %}{% for b in range(90000) %}"
BOMBS = {
    "nested loops": LOOPS + "{% endfor %}{% endfor %}",
    "loop of prints": LOOPS + "x{% endfor %}{% endfor %}",
    "nested lists": "{% set x = [1] * 90000 %}{% for a in x %}{% for b in x %}{% endfor %}{% endfor %}",
    "loop of long texts": "{% for a in range(90000) %}{{ 'x' * 10000 }}{% endfor %}",
    "big range": "{{ range(10 ** 12) | list }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "recursive loop": "{% for a in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "branching": "{% macro m(d) %}{% if d %}{{ m(d - 1) }}{{ m(d - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "filters": "{% for a in range(90000) %}{% set x = messages | tojson %}{% endfor %}",
}


def test_a_conversation_whose_prompt_would_fill_memory_is_refused() -> None:
    messages = [{"role": "user", "content": "x" * 20_000}] * 1000
    with pytest.raises(RequestError, match="it makes too much text"):
        ChatTemplate("{% for m in messages %}{{ messages | length }}{{ m.content }}{% endfor %}").render(messages)


@pytest.mark.parametrize("name", sorted(BOMBS))
def test_a_template_cannot_run_away(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gapless.text.chat.PROBE_SECONDS", 0.05)
    template = ChatTemplate(BOMBS[name])
    with pytest.raises(RequestError, match="the chat template refused"):
        template.render(CHAT, seconds=0.05)


ESCAPES = [
    "{{ ''.__class__.__mro__ }}{{ raise_exception('reached') if ''.__class__.__mro__ }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].clear() }}",
    "{{ namespace(__init__=1) }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{% include 'x' %}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_that_leaves_the_sandbox_is_refused(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(source).render(CHAT)
    assert "reached" not in str(caught.value)


def test_a_render_leaves_the_messages_alone() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}]
    ChatTemplate(CHATML).render(messages)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}]


def test_a_long_conversation_is_within_the_budget() -> None:
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": "word " * 200} for i in range(1001)]
    assert ChatTemplate(QWEN3, SPECIAL).render(messages) == reference(QWEN3, messages, add_generation_prompt=True)


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_an_answer_that_was_cut_off_while_it_reasoned_is_taken_back(field):
    answer = {"role": "assistant", "content": None, field: "Four and"}
    assert canonical([answer])[0].items() >= {"content": [""], "reasoning_content": "Four and"}.items()
    with pytest.raises(RequestError, match="content is missing"):
        canonical([{"role": "user", field: "Four and"}])
