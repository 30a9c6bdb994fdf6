"""Wrapper prefixes are removed by a declared list, and never so that two tensors become one."""

import pytest

from converters.wrappers import canonical, canonical_names
from pipeline.errors import ConversionError


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("model.norm.weight", "model.norm.weight"),
        ("_orig_mod.model.norm.weight", "model.norm.weight"),
        ("module._orig_mod.model.norm.weight", "model.norm.weight"),
        ("_orig_mod.module.model.norm.weight", "model.norm.weight"),
        (
            "model.layers.0._checkpoint_wrapped_module._orig_mod.mlp.up_proj.weight",
            "model.layers.0.mlp.up_proj.weight",
        ),
        ("model.module.weight", "model.module.weight"),
        ("encoder_orig_mod.weight", "encoder_orig_mod.weight"),
    ],
)
def test_wrappers_are_removed(stored, name):
    assert canonical(stored) == name


def test_two_tensors_that_become_one_are_an_error():
    with pytest.raises(ConversionError, match=r"stored twice, as 'model\.w' and as '_orig_mod\.model\.w'"):
        canonical_names(["model.w", "_orig_mod.model.w", "model.v"])


KNOWN = {"model.norm.weight", "model.layers.0.w", "lm_head.weight"}
PREFIXES = ("model.", "language_model.model.")


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("model.norm.weight", "model.norm.weight"),
        ("norm.weight", "model.norm.weight"),
        ("_orig_mod.norm.weight", "model.norm.weight"),
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("model.lm_head.weight", "lm_head.weight"),
        ("nothing.weight", "nothing.weight"),
    ],
)
def test_prefixes_of_a_family_are_given_and_taken(stored, name):
    assert canonical_names([stored], prefixes=PREFIXES, is_known=KNOWN.__contains__) == {name: stored}


def test_names_are_left_alone_without_a_family():
    assert canonical_names(["norm.weight"]) == {"norm.weight": "norm.weight"}


def test_a_base_model_beside_the_whole_one_is_an_error():
    with pytest.raises(ConversionError, match=r"stored twice, as 'norm\.weight' and as 'model\.norm\.weight'"):
        canonical_names(["norm.weight", "model.norm.weight"], prefixes=PREFIXES, is_known=KNOWN.__contains__)


def test_a_name_that_could_be_two_of_the_family_is_an_error():
    known = {"bert.w", "encoder.w"}
    with pytest.raises(ConversionError, match=r"w: could be bert\.w or encoder\.w"):
        canonical_names(["w"], prefixes=("bert.", "encoder."), is_known=known.__contains__)
