"""Two independent readings of one checkpoint: tensors bit for bit, blocks and outputs side by side."""

import numpy as np
import pytest
import torch

from converters.conversion import convert
from converters.model_pair import load_pair
from converters.parity import check_parity
from converters.parity_report import ParityLimits
from converters.parity_tensors import compare_tensors
from converters.torch_model import load_torch_model
from pipeline.errors import ConversionError
from pipeline.models.checkpoint import read_parameters, save_parameters

# Two layers of float32 sums in another order; seen 9.4e-7.
BLOCK_ERROR = 4e-6


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


def test_an_honest_conversion_holds_on_every_level(pair):
    steps = []
    report = check_parity(*pair, continued_tokens=5, progress=lambda *step: steps.append(step))
    assert report.passed, report.failures
    assert (report.name, report.kind, report.road) == ("llama", "causal-lm", "family")
    assert [block.name for block in report.blocks] == ["embed_tokens", "layers.0", "layers.1", "norm"]
    assert [block.torch_name for block in report.blocks][1:3] == ["model.layers.0", "model.layers.1"]
    assert all(0 < block.max_relative < BLOCK_ERROR for block in report.blocks[1:])
    assert [output.name for output in report.outputs] == ["logits"]
    assert report.metrics["greedy_match"] == report.metrics["topk_overlap"] == 1.0
    assert all(len(continued.candidate) == 5 for continued in report.continuations)
    assert [(done, total) for done, total, _ in steps] == [(1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize(
    ("leaf", "fault", "first"),
    [
        ("layers.1.attention.q_proj.kernel", lambda leaf: np.roll(leaf, 6, axis=1), "layers.1"),
        ("layers.0.mlp.down_proj.kernel", lambda leaf: leaf[::-1].copy(), "layers.0"),
        ("norm.scale", lambda leaf: leaf - 1.0, "norm"),
    ],
    ids=["swapped heads", "reversed rows", "shifted norm"],
)
def test_the_first_block_that_is_wrong_is_named(pair, leaf, fault, first):
    checkpoint, model = pair
    rewrite(model, lambda path, value: fault(value) if path == leaf else value)
    report = check_parity(checkpoint, model, continued_tokens=0)
    assert report.first_block_over_limit.name == first
    assert [failure.partition(":")[0] for failure in report.failures][:2] == ["tensors", "blocks"]
    assert any(failure.startswith("outputs: logits differs") for failure in report.failures)


def test_limits_are_the_callers(pair):
    report = check_parity(*pair, continued_tokens=0, limits=ParityLimits(block_relative_error=1e-9))
    assert report.first_block_over_limit.name == "layers.0"
    assert len(report.failures) == 1


def test_seeds_give_other_inputs(pair):
    first, second = (check_parity(*pair, continued_tokens=0, seed=seed) for seed in (0, 1))
    assert first.outputs[0].max_abs != second.outputs[0].max_abs


def test_a_declared_cast_is_compared_with_torch_rounded_the_same_way(llama, checkpoint, tmp_path):
    directory = checkpoint(llama())
    convert(directory, to=tmp_path / "flax", dtype="bfloat16")
    report = check_parity(directory, tmp_path / "flax", continued_tokens=4)
    assert report.passed, report.failures
    assert report.tensors.rounded
    assert report.metrics["tensors_identical"] < 1.0
