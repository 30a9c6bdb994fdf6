"""docs/serving.md says what is there, and its examples run."""

import re
import shlex
from pathlib import Path

import httpx
import pytest
from loopback import listening

from pipeline.serving.engine.metrics import COUNTERS, GAUGES, HISTOGRAMS
from pipeline.serving.grammar.structured_grammar import GrammarCompiler
from pipeline.serving.http import chat_request, completion_request, embedding_request
from pipeline.serving.http.chat_template import ChatTemplate
from pipeline.serving.http.http import make_app, make_surface
from pipeline.serving.http.model_registry import WORK_PATHS
from pipeline.serving.http.sampling_fields import IGNORED, ServedModel

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
URL = "http://127.0.0.1:8000"


@pytest.fixture
def url(engine, tokenizer, vocabulary):
    grammars = GrammarCompiler(vocabulary)
    surface = make_surface(
        engine=engine,
        encoder=tokenizer,
        decoder=tokenizer,
        model=ServedModel(name="llm", context=160, num_tokens=320, stop_ids=()),
        facts={},
        template=ChatTemplate.of({"default": "{{ messages[0].content }}"}, special_tokens={}, where="test"),
        compile_grammar=grammars.answer,
    )
    with listening(make_app(surface)) as found:
        yield found
    grammars.close()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_python_example_runs(url, capsys):
    (example,) = blocks("python")
    assert URL in example
    exec(compile(example.replace(URL, url), "docs/serving.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "length 16"
    assert lines[-1] in ("red", "green", "blue")


def test_the_curl_examples_are_answered(url):
    commands = [shlex.split(line) for block in blocks("sh") for line in block.splitlines() if "-d" in line]
    assert len(commands) == 2
    for command in commands:
        assert command[0] == "curl" and command[2:4] == ["-H", "Content-Type: application/json"]
        answer = httpx.post(command[1].replace(URL, url), content=command[command.index("-d") + 1])
        assert answer.status_code == 200 and answer.text


def test_every_field_path_and_metric_is_on_the_page():
    fields = {*completion_request.READ, *completion_request.NOT_COMPUTED, *chat_request.READ}
    fields |= {*chat_request.NOT_COMPUTED, *IGNORED, *embedding_request.READ}
    named = set(re.findall(r"`([a-z0-9_]+)`", PAGE))
    assert sorted(fields - named) == []
    assert [path for path in WORK_PATHS if f"`POST {path}`" not in PAGE] == []
    told = set(re.findall(r"`([a-z0-9_]+)(?:\{\w+\})?`", PAGE))
    assert sorted({*COUNTERS, *GAUGES, *HISTOGRAMS} - told) == []
