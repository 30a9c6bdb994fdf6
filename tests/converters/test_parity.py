"""Two independent readings of one checkpoint: tensors bit for bit, models side by side."""

import numpy as np
import pytest
import torch

from converters.conversion import convert
from converters.model_pair import load_pair
from converters.parity_tensors import compare_tensors
from converters.torch_model import load_torch_model
from pipeline.errors import ConversionError
from pipeline.models.checkpoint import read_parameters, save_parameters


@pytest.fixture
def pair(llama, checkpoint, tmp_path):
    directory = checkpoint(llama())
    convert(directory, to=tmp_path / "flax")
    return directory, tmp_path / "flax"


def rewrite(directory, change):
    leaves = read_parameters(directory / "params")
    (directory / "params").rename(directory / "params-before")
    save_parameters(directory / "params", {path: change(path, leaf) for path, leaf in leaves.items()})


def test_honest_conversion_is_identical(pair):
    checkpoint, model = pair
    agreement = compare_tensors(checkpoint, model=model)
    assert agreement.num_identical == agreement.num_tensors == 20
    assert agreement.differing == agreement.rounded == ()


def test_swapped_query_rows_are_named(pair):
    """Right shape, wrong values: two heads of one query projection change places."""
    checkpoint, model = pair

    def swap(path, leaf):
        return np.roll(leaf, 6, axis=1) if path == "layers.1.attention.q_proj.kernel" else leaf

    rewrite(model, swap)
    assert compare_tensors(checkpoint, model=model).differing == ("model.layers.1.self_attn.q_proj.weight",)


def test_declared_rounding_is_told_from_damage(llama, checkpoint, tmp_path):
    directory = checkpoint(llama())
    convert(directory, to=tmp_path / "flax", dtype="bfloat16")
    agreement = compare_tensors(directory, model=tmp_path / "flax")
    assert agreement.differing == ()
    assert len(agreement.rounded) == agreement.num_tensors - agreement.num_identical > 0


def test_torch_side_does_not_go_through_the_rules(llama, checkpoint):
    model = llama(tie_word_embeddings=False, attention_bias=True)
    loaded = load_torch_model(checkpoint(model))
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_tied_head_stays_one_parameter(llama, checkpoint):
    model = llama()
    state = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    loaded = load_torch_model(checkpoint(model, state=state))
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_torch_model_that_is_not_filled_is_an_error(llama, checkpoint):
    model = llama()
    state = {name: value for name, value in model.state_dict().items() if "layers.1.mlp.up" not in name}
    with pytest.raises(ConversionError, match=r"model\.layers\.1\.mlp\.up_proj\.weight: the torch model needs it"):
        load_torch_model(checkpoint(model, state=state))


def test_models_of_different_configs_are_not_compared(llama, checkpoint, pair):
    _, model = pair
    with pytest.raises(ConversionError, match=r"rms_norm_eps: 0\.001 and 1e-05"):
        load_pair(checkpoint(llama(rms_norm_eps=1e-3)), model=model)
