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
