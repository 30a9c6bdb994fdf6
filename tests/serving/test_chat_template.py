"""Rendered chats are transformers' to the character, in the template styles that models come with."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from pipeline.errors import ArtifactError
from pipeline.serving.http.chat_template import ChatTemplate, TemplateRefusal, read_chat_template

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
STYLES = {path.stem: path.read_text() for path in sorted((Path(__file__).parent / "chat_templates").glob("*.jinja"))}
"""Templates in the styles of well known families."""
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
    found = {}
    for style, source in STYLES.items():
        found[style] = ChatTemplate.of({"default": source}, special_tokens=SPECIAL, where="test").arguments
    assert found.pop("deepseek") == "text"
    assert set(found.values()) == {"object"}


def test_a_templates_own_exception_keeps_its_words():
    template = ChatTemplate.of({"default": STYLES["gemma"]}, special_tokens=SPECIAL, where="test")
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
