"""Two checkpoints of any formats are the same, or every tensor that is not is named with what differs."""

import math

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from converters.conversion import convert
from converters.difference import diff
from pipeline.errors import CheckpointError
from pipeline.models.checkpoint import read_parameters, save_parameters


def write(directory, model, state=None):
    """A transformers directory; tensors of `state` as they are given."""
    model.config.save_pretrained(directory)
    state = dict(model.state_dict()) if state is None else state
    save_file({name: value.clone().contiguous() for name, value in state.items()}, directory / "model.safetensors")
    return directory


@pytest.fixture
def state(llama):
    return dict(llama().state_dict())


def named(found):
    return {one.name: one.kind for one in found.differences}


def test_formats_and_wrappers_make_no_difference(llama, checkpoint, tmp_path):
    model = llama()
    dcp = checkpoint(model)
    wrapped = {f"module._orig_mod.{name}": value for name, value in model.state_dict().items()}
    safetensors = write(tmp_path / "safetensors", model, wrapped)
    convert(dcp, to=tmp_path / "flax")
    steps = []
    for first, second in ((dcp, safetensors), (safetensors, tmp_path / "flax"), (tmp_path / "flax", dcp)):
        found = diff(first, second, progress=lambda done, total: steps.append((done, total)))
        assert found.same
        assert found.num_identical == found.num_compared == 21
        assert (found.max_difference, found.not_held) == (0.0, ())
    assert steps[:21] == [(number, 21) for number in range(1, 22)]
    assert {found.first_format, found.second_format} == {"flax", "torch-dcp"}


def test_a_tied_head_that_one_file_leaves_out_is_no_difference(llama, state, tmp_path):
    model = llama()
    without = {name: value for name, value in state.items() if name != "lm_head.weight"}
    first, second = write(tmp_path / "a", model), write(tmp_path / "b", model, without)
    assert diff(first, second).same
    assert diff(second, first).num_compared == 21
    convert(second, to=tmp_path / "flax")
    assert diff(first, tmp_path / "flax").same


def test_a_tied_head_that_is_another_tensor_is_a_difference(llama, state, tmp_path):
    model = llama()
    without = {name: value for name, value in state.items() if name != "lm_head.weight"}
    other_head = {**state, "lm_head.weight": state["lm_head.weight"] + 1}
    found = diff(write(tmp_path / "a", model, without), write(tmp_path / "b", model, other_head))
    assert named(found) == {"lm_head.weight": "values"}


def test_what_the_model_computes_itself_is_not_held_against_it(llama, state, tmp_path):
    model = llama()
    old = {**state, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.arange(3.0)}
    found = diff(write(tmp_path / "a", model, old), write(tmp_path / "b", model))
    assert found.same
    assert found.not_held == ("model.layers.0.self_attn.rotary_emb.inv_freq",)


def test_every_kind_of_difference_is_named(llama, state, tmp_path):
    model = llama()
    changed = dict(state)
    del changed["model.norm.weight"]
    changed["model.extra.weight"] = torch.ones(3)
    changed["model.layers.0.mlp.up_proj.weight"] = state["model.layers.0.mlp.up_proj.weight"].T.contiguous()
    changed["model.layers.0.input_layernorm.weight"] = torch.ones(48, dtype=torch.bfloat16)
    values = state["model.layers.1.mlp.down_proj.weight"].clone()
    values[3, 5] += 0.25
    values[7, 1] -= 0.125
    changed["model.layers.1.mlp.down_proj.weight"] = values
    ones = {**state, "model.layers.0.input_layernorm.weight": torch.ones(48)}
    found = diff(write(tmp_path / "a", model, ones), write(tmp_path / "b", model, changed))
    assert not found.same
    assert named(found) == {
        "model.norm.weight": "missing",
        "model.extra.weight": "extra",
        "model.layers.0.mlp.up_proj.weight": "shape",
        "model.layers.0.input_layernorm.weight": "dtype",
        "model.layers.1.mlp.down_proj.weight": "values",
    }
    by_name = {one.name: one for one in found.differences}
    assert (by_name["model.norm.weight"].first, by_name["model.norm.weight"].second) == ("float32 [48]", "")
    assert by_name["model.layers.0.mlp.up_proj.weight"].second == "float32 [48, 72]"
    assert by_name["model.layers.0.input_layernorm.weight"].num_different == 0
    assert by_name["model.layers.1.mlp.down_proj.weight"].num_different == 2
    assert by_name["model.layers.1.mlp.down_proj.weight"].max_difference == pytest.approx(0.25, rel=1e-5)
    assert found.max_difference == pytest.approx(0.25, rel=1e-5)


def test_a_tolerance_forgives_numbers_and_dtypes_but_nothing_else(llama, checkpoint, tmp_path):
    dcp = checkpoint(llama())
    convert(dcp, to=tmp_path / "flax", dtype="bfloat16")
    exact = diff(dcp, tmp_path / "flax")
    assert {one.second.split()[0] for one in exact.differences} == {"bfloat16"}
    largest = exact.max_difference
    assert 0.0 < largest < 0.05
    assert diff(dcp, tmp_path / "flax", tolerance=largest).same
    assert not diff(dcp, tmp_path / "flax", tolerance=largest / 2).same


def test_not_a_number_is_the_same_only_where_both_have_it(llama, state, tmp_path):
    model = llama()
    holed = state["model.norm.weight"].clone()
    holed[4] = math.nan
    first = write(tmp_path / "a", model, {**state, "model.norm.weight": holed})
    assert diff(first, first).same
    found = diff(first, write(tmp_path / "b", model), tolerance=1e9)
    assert named(found) == {"model.norm.weight": "values"}
    assert found.max_difference == math.inf


def test_a_changed_leaf_is_found_under_torchs_name(llama, checkpoint, tmp_path):
    dcp = checkpoint(llama())
    convert(dcp, to=tmp_path / "flax")
    leaves = read_parameters(tmp_path / "flax" / "params")
    (tmp_path / "flax" / "params").rename(tmp_path / "before")
    leaves["layers.1.attention.q_proj.kernel"] = np.roll(leaves["layers.1.attention.q_proj.kernel"], 6, axis=1)
    save_parameters(tmp_path / "flax" / "params", leaves)
    assert named(diff(dcp, tmp_path / "flax")) == {"model.layers.1.self_attn.q_proj.weight": "values"}


def test_what_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no such"):
        diff(tmp_path / "absent", tmp_path)
