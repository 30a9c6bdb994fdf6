import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.spec.template import Malformed, ParamReference, StageReference, parse_template


def test_a_whole_parameter():
    assert parse_template("${params.steps}").whole == ParamReference(name="steps")


def test_a_whole_output():
    assert parse_template("${stages.train.outputs.checkpoint}").whole == StageReference(
        stage="train", output="checkpoint"
    )


def test_references_inside_longer_text():
    template = parse_template("runs/${params.a}-${params.b}/x")
    assert template.whole is None
    assert template.parts == ("runs/", ParamReference(name="a"), "-", ParamReference(name="b"), "/x")


def test_the_escape_is_plain_text():
    template = parse_template("echo $${HOME} and $HOME")
    assert template.is_literal
    assert template.parts == ("echo ${HOME} and $HOME",)


@pytest.mark.parametrize(
    "text",
    [
        "${steps}",
        "${params.}",
        "${params.a.b}",
        "${}",
        "${",
        "${params.a",
        "${ params.a }",
        "${stages.a.b}",
        "${env.X}",
    ],
)
def test_everything_else_is_malformed(text):
    assert parse_template(text).malformed


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("${param.steps}", "${params.steps}"),
        ("${steps}", "${params.steps}"),
        ("${ params.steps }", "${params.steps}"),
        ("${stages.train.checkpoint}", "${stages.train.outputs.checkpoint}"),
        ("${stage.train.output.checkpoint}", "${stages.train.outputs.checkpoint}"),
        ("${}", None),
    ],
)
def test_malformed_references_name_what_was_probably_meant(text, nearest):
    (found,) = parse_template(text).malformed
    assert found.nearest == nearest


@given(st.text(alphabet="${}params.stgeou-x \n", max_size=60))
def test_no_text_is_lost_or_passes_as_a_reference_by_accident(text):
    template = parse_template(text)
    if "${" not in text:
        assert template.parts == ((text,) if text else ())
    if template.is_literal:
        assert "".join(str(part) for part in template.parts) == text.replace("$${", "${")
    else:
        assert any(isinstance(part, Malformed | ParamReference | StageReference) for part in template.parts)


@given(st.text(max_size=60))
def test_escaping_then_parsing_gives_the_text_back(text):
    template = parse_template(text.replace("${", "$${"))
    assert template.is_literal
    assert "".join(str(part) for part in template.parts) == text
