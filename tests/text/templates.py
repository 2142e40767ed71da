"""Chat templates of the shapes that real ones have, in short: what each reads of a message differs."""

LLAMA3 = """{{- bos_token }}{%- if tools is not none and tools %}{{- 'TOOLS ' }}{%- for t in tools %}{{- t | tojson }}
{%- endfor %}{%- endif %}{%- if date_string is defined %}{{- 'DATE ' + date_string }}{%- endif %}
{%- for message in messages %}
{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
{{- '<' + message['role'] + '>' + message['content'] | trim + '<eot>' }}
{%- elif 'tool_calls' in message %}
{%- if not message.tool_calls | length == 1 %}{{- raise_exception('one call only') }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<assistant>{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}<eot>' }}
{%- else %}{{- '<ipython>' }}{%- if message.content is mapping or message.content is iterable %}
{{- message.content | tojson }}{%- else %}{{- message.content }}{%- endif %}{{- '<eot>' }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<assistant>' }}{%- endif %}"""
GUARD = """{% for message in messages %}{% if message['role'] == 'user' %}{% set role = 'User' %}
{% elif message['role'] == 'assistant' %}{% set role = 'Agent' %}{% else %}{{ raise_exception('no such role') }}
{% endif %}{{ role + ': ' }}{% for content in message['content'] %}{% if content['type'] == 'text' %}
{{ content['text'] | trim }}{% endif %}{% endfor %}{% endfor %}"""
FIRST_PART = "{% for m in messages %}<{{ m.role }}>{{ m.content[0].text }}{% endfor %}"
MIXED = """{% for m in messages %}{% if m.role == 'system' %}[{{ m.content | trim }}]{% else %}<{{ m.role }}>
{%- for part in m.content %}{% if part.type == 'text' %}|{{ part.text }}{% endif %}{% endfor %}{% endif %}
{% endfor %}"""
QWEN = """{%- if tools %}{{- '<tools>' }}
{%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or message.role == 'system' or (message.role == 'assistant' and not message.tool_calls) %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant' }}
{%- if message.content %}{{- '\n' + message.content }}{%- endif %}
{%- for call in message.tool_calls %}{%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
{{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}{{- call.arguments | tojson }}
{{- '}\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}{{- '<tool_response>\n' + message.content + '\n</tool_response>' }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
EITHER = QWEN.replace(
    "{{- call.arguments | tojson }}",
    "{%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}",
)
R1 = """{% for message in messages %}{% if message['role'] == 'assistant' and 'tool_calls' in message %}
{% for tool in message['tool_calls'] %}{% if message['content'] is none %}{{ '<A>' }}{% else %}
{{ '<A>' + message['content'] }}{% endif %}
{{ tool['type'] + '<sep>' + tool['function']['name'] + '\n' + tool['function']['arguments'] + '<end>' }}{% endfor %}
{% elif message['role'] == 'tool' %}{{ '<output>' + message['content'] + '</output>' }}
{% else %}{{ '<' + message['role'] + '>' + message['content'].split('</think>')[-1] }}{% endif %}{% endfor %}"""
OLD_R1 = """{% for message in messages %}{% if message['role'] == 'assistant' and message['content'] is none %}
{% for tool in message['tool_calls'] %}
{{ tool['type'] + '<sep>' + tool['function']['name'] + '\n' + tool['function']['arguments'] + '<end>' }}{% endfor %}
{% elif message['role'] == 'tool' %}{{ '<output>' + message['content'] + '</output>' }}
{% else %}{{ '<' + message['role'] + '>' + message['content'] }}{% endif %}{% endfor %}"""
MISTRAL = """{{- bos_token }}{%- for message in messages %}{%- if message.role == 'user' %}
{{- '[INST] ' + message.content + '[/INST]' }}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}{%- set out = call.function | tojson %}{{- out[:-1] }}
{%- if not call.id is defined or call.id | length != 9 %}{{- raise_exception('ids have length 9') }}{%- endif %}
{{- ', "id": "' + call.id + '"}' }}{%- endfor %}{{- ']' + eos_token }}
{%- elif message.role == 'assistant' %}{{- ' ' + message.content | trim + eos_token }}
{%- elif message.role == 'tool' %}{{- '[RESULTS] {"content": ' + message.content | string + ', ' }}
{%- if not message.tool_call_id is defined or message.tool_call_id | length != 9 %}
{{- raise_exception('ids have length 9') }}{%- endif %}{{- '"call_id": "' + message.tool_call_id + '"}' }}
{%- else %}{{- raise_exception('only user, assistant and tool') }}{%- endif %}{%- endfor %}"""
HERMES = """{%- for message in messages %}{%- if message.role == 'user' or (message.role == 'assistant' and
message.tool_calls is not defined) %}{{- '<' + message.role + '>' + message.content }}
{%- elif message.role == 'assistant' %}{{- '<assistant>' }}{%- for call in message.tool_calls %}{{- '<tool_call>' }}
{%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
{{- '{"name": "' }}{{- call.name }}{{- '"' }}
{%- if call.arguments is defined %}{{- ', "arguments": ' }}{{- call.arguments | tojson }}{%- endif %}
{{- '}</tool_call>' }}{%- endfor %}
{%- elif message.role == 'tool' %}{%- if message.name is defined %}{{- '{"name": ' + message.name + '}' }}{%- endif %}
{{- '<tool_response>' + message.content + '</tool_response>' }}{%- endif %}{%- endfor %}"""
GRANITE = """{%- if documents %}{%- for d in documents %}{{- '<doc>' + d['text'] }}{%- endfor %}{%- endif %}
{%- for message in messages %}{{- '<' + message.role + '>' }}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- for call in message.tool_calls %}{{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
{%- endfor %}{%- else %}{{- message.content }}{%- endif %}{{- '<end>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<assistant>' }}{%- if thinking %}{{- '<think>' }}{%- endif %}{%- endif %}"""
XML = """{%- for m in messages %}{{- '<' + m.role + '>' }}{%- if m.content is string %}{{- m.content }}{%- endif %}
{%- for call in m.tool_calls or [] %}{{- '<function=' + call.function.name + '>' }}
{%- for name, value in call.function.arguments.items() %}{{- '<parameter=' + name + '>' + (value | string) }}
{%- endfor %}{%- endfor %}{%- endfor %}"""
