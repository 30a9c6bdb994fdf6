"""Models out of the house: the directory formats that others read.

Owns which formats there are and that a directory appears complete or not at all. Knows no format: each is a dotted
string that is resolved when it is asked for, since every one needs other frameworks. The one decision: whatever the
format, the source may be a Flax model directory or a torch checkpoint.
"""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path

from converters.appearing import appearing, check_free
from converters.export_record import ExportOptions, ExportRecord
from converters.mapping import DtypePolicy
from converters.safetensors_writer import MAX_SHARD_BYTES
from pipeline.errors import UsageError, nearest_name

EXPORTERS: Mapping[str, str] = {
    "safetensors": "converters.safetensors_export:write",
    "onnx": "converters.torch_onnx_export:write",
    "stablehlo": "converters.flax_stablehlo:write",
}
"""`(source, directory, options) -> ExportRecord`, into an existing empty directory."""


def export(
    model: Path | str,
    *,
    to: Path | str,
    format: str = "safetensors",
    dtype: DtypePolicy = "keep",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    opset: int | None = None,
    int8: bool = False,
    progress: Callable[[int, int], None] | None = None,
    project_root: Path | None = None,
) -> ExportRecord:
    """Write a model in a format that others read.

    Args:
        model: a Flax model directory, or anything that `open_source` reads.
        to: the new directory. It must not exist or be empty.
        format: `safetensors` (a transformers directory), `onnx` (checked with onnxruntime against torch) or `stablehlo`
            (the jitted Flax forward, for jax alone).
        dtype: `keep` is the dtype that each tensor had in the checkpoint; the others cast every weight.
        max_shard_bytes: of safetensors files.
        opset: of ONNX; the exporter's own choice when None.
        int8: also write an ONNX model whose weights are int8, by onnxruntime's dynamic quantizer.
        progress: told tensors done and tensors in all, where the format goes by tensors.
        project_root: where the factory of a `module.json` is looked for first; the working directory when None.

    Raises:
        UsageError: there is no such format; names the nearest.
        ArtifactError: the Flax model is missing or damaged.
        CheckpointError: the checkpoint is missing, truncated or altered.
        ConversionError: the model cannot be expressed in the format, or `to` holds something.
        StoreError: `to` cannot be written.
    """
    if format not in EXPORTERS:
        guess = nearest_name(format, tuple(EXPORTERS))
        raise UsageError(
            f"no export format {format!r}; allowed: {', '.join(EXPORTERS)}",
            hint=f"did you mean {guess!r}?" if guess else "",
        )
    model, to = Path(model), Path(to)
    check_free(to)
    options = ExportOptions(
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        opset=opset,
        int8=int8,
        progress=progress,
        project_root=project_root,
    )
    module, _, name = EXPORTERS[format].partition(":")
    write: Callable[[Path, Path, ExportOptions], ExportRecord] = getattr(importlib.import_module(module), name)
    with appearing(to) as directory:
        return write(model, directory, options)
