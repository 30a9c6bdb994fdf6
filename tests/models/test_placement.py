"""Where leaves are laid, by their paths."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from pipeline.errors import ParameterError
from pipeline.models.placement import by_rules, put

MESH = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
RULES = (("up_proj.kernel$", PartitionSpec(None, "model")), ("kernel$", PartitionSpec("model")))


def test_the_first_rule_that_fits_decides_and_the_rest_is_whole():
    place = by_rules(MESH, rules=RULES)
    assert place("layers.0.up_proj.kernel", (4, 6)).spec == PartitionSpec(None, "model")
    assert place("layers.0.down_proj.kernel", (4, 6)).spec == PartitionSpec("model")
    assert place("norm.scale", (4,)).spec == PartitionSpec()


def test_a_spec_that_does_not_fit_a_shape_names_leaf_rule_and_mesh():
    place = by_rules(MESH, rules=(("kernel$", PartitionSpec(None, None, "model")),))
    with pytest.raises(ParameterError, match=r"a\.kernel: the rule 'kernel\$' lays .* on shape \(4, 6\)"):
        place("a.kernel", (4, 6))


def test_an_array_is_put_with_its_sharding():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    sharding = by_rules(MESH, rules=RULES)("kernel", array.shape)
    made = put(array, sharding)
    assert made.sharding == sharding
    np.testing.assert_array_equal(made, array)
