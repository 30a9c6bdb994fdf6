"""A directory with a program is described without torch: kind, inputs, leaves, outputs."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_program import TINY

from pipeline.errors import ArtifactError
from pipeline.models.checkpoint import abstract_leaves, load_model, model_leaves, save_parameters
from pipeline.models.description import ModelKind
from pipeline.models.registry import describe
from pipeline.models.traced.description import TracedModel
from pipeline.models.traced.program import Input
from pipeline.models.traced.program_file import write_program
from pipeline.models.variables import recording

CONSTANTS = {"shift": np.array([0.25, -1.5], np.float32)}
WEIGHT = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_program(tmp_path, program=TINY, constants=CONSTANTS)
    save_parameters(tmp_path / "params", {"layer.weight": WEIGHT, "steps": np.array(4, np.int32)})
    return tmp_path


def test_a_directory_with_a_program_is_a_traced_model(directory: Path) -> None:
    described = describe(directory)
    assert isinstance(described, TracedModel)
    assert (described.kind, described.name) == (ModelKind.PREDICTOR, "traced")
    leaves = abstract_leaves(described)
    assert {path: (leaf.shape, str(leaf.dtype)) for path, leaf in leaves.items()} == {
        "layer.weight": ((2, 3), "float32"),
        "steps": ((), "int32"),
    }


def test_it_loads_runs_and_counts(directory: Path) -> None:
    described, module = describe(directory), load_model(directory, dtype=None)
    inputs = described.example_inputs(seed=3)
    outputs = described.forward(module, inputs)
    assert list(outputs) == ["sum", "rest.0", "rest.2.0"]
    assert np.allclose(outputs["sum"], inputs["x"] @ WEIGHT.T + CONSTANTS["shift"], rtol=1e-6)
    assert np.isneginf(np.asarray(outputs["rest.0"])).tolist() == [True] * 3
    assert int(model_leaves(module)["steps"]) == 5


def test_example_inputs_lie_in_the_recorded_ranges_and_differ_by_seed(directory: Path) -> None:
    described = describe(directory)
    first, second = described.example_inputs(seed=0), described.example_inputs(seed=1)
    assert first["x"].shape == (3, 3)
    assert first["y.1.0"].dtype == np.int32
    assert 0 <= first["y.1.0"].min() <= first["y.1.0"].max() < 7
    assert not np.array_equal(first["x"], second["x"])


def test_masks_are_padded_on_the_right_by_row() -> None:
    program = dataclasses.replace(
        TINY, inputs={**TINY.inputs, "x": Input(shape=("batch", 3), dtype="int64")}, arguments=TINY.arguments
    )
    renamed = dataclasses.replace(
        program,
        inputs={"attention_mask": program.inputs["x"], "y.1.0": program.inputs["y.1.0"]},
    )
    mask = TracedModel(program=renamed, constants=CONSTANTS).example_inputs(seed=0)["attention_mask"]
    assert mask.tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 0]]


def test_the_kind_of_a_transformers_model_follows_its_inputs() -> None:
    def kind(name: str, *inputs: str) -> ModelKind:
        program = dataclasses.replace(TINY, name=name, inputs=dict.fromkeys(inputs, TINY.inputs["x"]))
        return TracedModel(program=program, constants=CONSTANTS, config={"model_type": "any"}).kind

    assert kind("FalconForCausalLM", "input_ids", "attention_mask") is ModelKind.CAUSAL_LM
    assert kind("BertModel", "input_ids") is ModelKind.TEXT_ENCODER
    assert kind("T5ForConditionalGeneration", "input_ids", "decoder_input_ids") is ModelKind.SEQ2SEQ_LM
    assert kind("Speech", "input_features", "decoder_input_ids") is ModelKind.SPEECH_TO_TEXT
    assert kind("CLIPModel", "input_ids", "pixel_values") is ModelKind.IMAGE_TEXT
    assert kind("ViTModel", "pixel_values") is ModelKind.IMAGE
    assert kind("PatchTST", "past_values") is ModelKind.PREDICTOR


def test_missing_and_surplus_leaves_are_named(tmp_path: Path) -> None:
    write_program(tmp_path, program=TINY, constants=CONSTANTS)
    save_parameters(tmp_path / "params", {"layer.weights": WEIGHT, "steps": np.array(4, np.int32)})
    with pytest.raises(ArtifactError, match=r"missing: layer.weight \(2, 3\)\n  surplus: layer.weights \(2, 3\)"):
        load_model(tmp_path, dtype=None)


def test_leaves_are_used_in_no_less_precision_than_the_trace_or_they_have(directory: Path) -> None:
    described = describe(directory)
    inputs = {name: jnp.asarray(value) for name, value in described.example_inputs(seed=3).items()}
    narrow = load_model(directory, dtype="bfloat16")
    assert model_leaves(narrow)["layer.weight"].dtype == jnp.bfloat16
    assert described.forward(narrow, inputs)["sum"].dtype == jnp.float32
    halved = dataclasses.replace(
        TINY,
        dtype="bfloat16",
        leaves={**TINY.leaves, "layer.weight": dataclasses.replace(TINY.leaves["layer.weight"], dtype="bfloat16")},
        inputs={**TINY.inputs, "x": Input(shape=("batch", 3), dtype="bfloat16")},
    )
    traced = TracedModel(program=halved, constants=CONSTANTS)
    for dtype, expected in ((jnp.float32, jnp.float32), (jnp.bfloat16, jnp.bfloat16)):
        module = traced.module({"layer.weight": WEIGHT.astype(dtype), "steps": np.array(4, np.int32)})
        with recording() as taps:
            traced.forward(module, inputs)
        assert taps["layer"].dtype == expected


def test_large_constants_are_arguments_and_small_ones_part_of_the_program() -> None:
    large = {"shift": np.zeros((100, 100, 2), np.float32)}
    for constants, count in ((CONSTANTS, 0), (large, 1)):
        module = TracedModel(program=TINY, constants=constants).abstract()
        arrays = [leaf for leaf in jax.tree.leaves(module) if isinstance(leaf, jax.Array)]
        assert len(arrays) == count
