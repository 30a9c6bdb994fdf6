"""An ONNX model held against the torch model that it was made from.

Owns the random inputs, the run in onnxruntime and the limits; and the int8 form. Knows nothing of checkpoints. The one
decision: an exported model that computes something else is never written, so the check is part of the export.

Shapes: B batch, T tokens.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.shape_inference import quant_pre_process

from converters.source import first_line
from converters.trace.examples import Examples
from pipeline.errors import ConversionError

LIMIT = 1e-3
"""Largest difference relative to the largest output. float32 sums in another order: 3e-6 seen on tiny models."""
_SIZES: tuple[Mapping[str, int], ...] = ({}, {"batch": 3}, {"batch": 1})
"""Checked in turns: the sizes of the export itself, then others; every further open size grows by the turn."""
_DEFAULT_HIGH = 2
"""Integers of an input that indexes no table are below this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OnnxCheck:
    """What was measured."""

    metrics: Mapping[str, float]
    """`max_abs_difference`, and `max_rel_difference`: relative to the largest output of torch."""
    inputs: Mapping[str, Any]
    """Shape (a number, or the name of an open size) and type by name."""
    outputs: Mapping[str, Any]
    sizes: tuple[Mapping[str, int], ...]
    """Open sizes of each run."""


def check_onnx(
    path: Path, *, module: torch.nn.Module, examples: Examples, outputs: tuple[str, ...], is_rounded: bool = False
) -> OnnxCheck:
    """Run the ONNX model and `module` on the same random inputs, at several sizes where sizes are open.

    Args:
        path: of the model.
        module: float32, evaluation mode.
        examples: shapes, types and open sizes of the inputs.
        outputs: names, in the order of the module's tensors.
        is_rounded: the weights are int8: differences are recorded, and only have to be finite.

    Raises:
        ConversionError: onnxruntime refuses the model, or an output differs by more than the limit.
    """
    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own exceptions have no public base
        raise ConversionError(f"{path.name}: onnxruntime refuses it: {first_line(error)}") from error
    open_sizes = {
        name: {axis: size for axis, size in enumerate(value) if isinstance(size, str)}
        for name, value in ((given.name, given.shape) for given in session.get_inputs())
    }
    random = np.random.default_rng(0)
    runs: list[Mapping[str, int]] = []
    worst_abs = worst_rel = 0.0
    for turn, wanted in enumerate(_SIZES):
        sizes = _sizes(examples, open_sizes, wanted, turn)
        if sizes in runs:
            continue
        runs.append(sizes)
        inputs = _random_inputs(examples, module=module, open_sizes=open_sizes, sizes=sizes, random=random)
        difference, largest = _compare(session, module=module, inputs=inputs, outputs=outputs)
        worst_abs, worst_rel = max(worst_abs, difference), max(worst_rel, difference / max(largest, 1e-30))
        limit = np.inf if is_rounded else LIMIT
        if not worst_rel < limit:
            raise ConversionError(
                f"{path.name}: differs from torch by {difference:.3g} in outputs of up to {largest:.3g} at sizes "
                f"{dict(sizes)}; allowed is {limit:g} of the largest",
                hint="the ONNX exporter computes something else than the module; please report the module",
            )
    return OnnxCheck(
        metrics={"max_abs_difference": worst_abs, "max_rel_difference": worst_rel},
        inputs={given.name: {"shape": list(given.shape), "type": given.type} for given in session.get_inputs()},
        outputs={made.name: {"shape": list(made.shape), "type": made.type} for made in session.get_outputs()},
        sizes=tuple(runs),
    )


def quantize(path: Path, *, to: Path) -> None:
    """Write a copy of the model whose weights are int8, a scale for each output channel.

    Raises:
        ConversionError: onnxruntime's quantizer refuses the model.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="quantizing-") as temporary:
            inferred = Path(temporary, path.name)
            quant_pre_process(path, inferred)
            quantize_dynamic(inferred, to, weight_type=QuantType.QInt8, per_channel=True)
    except Exception as error:  # the quantizer raises whatever its passes raise
        raise ConversionError(f"{path.name}: onnxruntime cannot quantize it: {first_line(error)}") from error


def _sizes(
    examples: Examples, open_sizes: Mapping[str, Mapping[int, str]], wanted: Mapping[str, int], turn: int
) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, axes in open_sizes.items():
        for axis, size in axes.items():
            traced = int(examples.inputs[name].shape[axis])
            sizes.setdefault(size, wanted.get(size, traced) if size == "batch" else traced + 2 * turn)
    return sizes


def _random_inputs(
    examples: Examples,
    *,
    module: torch.nn.Module,
    open_sizes: Mapping[str, Mapping[int, str]],
    sizes: Mapping[str, int],
    random: np.random.Generator,
) -> dict[str, NDArray[Any]]:
    inputs = {}
    for name, example in examples.inputs.items():
        axes = open_sizes.get(name, {})
        shape = tuple(sizes[axes[axis]] if axis in axes else size for axis, size in enumerate(example.shape))
        if example.dtype.is_floating_point:
            inputs[name] = random.standard_normal(shape, dtype=np.float32)
        elif "mask" in name and len(shape) == 2:
            # Rows of several lengths, padded on the right, none empty.
            lengths_B1 = np.maximum(shape[1] - np.arange(shape[0]), 1)[:, None]
            inputs[name] = (np.arange(shape[1]) < lengths_B1).astype(np.int64)
        else:
            drawn = random.integers(0, _high(module), shape)
            inputs[name] = drawn.astype(str(example.dtype).removeprefix("torch."))
    return inputs


def _high(module: torch.nn.Module) -> int:
    """One more than the largest integer that the module takes for a token, or that all its tables take."""
    tables = [part.num_embeddings for part in module.modules() if isinstance(part, torch.nn.Embedding)]
    find = getattr(module, "get_input_embeddings", None)
    try:
        table = find() if find is not None else None
    except NotImplementedError:  # a model of two towers names no table of its own
        table = None
    return int(getattr(table, "num_embeddings", 0) or min(tables, default=_DEFAULT_HIGH))


def _compare(
    session: Any, *, module: torch.nn.Module, inputs: Mapping[str, NDArray[Any]], outputs: tuple[str, ...]
) -> tuple[float, float]:
    """Largest difference and largest output of torch, over all outputs."""
    with torch.no_grad():
        made = module(**{name: torch.from_numpy(array) for name, array in inputs.items()})
    taken = {given.name for given in session.get_inputs()}
    found = session.run(list(outputs), {name: array for name, array in inputs.items() if name in taken})
    difference = largest = 0.0
    for ours, theirs in zip(found, tensors_of(made).values(), strict=True):
        reference = theirs.numpy().astype(np.float64)
        gap = np.abs(ours.astype(np.float64) - reference)
        difference = max(difference, float(np.where(np.isnan(gap), np.inf, gap).max(initial=0.0)))
        largest = max(largest, float(np.abs(reference).max(initial=0.0)))
    return difference, largest


def tensors_of(outputs: Any, name: str = "") -> dict[str, torch.Tensor]:
    """Every tensor of a module's output by its name; one that is returned bare is called `output`."""
    if isinstance(outputs, torch.Tensor):
        return {name or "output": outputs}
    if isinstance(outputs, Mapping):
        items = [(str(key), value) for key, value in outputs.items()]
    elif isinstance(outputs, list | tuple):
        items = [(str(number), value) for number, value in enumerate(outputs)]
    else:
        return {}
    found: dict[str, torch.Tensor] = {}
    for key, value in items:
        inner = f"{name}.{key}" if name else (f"output_{key}" if key.isdigit() else key)
        found |= tensors_of(value, inner)
    return found
