"""A Flax model on disk, its parameters in Orbax, and back into a module.

Owns the strict match between what is stored and what the module needs. Knows nothing of torch, of conversion rules or
of serving. The one decision: both directions are strict and every complaint is raised at once, so no abstract, missing
or surplus leaf ever leaves this file.

A model directory holds `config.json` or `program.json`, `tokenizer.json`, `params/` and `conversion.json`. Leaf paths
are dotted (`layers.0.mlp.up_proj.kernel`); on disk they are nested dicts with string keys.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from pipeline.errors import ArtifactError
from pipeline.models.description import ModelDescription
from pipeline.models.parameter_reader import StoredParameters
from pipeline.models.parameter_writer import AnnouncedLeaf, Piece, write_parameters
from pipeline.models.placement import Layout, placed_leaves
from pipeline.models.quantization import SCALE_SUFFIX, quantized_leaf
from pipeline.models.registry import describe
from pipeline.models.variables import LEAVES

PARAMETERS_DIRECTORY = "params"
STORED_DTYPES = ("float32", "bfloat16", "float16", "float64")
_MAX_COMPLAINTS = 20


def save_parameters(directory: Path, leaves: Mapping[str, Any]) -> None:
    """Write `leaves` (dotted path to numpy or jax array) as an Orbax checkpoint.

    Args:
        directory: must not exist yet.
        leaves: every dtype is kept as it is.

    Raises:
        ArtifactError: the directory exists, or a leaf is no array.
    """
    abstract = sorted(path for path, leaf in leaves.items() if not isinstance(leaf, np.ndarray | jax.Array))
    if abstract:
        raise ArtifactError(f"{directory}: not arrays: {', '.join(abstract)}")
    announced = {path: AnnouncedLeaf(leaf.shape, np.dtype(leaf.dtype)) for path, leaf in leaves.items()}
    pieces = (
        Piece(leaves=(path,), num_bytes=2 * leaf.nbytes, make=partial(_as_numpy, leaf)) for path, leaf in leaves.items()
    )
    write_parameters(directory, announced=announced, pieces=pieces)


def _as_numpy(leaf: Any) -> tuple[NDArray[Any]]:
    return (np.asarray(leaf),)


def read_parameters(directory: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Read an Orbax checkpoint into numpy arrays by dotted path, on any device layout.

    Raises:
        ArtifactError: the directory is missing, truncated or altered.
    """
    stored = StoredParameters.open(directory)
    return dict(stored.read_each(stored.headers))


def abstract_leaves(description: ModelDescription) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes (and default dtypes) of every leaf of the described model; allocates nothing."""
    return model_leaves(description.abstract())


def model_leaves(model: nnx.Module) -> dict[str, Any]:
    """The leaves of a module by dotted path."""
    return {_dotted(path): variable.get_value() for path, variable in _items(nnx.state(model, LEAVES))}


def load_model(
    directory: Path,
    *,
    dtype: str | None,
    layout: Layout | None = None,
    prepared: Callable[[nnx.Module], nnx.Module] = lambda model: model,
) -> nnx.Module:
    """The module of a model directory with its stored parameters.

    Leaves are read one after the other, each straight onto its devices, and of each the stretch alone that the devices
    of this process keep: beside the model itself, the host holds the largest such stretch twice (read, and cast) and a
    read-ahead of 64 MiB.

    Args:
        directory: with `config.json` or `program.json`, and `params/`.
        dtype: cast every floating leaf to it; None keeps what is stored.
        layout: on several devices; jax's default device when None.
        prepared: changes the abstract module before leaves are laid in, on one device alone. A leaf `P` beside which it
            puts a `P_scale` is quantized as it is read.

    Raises:
        ArtifactError: leaves are missing, surplus, of another shape or not of a stored dtype; all in one message.
        ParameterError: the config is of no known family or not supported.
    """
    stored = StoredParameters.open(directory / PARAMETERS_DIRECTORY)
    abstract = describe(directory).abstract()
    _check(abstract, stored.headers, source=str(directory))
    if layout is None:
        abstract = prepared(abstract)
        scales = {name for name in model_leaves(abstract) if name.endswith(SCALE_SUFFIX)}
        return _assembled(abstract, _on_one_device(stored.read_each(stored.headers), dtype=dtype, scales=scales))
    abstract = layout.description.abstract()
    return _assembled(abstract, _laid_out(stored, abstract, layout=layout, dtype=dtype))


def build_model(
    description: ModelDescription, leaves: Mapping[str, Any], *, dtype: str | None, source: str
) -> nnx.Module:
    """As `load_model`, from leaves in memory; `source` names them in errors."""
    abstract = description.abstract()
    _check(abstract, leaves, source=source)
    return _assembled(abstract, _on_one_device(leaves.items(), dtype=dtype))


def _check(abstract: nnx.Module, found: Mapping[str, Any], *, source: str) -> None:
    """Hold every leaf against the model.

    Raises:
        ArtifactError: something does not fit; lists all of it.
    """
    complaints = _complaints(model_leaves(abstract), found)
    if complaints:
        shown = complaints[:_MAX_COMPLAINTS]
        if len(complaints) > len(shown):
            shown.append(f"... and {len(complaints) - len(shown)} more")
        raise ArtifactError(
            f"{source}: parameters do not fit its description ({len(complaints)} complaints):\n"
            + "\n".join(f"  {line}" for line in shown),
            hint="convert the checkpoint again, or restore the config.json it was converted with",
        )


def _assembled(abstract: nnx.Module, leaves: Iterable[tuple[str, jax.Array]]) -> nnx.Module:
    """The module with `leaves`, taken one by one; nothing else holds on to them."""
    graph, state, rest = nnx.split(abstract, LEAVES, ...)
    variables = {_dotted(path): (path, variable) for path, variable in _items(state)}
    filled = {}
    for name, leaf in leaves:
        path, variable = variables[name]
        filled[path] = variable.replace(leaf)
        del leaf
    return nnx.merge(graph, nnx.from_flat_state(filled), rest)


def _on_one_device(
    leaves: Iterable[tuple[str, Any]], *, dtype: str | None, scales: Container[str] = ()
) -> Iterator[tuple[str, jax.Array]]:
    for name, leaf in leaves:
        if name + SCALE_SUFFIX in scales:
            # The scales stay float32: rounded, each would be wrong in the same direction for a whole channel.
            for own, array in zip((name, name + SCALE_SUFFIX), quantized_leaf(leaf), strict=True):
                yield own, jnp.asarray(array)
        else:
            yield name, jnp.asarray(_as_jax_keeps(name, leaf, dtype))
        del leaf


def _laid_out(
    stored: StoredParameters, abstract: nnx.Module, *, layout: Layout, dtype: str | None
) -> Iterator[tuple[str, jax.Array]]:
    shapes = {path: tuple(leaf.shape) for path, leaf in model_leaves(abstract).items()}
    leaves = {leaf.path: leaf for leaf in placed_leaves(layout, shapes)}
    for path, part in stored.read_stretches((leaf.path, leaf.wanted) for leaf in leaves.values()):
        yield path, leaves[path].put(_as_jax_keeps(path, part, dtype))
        del part


def _as_jax_keeps(name: str, leaf: Any, dtype: str | None) -> NDArray[Any]:
    """The leaf in the dtype that jax holds it in: `dtype` where it is a float, its own where it counts or masks.

    Raises:
        ArtifactError: a counter is too large for jax's integers.
    """
    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    wanted = np.dtype(dtype if is_float and dtype is not None else leaf.dtype)
    kept = jax.dtypes.canonicalize_dtype(wanted)  # 64 bits become 32 unless jax is told otherwise
    cast = np.asarray(leaf).astype(kept, copy=False)
    if jnp.issubdtype(kept, jnp.integer) and not np.array_equal(cast, leaf):
        raise ArtifactError(f"{name}: holds numbers that do not fit in {kept}, which is what jax keeps {wanted} in")
    return cast


def _complaints(wanted: Mapping[str, jax.ShapeDtypeStruct], found: Mapping[str, Any]) -> list[str]:
    lines = [f"missing: {path} {wanted[path].shape}" for path in sorted(wanted.keys() - found.keys())]
    lines += [f"surplus: {path} {found[path].shape}" for path in sorted(found.keys() - wanted.keys())]
    for path in sorted(wanted.keys() & found.keys()):
        leaf = found[path]
        if tuple(leaf.shape) != tuple(wanted[path].shape):
            lines.append(f"shape: {path} is {tuple(leaf.shape)}, must be {tuple(wanted[path].shape)}")
        if str(leaf.dtype) not in STORED_DTYPES and jnp.issubdtype(wanted[path].dtype, jnp.floating):
            lines.append(f"dtype: {path} is {leaf.dtype}, must be one of {', '.join(STORED_DTYPES)}")
    return lines


def _items(state: Any) -> list[tuple[tuple[Any, ...], Any]]:
    return list(nnx.to_flat_state(state))


def _dotted(path: tuple[Any, ...]) -> str:
    # NNX numbers list items with ints, Orbax gives strings back.
    return ".".join(str(key) for key in path)
