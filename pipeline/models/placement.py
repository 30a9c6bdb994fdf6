"""Where the leaves of a model lie.

Owns the choice of a sharding for each leaf. Knows no model. The one decision: a placement is a function of the leaf's
path, so a leaf goes from the disk straight to the devices that keep it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from numpy.typing import NDArray

from pipeline.errors import ParameterError

Placement = Callable[[str, tuple[int, ...]], Sharding]
"""Sharding of the leaf at a dotted path with a shape."""


def by_rules(mesh: Mesh, *, rules: Sequence[tuple[str, PartitionSpec]]) -> Placement:
    """A placement on `mesh`: the first rule whose pattern is found in the path; replicated where none is.

    Args:
        mesh: the devices.
        rules: a regular expression and the mesh axes by dimension, for example `("up_proj.kernel$",
            PartitionSpec(None, "model"))`.

    Returns:
        A function that raises `ParameterError` for a leaf that its rule does not divide evenly.
    """

    def place(path: str, shape: tuple[int, ...]) -> Sharding:
        pattern, spec = next(
            ((pattern, spec) for pattern, spec in rules if re.search(pattern, path)), ("", PartitionSpec())
        )
        sharding = NamedSharding(mesh, spec)
        try:
            sharding.check_compatible_aval(shape)  # as many dimensions
            sharding.shard_shape(shape)  # that the mesh divides
        except ValueError as error:
            axes: Mapping[str, int] = dict(mesh.shape)
            raise ParameterError(
                f"{path}: the rule {pattern!r} lays {spec} of the mesh {axes} on shape {shape}, which it does not "
                "divide",
                hint="use a mesh axis that divides the dimension, or leave the dimension whole",
            ) from error
        return sharding

    return place


def put(array: NDArray[Any], sharding: Sharding | None) -> jax.Array:
    """The array on its devices; each device is sent its own part and nothing else."""
    if sharding is None:
        return jax.numpy.asarray(array)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
