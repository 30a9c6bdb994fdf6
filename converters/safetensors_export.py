"""A directory that transformers loads: safetensors, config and companions.

Owns which tensors go out, under which names and in which dtype. Knows nothing of the file layout, of families or of
frameworks. The one decision: what goes out is what `save_pretrained` would write: the names of the checkpoint without
training's wrappers, a tied tensor once, each tensor in the dtype that it came in.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from converters.export_record import ExportOptions, ExportRecord, files_of
from converters.families.registry import TABLES, table_for
from converters.flax_source import FlaxSource, open_model
from converters.mapping import DtypePolicy
from converters.operations import DTYPES, FLOAT_DTYPES, Array
from converters.safetensors_writer import write_sharded
from converters.source import CONFIG_FILE, CheckpointSource, TensorHeader
from converters.wrappers import canonical_names
from pipeline.errors import ConversionError
from pipeline.models.module_file import MODULE_FILE

_DTYPE_KEYS = ("dtype", "torch_dtype")
_CHUNK = 2**20
"""Numbers compared at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outgoing:
    """Tensors in the form in which they leave."""

    source: CheckpointSource
    stored: Mapping[str, str]
    """Stored name by name."""
    headers: Mapping[str, TensorHeader]
    """In the dtype that is written, by name."""
    rounded: list[str]
    """Names of tensors that the cast changed, as far as they were read."""

    def read(self, name: str) -> Array:
        array = self.source.read(self.stored[name])
        cast = array.astype(DTYPES[self.headers[name].dtype], copy=False)
        if cast.dtype != array.dtype and not _survives(array, cast):
            self.rounded.append(name)
        return cast


def write(source: Path, directory: Path, options: ExportOptions) -> ExportRecord:
    """Write the model in `source` into `directory`; see `converters.exporting.export`."""
    opened = open_model(source)
    outgoing = _outgoing(opened, dtype=options.dtype)
    write_sharded(
        directory,
        headers=outgoing.headers,
        read=outgoing.read,
        max_shard_bytes=options.max_shard_bytes,
        progress=options.progress,
    )
    _write_description(opened, directory=directory, dtype=options.dtype)
    for name, content in opened.companions().items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)
    files, num_bytes = files_of(directory)
    rounded = f"{len(outgoing.rounded)} of {len(outgoing.headers)} tensors were rounded by the cast"
    return ExportRecord(
        format="safetensors",
        source_format=opened.format,
        dtype_policy=options.dtype,
        files=files,
        num_tensors=len(outgoing.headers),
        num_bytes=num_bytes,
        facts={"dtypes": sorted({header.dtype for header in outgoing.headers.values()})},
        warnings=(rounded,) if outgoing.rounded else (),
    )


def _outgoing(source: CheckpointSource, *, dtype: DtypePolicy) -> _Outgoing:
    stored = canonical_names(source.headers)
    tied = _tied(source, stored)
    dtypes = source.manifest.source_dtypes if isinstance(source, FlaxSource) else {}
    headers = {}
    for name, key in stored.items():
        if name in tied:
            continue
        header = source.headers[key]
        if header.dtype not in DTYPES:
            raise ConversionError(f"{name}: dtype {header.dtype} is none that is written; allowed: {', '.join(DTYPES)}")
        wanted = dtypes.get(name, header.dtype) if dtype == "keep" or header.dtype not in FLOAT_DTYPES else dtype
        headers[name] = replace(header, name=name, dtype=wanted)
    return _Outgoing(source=source, stored=stored, headers=headers, rounded=[])


def _survives(array: Array, cast: Array) -> bool:
    """True where the cast lost nothing."""
    flat, flat_cast = array.reshape(-1), cast.reshape(-1)
    return all(
        np.array_equal(
            flat[start : start + _CHUNK], flat_cast[start : start + _CHUNK].astype(array.dtype), equal_nan=True
        )
        for start in range(0, array.size, _CHUNK)
    )


def _tied(source: CheckpointSource, stored: Mapping[str, str]) -> frozenset[str]:
    """Names that hold the same parameter as another one that goes out."""
    if isinstance(source, FlaxSource):
        return frozenset(source.manifest.tied)
    if (source.directory / MODULE_FILE).is_file():
        return frozenset()
    config = source.config()
    if config.get("model_type") not in TABLES:
        return frozenset()
    ties = table_for(config, names=tuple(stored)).ties
    return frozenset(tie.tensor for tie in ties if tie.tensor in stored and tie.same_as in stored)


def _write_description(source: CheckpointSource, *, directory: Path, dtype: DtypePolicy) -> None:
    """`module.json` or `config.json`; with another dtype where the weights have one."""
    if (source.directory / MODULE_FILE).is_file():
        shutil.copyfile(source.directory / MODULE_FILE, directory / MODULE_FILE)
        return
    config = source.config()
    # What was dequantized has a config of its own: transformers would look for the scales.
    if dtype == "keep" and not source.dequantized and (source.directory / CONFIG_FILE).is_file():
        shutil.copyfile(source.directory / CONFIG_FILE, directory / CONFIG_FILE)
        return
    if dtype != "keep":
        config = {key: value for key, value in config.items() if key not in _DTYPE_KEYS} | {"dtype": dtype}
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
