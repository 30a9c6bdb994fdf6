"""The forward pass of a Flax model as StableHLO, for jax alone.

Owns what is exported and with which sizes open. Knows no family. The one decision: parameters are arguments and lie
beside the program, never constants in it, so the program stays small and takes any weights of the same model.

A directory holds `model.stablehlo` (`jax.export`, serialized), `parameters.safetensors` (leaves by path) and
`stablehlo.json`. It needs neither flax nor this package:

    program = jax.export.deserialize(bytearray(Path("model.stablehlo").read_bytes()))
    outputs = program.call(safetensors.flax.load_file("parameters.safetensors"), {"input_ids": tokens, ...})
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import export

from converters.conversion import convert
from converters.export_record import ExportOptions, ExportRecord, files_of
from converters.flax_source import FlaxSource
from converters.parity_blocks import relative_errors
from converters.safetensors_writer import write_file
from converters.source import TensorHeader, first_line
from pipeline.errors import ConversionError
from pipeline.models.checkpoint import load_model
from pipeline.models.description import Arrays, ModelDescription
from pipeline.models.registry import describe
from pipeline.models.traced.description import TracedModel
from pipeline.models.variables import LEAVES

PROGRAM_FILE = "model.stablehlo"
PARAMETERS_FILE = "parameters.safetensors"
RECORD_FILE = "stablehlo.json"
PLATFORMS = ("cpu", "cuda", "tpu")
BATCH, SEQUENCE = "batch", "sequence"
LIMIT = 1e-5
_LIMIT_EPSILONS = 4
"""Largest difference of the exported program, relative to the largest output: `LIMIT`, or this many times the spacing
of the output's dtype where that is more. XLA may sum in another order where sizes are open."""

Forward = Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, jax.Array]]


@dataclass(frozen=True, kw_only=True)
class _Exported:
    program: export.Exported
    open_sizes: Mapping[str, Mapping[int, str]]
    """Name of each open size by input and axis."""
    longest: int | None
    """The most tokens that the model takes, where it has a limit."""
    refusals: tuple[str, ...]
    """Why sizes that might have been open are not."""


def write(source: Path, directory: Path, options: ExportOptions) -> ExportRecord:
    """Write the model in `source` into `directory`; see `converters.exporting.export`.

    Raises:
        ConversionError: jax cannot export the forward pass, or what was exported computes something else.
    """
    with _flax_directory(source, options) as (model, source_format):
        description = describe(model)
        module = load_model(model, dtype=None if options.dtype == "keep" else options.dtype)
    forward, leaves = _pure(description, module)
    examples = description.example_inputs(seed=0)
    exported = _export(forward, leaves, description=description, examples=examples)
    (directory / PROGRAM_FILE).write_bytes(bytes(exported.program.serialize()))
    headers = {
        path: TensorHeader(name=path, shape=tuple(leaf.shape), dtype=str(leaf.dtype)) for path, leaf in leaves.items()
    }
    write_file(directory / PARAMETERS_FILE, headers=headers, read=lambda path: np.asarray(leaves[path]))
    difference = _check(
        directory / PROGRAM_FILE,
        forward,
        leaves,
        description=description,
        inputs=(examples, _smaller(examples, exported.open_sizes)),
    )
    facts = _facts(exported, examples, description=description)
    (directory / RECORD_FILE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    files, num_bytes = files_of(directory)
    return ExportRecord(
        format="stablehlo",
        source_format=source_format,
        dtype_policy=options.dtype,
        files=files,
        num_tensors=len(leaves),
        num_bytes=num_bytes,
        facts=facts,
        metrics={"max_rel_difference": difference},
        warnings=tuple(f"sizes are fixed: {refusal}" for refusal in exported.refusals),
    )


@contextmanager
def _flax_directory(source: Path, options: ExportOptions) -> Iterator[tuple[Path, str]]:
    """A Flax model directory and the format it comes from; a checkpoint becomes one for as long as it is needed."""
    if FlaxSource.recognises(source):
        yield source, FlaxSource.format
        return
    with tempfile.TemporaryDirectory(prefix="exporting-") as temporary:
        model = Path(temporary) / "model"
        manifest = convert(source, to=model, progress=options.progress, project_root=options.project_root)
        yield model, manifest.source_format


def _pure(description: ModelDescription, module: nnx.Module) -> tuple[Forward, dict[str, jax.Array]]:
    """The forward pass as a function of leaves by dotted path and inputs by name, and the leaves."""
    graph, state, rest = nnx.split(module, LEAVES, ...)
    variables = {".".join(map(str, path)): (path, variable) for path, variable in nnx.to_flat_state(state)}

    def forward(leaves: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, jax.Array]:
        filled = {path: variable.replace(leaves[name]) for name, (path, variable) in variables.items()}
        merged = nnx.merge(graph, nnx.from_flat_state(filled), rest)
        return description.forward(merged, inputs)

    return forward, {name: variable.get_value() for name, (_, variable) in variables.items()}


def _export(
    forward: Forward, leaves: Mapping[str, jax.Array], *, description: ModelDescription, examples: Arrays
) -> _Exported:
    """The export with the most open sizes that jax can express.

    Raises:
        ConversionError: it can express none, not even with every size fixed.
    """
    refusals: list[str] = []
    given = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in leaves.items()}
    for open_sizes in _choices(description, examples):
        longest = _longest(description, open_sizes)
        try:
            specs = _specs(examples, open_sizes, longest=longest)
            program = export.export(jax.jit(forward), platforms=PLATFORMS)(given, specs)
        except Exception as error:  # shape arithmetic that is not conclusive raises whatever the model makes of it
            if not open_sizes:
                raise ConversionError(
                    f"{description.name}: jax cannot export its forward pass: {first_line(error)}"
                ) from error
            names = sorted({name for axes in open_sizes.values() for name in axes.values()})
            refusals.append(f"{', '.join(names)} cannot be open: {first_line(error)}")
        else:
            return _Exported(program=program, open_sizes=open_sizes, longest=longest, refusals=tuple(refusals))
    raise AssertionError


def _choices(description: ModelDescription, examples: Arrays) -> list[dict[str, dict[int, str]]]:
    """Open sizes to try, the most first and none last."""
    if isinstance(description, TracedModel):
        every = {
            name: {axis: size for axis, size in enumerate(spec.shape) if isinstance(size, str)}
            for name, spec in description.program.inputs.items()
        }
    else:
        every = _family_sizes(examples)
    only_batch = {
        name: {axis: size for axis, size in axes.items() if size.endswith(BATCH)} for name, axes in every.items()
    }
    choices = [choice for choice in (every, only_batch) if any(choice.values())]
    return [*(choices if every != only_batch else choices[:1]), {}]


def _family_sizes(examples: Arrays) -> dict[str, dict[int, str]]:
    """A family's inputs: rows on the first axis; of text, tokens on the second.

    Examples have equal sizes only where the model needs them equal.
    """
    names: dict[tuple[int, int], str] = {}
    sizes: dict[str, dict[int, str]] = {}
    for name, array in examples.items():
        is_text = array.ndim == 2 and np.issubdtype(array.dtype, np.integer)
        for axis, plain in ((0, BATCH), (1, SEQUENCE)) if is_text else ((0, BATCH),):
            is_first = not any(taken == plain for taken in names.values())
            size = names.setdefault((axis, array.shape[axis]), plain if is_first else f"{name}_{plain}")
            sizes.setdefault(name, {})[axis] = size
    return sizes


def _longest(description: ModelDescription, open_sizes: Mapping[str, Mapping[int, str]]) -> int | None:
    """What the open size `sequence` is at most; models compare it with the length of their tables."""
    limit = getattr(getattr(description, "parsed", None), "max_position_embeddings", None)
    return limit if any(SEQUENCE in axes.values() for axes in open_sizes.values()) else None


def _specs(
    examples: Arrays, open_sizes: Mapping[str, Mapping[int, str]], *, longest: int | None
) -> dict[str, jax.ShapeDtypeStruct]:
    scope = export.SymbolicScope(() if longest is None else (f"{SEQUENCE} <= {longest}",))
    specs = {}
    for name, array in examples.items():
        axes = open_sizes.get(name, {})
        text = ", ".join(axes.get(axis, str(size)) for axis, size in enumerate(array.shape))
        specs[name] = jax.ShapeDtypeStruct(export.symbolic_shape(text, scope=scope), array.dtype)
    return specs


def _check(
    path: Path,
    forward: Forward,
    leaves: Mapping[str, jax.Array],
    *,
    description: ModelDescription,
    inputs: Sequence[Arrays],
) -> float:
    """Run the program as it lies on disk against the module on each of `inputs`.

    Raises:
        ConversionError: an output differs by more than the limit, or is not finite on one side.
    """
    program = export.deserialize(bytearray(path.read_bytes()))
    run = jax.jit(forward)
    worst = 0.0
    limit = LIMIT
    for given in inputs:
        found = program.call(dict(leaves), given)
        for name, wanted in run(leaves, given).items():
            error, _ = relative_errors(np.asarray(wanted, np.float64), np.asarray(found[name], np.float64))
            worst = max(worst, error)
            if jnp.issubdtype(wanted.dtype, jnp.floating):
                limit = max(limit, _LIMIT_EPSILONS * float(jnp.finfo(wanted.dtype).eps))
    if not worst < limit:
        raise ConversionError(
            f"{description.name}: the exported program differs from the module by {worst:.3g} of the largest output; "
            f"allowed is {limit:g}"
        )
    return worst


def _smaller(examples: Arrays, open_sizes: Mapping[str, Mapping[int, str]]) -> Arrays:
    """The first examples with every open size one less."""
    return {
        name: array[
            tuple(slice(0, max(size - (axis in open_sizes.get(name, {})), 1)) for axis, size in enumerate(array.shape))
        ]
        for name, array in examples.items()
    }


def _facts(exported: _Exported, examples: Arrays, *, description: ModelDescription) -> dict[str, Any]:
    outputs = jax.tree.unflatten(exported.program.out_tree, exported.program.out_avals)
    return {
        "model": description.name,
        "kind": str(description.kind),
        "program": PROGRAM_FILE,
        "parameters": PARAMETERS_FILE,
        "arguments": "parameters by path, inputs by name",
        "inputs": {
            name: {
                "shape": [exported.open_sizes.get(name, {}).get(axis, size) for axis, size in enumerate(array.shape)],
                "dtype": str(array.dtype),
            }
            for name, array in examples.items()
        },
        "outputs": {
            name: {
                "shape": [size if isinstance(size, int) else str(size) for size in aval.shape],
                "dtype": str(aval.dtype),
            }
            for name, aval in outputs.items()
        },
        "limits": {} if exported.longest is None else {SEQUENCE: exported.longest},
        "platforms": list(exported.program.platforms),
        "calling_convention_version": exported.program.calling_convention_version,
        "jax_version": jax.__version__,
        "fixed_because": list(exported.refusals),
    }
