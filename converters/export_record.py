"""What an export is asked for, and what it says of itself.

Owns both shapes. Knows no format. The one decision: whatever an exporter chose (an opset, the sizes that may vary) and
whatever it measured is in the record, so nothing has to be read out of the files again.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from converters.mapping import DtypePolicy
from converters.safetensors_writer import MAX_SHARD_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """What the caller may choose; each format reads its own part."""

    dtype: DtypePolicy = "keep"
    """`keep` is the dtype of the checkpoint that the model came from; the others cast every weight."""
    max_shard_bytes: int = MAX_SHARD_BYTES
    """Of safetensors files."""
    opset: int | None = None
    """Of ONNX; the exporter's own choice when None."""
    int8: bool = False
    """Also write an ONNX model with weights in int8, by onnxruntime's dynamic quantizer."""
    progress: Callable[[int, int], None] | None = None
    """Told tensors done and tensors in all."""
    project_root: Path | None = None
    """Where the factory of a `module.json` is looked for first; the working directory when None."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRecord:
    """What was written."""

    format: str
    source_format: str
    dtype_policy: str
    files: tuple[str, ...]
    num_tensors: int
    num_bytes: int
    """Of all files."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the exporter chose; JSON values."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What it measured: differences from the model that was exported."""
    warnings: tuple[str, ...] = ()


def files_of(directory: Path) -> tuple[tuple[str, ...], int]:
    """Names and bytes of everything in a directory."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return tuple(path.relative_to(directory).as_posix() for path in files), sum(path.stat().st_size for path in files)
