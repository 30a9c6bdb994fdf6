"""What a row looks like is read from the model; sizes it leaves open are asked for by name."""

import numpy as np
import pytest

from pipeline.errors import ParameterError
from pipeline.models.registry import describe_config
from pipeline.models.traced.description import TracedModel
from pipeline.models.traced.program import Graph, Input, Program
from pipeline.serving.engine.forward_executor import InputForm, batch_sizes, length_sizes
from pipeline.serving.http.input_forms import row_forms

VIT = {
    "model_type": "vit",
    "architectures": ["ViTModel"],
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": [20, 12],
    "patch_size": 4,
    "num_channels": 3,
}
RESNET = {
    "model_type": "resnet",
    "architectures": ["ResNetModel"],
    "num_channels": 3,
    "embedding_size": 4,
    "hidden_sizes": [8],
    "depths": [1],
    "layer_type": "basic",
}


def traced(**inputs: Input) -> TracedModel:
    program = Program(
        name="Own",
        dtype="float32",
        parameters=tuple(inputs),
        arguments={},
        inputs=inputs,
        dimensions={},
        leaves={},
        constants={},
        bindings={},
        graph=Graph(inputs=(), nodes=(), output=None),
    )
    return TracedModel(program=program, constants={})


def test_a_traced_module_says_its_shapes_itself() -> None:
    model = traced(
        sound=Input(shape=("batch", 2, "time"), dtype="float32"), speaker=Input(shape=("batch",), dtype="int64")
    )
    assert row_forms(model, dimensions={"time": 50}) == {
        "sound": InputForm(shape=(2, 50), dtype="float32"),
        "speaker": InputForm(shape=(), dtype="int64"),
    }
    with pytest.raises(ParameterError, match="the size 'time' is open; give it in `dimensions`"):
        row_forms(model, dimensions={})
    with pytest.raises(ParameterError, match="no open size 'tim'; it has: time; did you mean 'time'"):
        row_forms(model, dimensions={"time": 50, "tim": 3})


def test_only_numbers_that_a_request_can_hold_are_asked_for() -> None:
    half = traced(x=Input(shape=("batch", 4), dtype="bfloat16"))
    assert row_forms(half, dimensions={}) == {"x": InputForm(shape=(4,), dtype="float32")}
    with pytest.raises(ParameterError, match="the input 'x' is complex64; served are floats"):
        row_forms(traced(x=Input(shape=("batch", 4), dtype="complex64")), dimensions={})


@pytest.mark.parametrize(
    "inputs",
    [
        {"x": Input(shape=(3, 4), dtype="float32")},
        {"x": Input(shape=(), dtype="float32")},
        {"x": Input(shape=("batch", 4), dtype="float32"), "y": Input(shape=("other", 4), dtype="float32")},
    ],
)
def test_inputs_without_a_common_batch_are_not_served(inputs) -> None:
    with pytest.raises(ParameterError, match="do not share an open first axis"):
        row_forms(traced(**inputs), dimensions={"other": 3})


def test_images_have_the_configs_size_or_the_usual_one() -> None:
    assert row_forms(describe_config(VIT), dimensions={})["pixel_values"].shape == (3, 20, 12)
    free = describe_config(RESNET)
    assert row_forms(free, dimensions={})["pixel_values"].shape == (3, 224, 224)
    assert row_forms(free, dimensions={"height": 32, "width": 48})["pixel_values"].shape == (3, 32, 48)
    with pytest.raises(ParameterError, match="no open size 'height'; it has: none"):
        row_forms(describe_config(VIT), dimensions={"height": 32})


def test_the_compiled_sizes_hold_every_smaller_one() -> None:
    assert batch_sizes(32) == (1, 4, 16, 32)
    assert batch_sizes(1) == (1,)
    assert length_sizes(256) == (16, 32, 48, 64, 96, 128, 192, 256)
    assert length_sizes(40) == (16, 32, 40)
    assert length_sizes(8) == (8,)
    assert all(np.diff(length_sizes(512)) > 0)
