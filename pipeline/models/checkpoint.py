"""Parameters of a Flax model on disk, in Orbax, and back into a module.

Owns reading and writing `params/` and the strict match between what is stored and what the module needs. Knows nothing
of torch, of conversion rules or of serving. The one decision: both directions are strict and every complaint is raised
at once, so no abstract, missing or surplus leaf ever leaves this file.

A model directory holds `config.json`, `tokenizer.json`, `params/` and `conversion.json`. Leaf paths are dotted
(`layers.0.mlp.up_proj.kernel`); on disk they are nested dicts with string keys.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from flax import nnx

from pipeline.errors import ArtifactError
from pipeline.models.description import ModelDescription, leaf_dtype
from pipeline.models.registry import describe
from pipeline.models.variables import LEAVES

PARAMETERS_DIRECTORY = "params"
STORED_DTYPES = ("float32", "bfloat16", "float16")
_MAX_COMPLAINTS = 20

# What Orbax and TensorStore raise on files that are missing or cut, found by damaging each file of a checkpoint.
_READ_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError)


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
    if directory.exists():
        raise ArtifactError(f"{directory}: exists already; parameters are never overwritten")
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(directory.resolve(), _nested(leaves))


def read_parameters(directory: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Read an Orbax checkpoint into numpy arrays by dotted path, on any device layout.

    Raises:
        ArtifactError: the directory is missing, truncated or altered.
    """
    if not directory.is_dir():
        raise ArtifactError(f"{directory}: no such directory", hint="a Flax model's parameters are under params/")
    try:
        leaves = _read_leaves(directory.resolve())
    except _READ_ERRORS as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ArtifactError(
            f"{directory}: cannot be read as an Orbax checkpoint: {first}",
            hint="the files are missing, truncated or altered; run the stage that wrote them again",
        ) from error
    if not leaves:
        raise ArtifactError(f"{directory}: the Orbax checkpoint holds no parameters")
    return leaves


def abstract_leaves(description: ModelDescription) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes (and default dtypes) of every leaf of the described model; allocates nothing."""
    return model_leaves(description.abstract())


def model_leaves(model: nnx.Module) -> dict[str, Any]:
    """The leaves of a module by dotted path."""
    return {_dotted(path): variable.get_value() for path, variable in _items(nnx.state(model, LEAVES))}


def load_model(directory: Path, *, dtype: str | None) -> nnx.Module:
    """The module of a model directory with its stored parameters.

    Args:
        directory: with `config.json` and `params/`.
        dtype: cast every leaf to it; None keeps what is stored.

    Raises:
        ArtifactError: leaves are missing, surplus, of another shape or not of a stored dtype; all in one message.
        ParameterError: the config is of no known family or not supported.
    """
    leaves = read_parameters(directory / PARAMETERS_DIRECTORY)
    return build_model(describe(directory), leaves, dtype=dtype, source=str(directory))


def build_model(
    description: ModelDescription, leaves: Mapping[str, Any], *, dtype: str | None, source: str
) -> nnx.Module:
    """As `load_model`, from leaves in memory; `source` names them in errors."""
    wanted = abstract_leaves(description)
    complaints = _complaints(wanted, leaves)
    if complaints:
        shown = complaints[:_MAX_COMPLAINTS]
        if len(complaints) > len(shown):
            shown.append(f"... and {len(complaints) - len(shown)} more")
        raise ArtifactError(
            f"{source}: parameters do not fit config.json ({len(complaints)} complaints):\n"
            + "\n".join(f"  {line}" for line in shown),
            hint="convert the checkpoint again, or restore the config.json it was converted with",
        )
    graph, state, rest = nnx.split(description.abstract(), LEAVES, ...)
    flat = {path: variable.replace(_placed(leaves[_dotted(path)], dtype)) for path, variable in _items(state)}
    return nnx.merge(graph, nnx.from_flat_state(flat), rest)


def _placed(leaf: Any, dtype: str | None) -> jax.Array:
    return jnp.asarray(leaf, leaf_dtype(leaf.dtype, dtype))


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


def _read_leaves(directory: Path) -> dict[str, np.ndarray[Any, Any]]:
    # TensorStore itself, for two reasons: the sharding of the machine that wrote need not exist here, and Orbax, when
    # it fails, leaves hundreds of reads behind that print to stderr after its event loop is closed.
    metadata = json.loads((directory / "_METADATA").read_text(encoding="utf-8"))
    names = [[str(part["key"]) for part in entry["key_metadata"]] for entry in metadata["tree_metadata"].values()]
    spec = {
        "driver": "zarr3" if metadata.get("use_zarr3") else "zarr",
        "fill_missing_data_reads": False,  # a missing chunk would read as zeros
    }
    base = {"driver": "ocdbt", "base": directory.as_uri()}
    stores = {
        ".".join(name): tensorstore.open({**spec, "kvstore": {**base, "path": ".".join(name) + "/"}}, open=True)
        for name in names
    }
    reads = {path: store.result().read() for path, store in stores.items()}
    return {path: np.asarray(read.result()) for path, read in reads.items()}


def _items(state: Any) -> list[tuple[tuple[Any, ...], Any]]:
    return list(nnx.to_flat_state(state))


def _dotted(path: tuple[Any, ...]) -> str:
    # NNX numbers list items with ints, Orbax gives strings back.
    return ".".join(str(key) for key in path)


def _nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, name = path.split(".")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[name] = leaf
    return tree
