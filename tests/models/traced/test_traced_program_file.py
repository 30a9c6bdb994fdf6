"""`program.json` comes back as it was written, and everything else is refused with its place."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_program import TINY

from pipeline.errors import ArtifactError
from pipeline.models.traced.program_file import PROGRAM_FILE, read_program, write_program
from pipeline.models.traced.program_text import program_text

CONSTANTS = {"shift": np.array([0.25, -1.5], np.float32)}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_program(tmp_path, program=TINY, constants=CONSTANTS)
    return tmp_path


def edited(directory: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    path = directory / PROGRAM_FILE
    raw = json.loads(path.read_text())
    edit(raw)
    path.write_text(json.dumps(raw))


def test_a_program_comes_back_as_it_was_written(directory: Path) -> None:
    program, constants = read_program(directory)
    assert program == TINY
    assert constants["shift"].tolist() == [0.25, -1.5]
    assert program_text(program) == (directory / PROGRAM_FILE).read_text()


def test_constants_in_bfloat16_keep_their_dtype(tmp_path: Path) -> None:
    program = dataclasses.replace(TINY, constants={"shift": "bfloat16"})
    write_program(tmp_path, program=program, constants={"shift": np.array([0.25, -1.5], jnp.bfloat16)})
    (found,) = read_program(tmp_path)[1].values()
    assert found.dtype == jnp.bfloat16
    assert found.astype(np.float32).tolist() == [0.25, -1.5]


def put(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def edit(raw: dict[str, Any]) -> None:
        *parents, last = path
        for key in parents:
            raw = raw[key]
        raw[last] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "where"),
    [
        (put("version", value=99), "version is 99, this reader takes 1"),
        (put("name", value=7), "name: must be a name, found 7"),
        (
            put("graph", "nodes", 2, "arguments", 0, value={"ref": "nowhere"}),
            "graph.nodes[2]: 'nowhere' is not defined",
        ),
        (put("graph", "nodes", 1, "name", value="linear"), "graph.nodes[1]: its name is taken"),
        (
            put("graph", "nodes", 0, "operation", value="os.system"),
            "graph.nodes[0].operation: no operation 'os.system'",
        ),
        (put("graph", "nodes", 0, "arguments", value={}), "graph.nodes[0].arguments: must be a list"),
        (put("graph", "output", value={"ref": "gone"}), "graph.output: 'gone' is not defined"),
        (put("graph", "output", value={"call": "f"}), "graph.output: not an argument"),
        (put("leaves", "steps", "dtype", value="float128"), "leaves.steps.dtype: must be one of"),
        (put("leaves", "steps", "kind", value="optimizer"), "leaves.steps.kind: must be parameter or buffer"),
        (put("inputs", "x", "shape", 1, value=-3), "inputs.x.shape: must be a whole number"),
        (put("bindings", "w", "name", value="layer.bias"), "names that lead nowhere: w"),
        (put("mutations", "steps", value="gone"), "names that lead nowhere: gone"),
        (put("dimensions", value={}), "names that lead nowhere: batch"),
        (put("taps", 0, value=["layer"]), "taps[0]: must be two names"),
        (put("is_training", value=1), "is_training: must be true or false"),
    ],
)
def test_what_is_no_program_is_refused_with_its_place(
    directory: Path, edit: Callable[[dict[str, Any]], None], where: str
) -> None:
    edited(directory, edit)
    with pytest.raises(ArtifactError) as refused:
        read_program(directory)
    assert where in str(refused.value)
    assert "via: trace" in str(refused.value)


def test_constants_that_do_not_fit_are_all_named(directory: Path) -> None:
    write_program(directory, program=TINY, constants={"other": np.zeros(2), "shift": np.zeros(2, np.int32)})
    with pytest.raises(ArtifactError, match=r"surplus: other\n  dtype: shift is int32, must be float32"):
        read_program(directory)


def test_a_missing_or_cut_file_is_named(directory: Path) -> None:
    path = directory / "constants.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ArtifactError, match=r"constants\.safetensors: cannot be read"):
        read_program(directory)
    (directory / PROGRAM_FILE).unlink()
    with pytest.raises(ArtifactError, match=r"program\.json: not a traced program"):
        read_program(directory)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=JSON_VALUES, choice=st.randoms(use_true_random=False))
def test_garbage_anywhere_is_a_program_or_a_clear_refusal(directory: Path, value: Any, choice: Any) -> None:
    raw: Any = json.loads(program_text(TINY))
    place: Any = raw
    while True:  # down a random path, and the value in its place
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = choice.choice(keys)
        if not isinstance(place[key], dict | list) or not place[key] or choice.random() < 0.2:
            place[key] = value
            break
        place = place[key]
    (directory / PROGRAM_FILE).write_text(json.dumps(raw))
    refused_or_read(directory)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 2000), text=st.text(max_size=20), nested=st.integers(0, 3000))
def test_cut_and_scrambled_text_is_refused(directory: Path, cut: int, text: str, nested: int) -> None:
    whole = program_text(TINY)
    (directory / PROGRAM_FILE).write_text(whole[:cut] + "[" * nested + text, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(ArtifactError, match=re.escape(str(directory))):
        read_program(directory)


def refused_or_read(directory: Path) -> None:
    try:
        read_program(directory)
    except ArtifactError as error:
        assert str(directory) in str(error)
