"""Whatever the bytes, the loader gives a flow or a SpecError with positions."""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import SpecError
from pipeline.spec.load import load_flow, parse_flow

FLOW = (Path(__file__).parents[2] / "flows" / "llm.yaml").read_text()
PIECES = [
    "flow:", " a", "stages:", "\n", "  ", "    ", "x", ":", " ", "- ", "uses:", " data.text", "with:", "{", "}", "[",
    "]",
    ",", "'", '"', "&a", "*a", "!!", "!x", "|", ">", "%", "#", "?", "<<", "~", "null", "1e-5", "${params.x}", "${", "}",
    "params:", "\t", "\\", "---", "...", "\x85", "\ufeff", "\u2028", "gates:", '"<= 1"', "resources:", "@", "`", "\x07",
]  # fmt: skip


def survive(text, overrides=()):
    try:
        parse_flow(text, file=Path("f.yaml"), overrides=overrides)
    except SpecError as error:
        assert error.problems
        assert all(problem.position.line >= 1 and problem.position.column >= 1 for problem in error.problems)


@given(st.text(max_size=200), st.lists(st.text(max_size=20), max_size=3))
def test_any_text(text, overrides):
    survive(text, overrides)


@settings(max_examples=300)
@given(st.lists(st.sampled_from(PIECES), max_size=40))
def test_pieces_of_yaml(pieces):
    survive("".join(pieces))


@given(st.integers(0, 2**32))
def test_a_real_flow_with_a_few_characters_changed(seed):
    generator = random.Random(seed)
    text = FLOW
    for _ in range(generator.randint(1, 4)):
        place = generator.randrange(len(text))
        text = text[:place] + generator.choice(PIECES) + text[place + generator.randint(0, 3) :]
    survive(text, ["steps=5"])


@pytest.mark.parametrize("fraction", range(0, 100, 7))
def test_a_truncated_flow(fraction):
    survive(FLOW[: len(FLOW) * fraction // 100])


@given(st.binary(max_size=200))
def test_any_bytes(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("bytes") / "f.yaml"
    path.write_bytes(data)
    with pytest.raises(SpecError):
        load_flow(path)
