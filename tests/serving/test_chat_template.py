"""Rendered chats are transformers' to the character, in the template styles that models come with."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from pipeline.errors import ArtifactError
from pipeline.serving.chat_template import ChatTemplate, TemplateRefusal, read_chat_template

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
CHATML = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful AI assistant named SmolLM<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""
LLAMA_3 = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary}.' }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or message.tool_calls is defined) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("conversation roles must alternate user/assistant/user/assistant/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + "}[/TOOL_RESULTS]" }}
    {%- endif %}
{%- endfor %}
"""
GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '
' + message['content'] | trim + '<end_of_turn>
' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model
'}}{% endif %}"""
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools>\\n\\n<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args>}\\n</tool_call><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and not(message.content.startswith('<tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.reasoning_content is string and loop.index0 > ns.last_query_index %}
            {{- '\\n<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>' }}
        {%- endif %}
        {%- if message.content %}{% generation %}{{- '\\n' + message.content }}{% endgeneration %}{%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {%- if tool_call.arguments is string %}{{- tool_call.arguments }}{%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
DEEPSEEK = """{% set ns = namespace(is_first=false, is_tool=false, system_prompt='') %}{%- for message in messages %}{%- if message['role'] == 'system' %}{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}{{bos_token}}{{ns.system_prompt}}{%- for message in messages %}{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}{{'<|User|>' + message['content']}}{%- endif %}{%- if message['role'] == 'assistant' and message['tool_calls'] %}{%- for tool in message['tool_calls'] %}{{'<|Assistant|><|tool_call_begin|>' + tool['type'] + '<|tool_sep|>' + tool['function']['name'] + '\\n' + '```json' + '\\n' + tool['function']['arguments'] + '\\n' + '```' + '<|tool_call_end|>'}}{%- endfor %}{%- elif message['role'] == 'assistant' %}{{'<|Assistant|>' + message['content'] + eos_token}}{%- endif %}{%- if message['role'] == 'tool' %}{%- set ns.is_tool = true -%}{{'<|tool_output_begin|>' + message['content'] + '<|tool_output_end|>'}}{%- endif %}{%- endfor -%}{% if add_generation_prompt and not ns.is_tool %}{{'<|Assistant|>'}}{% endif %}"""
STYLES = {
    "chatml": CHATML,
    "llama_3": LLAMA_3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "qwen": QWEN,
    "deepseek": DEEPSEEK,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Where's <it> raining & snowing — wo?",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
SYSTEM = {"role": "system", "content": " You are <b>terse</b>. "}
TURNS = [
    {"role": "user", "content": "Größe & Gewicht?"},
    {"role": "assistant", "content": "  42 \n"},
    {"role": "user", "content": "And 'tomorrow'?\n"},
]


def call(arguments, name="weather"):
    return {"id": "call12345", "type": "function", "function": {"name": name, "arguments": arguments}}


def used(arguments):
    return [
        TURNS[0],
        {"role": "assistant", "content": None, "tool_calls": [call(arguments)]},
        {"role": "tool", "tool_call_id": "call12345", "name": "weather", "content": "rain"},
    ]


CHATS = {
    "turns": (TURNS, None, {}),
    "system": ([SYSTEM, *TURNS], None, {}),
    "tools": ([SYSTEM, *TURNS], TOOLS, {}),
    "call": (used({"city": "Köln"}), TOOLS, {}),
    "call_as_text": (used('{"city": "Köln"}'), TOOLS, {}),
    "thought": (
        [TURNS[0], {"role": "assistant", "content": "yes", "reasoning": "hm\n"}],
        None,
        {"enable_thinking": False},
    ),
    "wrong_order": ([TURNS[1], TURNS[0], TURNS[2]], None, {}),
}


def rendered(render):
    try:
        return render()
    except Exception as error:
        return type(error)


@pytest.fixture(scope="module")
def reference():
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **SPECIAL)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("style", STYLES)
def test_a_chat_is_rendered_as_transformers_renders_it(reference, style, chat):
    messages, tools, variables = CHATS[chat]
    theirs = rendered(
        lambda: reference.apply_chat_template(
            messages,
            tools=tools,
            chat_template=STYLES[style],
            tokenize=False,
            add_generation_prompt=True,
            **variables,
        )
    )
    template = ChatTemplate.of({"default": STYLES[style]}, special_tokens=SPECIAL, where="test")
    ours = rendered(lambda: template.render(messages, tools=tools, variables=variables))
    if isinstance(theirs, str):
        assert ours == theirs and theirs
    else:
        assert ours is TemplateRefusal


def test_the_styles_are_told_apart_by_the_arguments_they_take():
    found = {style: ChatTemplate.of({"default": source}, special_tokens=SPECIAL, where="x").arguments
             for style, source in STYLES.items()}  # fmt: skip
    assert found.pop("deepseek") == "text"
    assert set(found.values()) == {"object"}


def test_a_templates_own_exception_keeps_its_words():
    template = ChatTemplate.of({"default": GEMMA}, special_tokens=SPECIAL, where="test")
    with pytest.raises(TemplateRefusal, match="System role not supported"):
        template.render([SYSTEM, *TURNS])


def test_a_template_cannot_reach_out_of_its_sandbox():
    for source in (
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__subclasses__() }}",
        "{{ raise_exception.__globals__.os }}",
    ):
        template = ChatTemplate.of({"default": source}, special_tokens={}, where="test")
        with pytest.raises(TemplateRefusal):
            template.render(TURNS)


def write(directory: Path, *, config=None, files=None):
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in (files or {}).items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return directory


def test_templates_are_found_where_transformers_finds_them(tmp_path):
    assert read_chat_template(tmp_path) is None
    write(tmp_path, config={"bos_token": {"content": "<B>"}, "chat_template": "config {{ bos_token }}"})
    assert read_chat_template(tmp_path).render(TURNS) == "config <B>"
    write(tmp_path, files={"special_tokens_map.json": '{"bos_token": "<map>", "eos_token": "<E>"}'})
    named = [{"name": "default", "template": "plain {{ eos_token }}"}, {"name": "tool_use", "template": "tools"}]
    write(tmp_path, config={"bos_token": "<B>", "chat_template": named})
    template = read_chat_template(tmp_path)
    assert template.render(TURNS) == "plain <E>" and template.render(TURNS, tools=TOOLS) == "tools"
    write(tmp_path, files={"chat_template.jinja": "file {{ bos_token }}"})
    assert read_chat_template(tmp_path).render(TURNS, tools=TOOLS) == "file <B>"
    write(tmp_path, files={"additional_chat_templates/tool_use.jinja": "file tools"})
    assert read_chat_template(tmp_path).render(TURNS, tools=TOOLS) == "file tools"


@pytest.mark.parametrize(
    ("config", "files", "words"),
    [
        ({"chat_template": "{% if %}"}, {}, "tokenizer_config.json .*line 1 of the chat template"),
        ({"chat_template": 5}, {}, "must be a text, or a list"),
        ({"chat_template": [{"name": "rag", "template": "x"}]}, {}, "rag, and no default"),
        (None, {"tokenizer_config.json": "{"}, "tokenizer_config.json: cannot be read"),
        (None, {"chat_template.jinja": "\n{{ a"}, "chat_template.jinja .*line 2"),
    ],
)
def test_a_damaged_template_is_an_error_of_the_deployment(tmp_path, config, files, words):
    with pytest.raises(ArtifactError, match=words):
        read_chat_template(write(tmp_path, config=config, files=files))
