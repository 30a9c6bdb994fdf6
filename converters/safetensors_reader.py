"""Safetensors files: one, several with an index, or what each rank of a training wrote.

Owns which files belong together and the reading of their tensors. Knows nothing of families or Flax, and needs no
framework: numpy reads the bytes. The one decision: files are joined only by an index or by the places that ranks wrote
into them; what lies beside each other by chance is never guessed together.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from converters.operations import Array, Shape
from converters.parts import Reading, check_parts, place_of, read_range, regular_file_complaints
from converters.safetensors_header import StoredPart, read_header
from converters.source import BesideTheWeights, TensorHeader, stored_dtype
from pipeline.errors import CheckpointError
from pipeline.models.json_file import read_json

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"


class SafetensorsSource(BesideTheWeights):
    """Open safetensors files; holds headers, no weights."""

    format = "safetensors"

    def __init__(
        self,
        *,
        directory: Path,
        headers: Mapping[str, TensorHeader],
        parts: Mapping[str, Sequence[StoredPart]],
        reading: Reading,
    ) -> None:
        self.directory = directory
        self.headers = headers
        self._parts = parts
        self._reading: Reading = reading

    @staticmethod
    def recognises(path: Path) -> bool:
        """True for a safetensors file, and for a directory that holds some or their index."""
        if path.is_dir():
            return any(path.glob(f"*{SUFFIX}")) or any(path.glob(f"*{INDEX_SUFFIX}"))
        return path.name.endswith(SUFFIX)

    @classmethod
    def open(cls, path: Path, *, reading: Reading = "ranged") -> "SafetensorsSource":
        """Read the headers of the file `path`, or of the files in the directory `path`.

        Raises:
            CheckpointError: a file is missing, truncated or malformed, a tensor is in two files, or several files have
                no index; names every file concerned.
        """
        files, wanted = _files(path) if path.is_dir() else ([path], None)
        complaints = regular_file_complaints(files)
        parts: dict[str, list[StoredPart]] = {}
        for file in (file for file in files if file.is_file()):
            try:
                for name, part in read_header(file).items():
                    parts.setdefault(name, []).append(part)
            except (ValueError, OSError) as error:
                complaints.append(f"{file}: {error}")
        headers: dict[str, TensorHeader] = {}
        for name, found in parts.items():
            try:
                headers[name] = _joined(name, found)
            except ValueError as error:
                complaints.append(f"{name}: {error}")
        if not complaints and wanted is not None:
            complaints += [f"{name}: the index names it, no file holds it" for name in wanted if name not in parts]
            complaints += [f"{name}: in {parts[name][0].path.name}, not in the index" for name in parts.keys() - wanted]
        if not complaints and wanted is None and len(files) > 1 and not all(p[0].is_placed for p in parts.values()):
            complaints.append(_no_index(path, len(files)))
        if complaints:
            raise CheckpointError(f"{path}: damaged checkpoint:\n" + "\n".join(f"  {text}" for text in complaints))
        order = sorted(headers, key=lambda name: (parts[name][0].path, parts[name][0].offset))
        return cls(
            directory=path if path.is_dir() else path.parent,
            headers={name: headers[name] for name in order},
            parts=parts,
            reading=reading,
        )

    def read(self, name: str) -> Array:
        """The tensor; a new array, or a read-only view of the file where it is mapped.

        Raises:
            CheckpointError: the file became shorter since it was opened, or the dtype is none that is read.
        """
        header, parts = self.headers[name], self._parts[name]
        dtype = stored_dtype(header, path=parts[0].path)
        if len(parts) == 1:
            return self._read_part(name, parts[0], dtype=dtype)
        whole = np.empty(header.shape, dtype)
        for part in parts:
            whole[place_of(part)] = self._read_part(name, part, dtype=dtype)
        return whole

    def _read_part(self, name: str, part: StoredPart, *, dtype: np.dtype[Any]) -> Array:
        raw = read_range(part.path, offset=part.offset, num_bytes=part.num_bytes, name=name, reading=self._reading)
        if dtype == np.bool_ and (raw > 1).any():
            raise CheckpointError(f"{part.path}: {name} is bool and holds other bytes than 0 and 1")
        return raw.view(dtype).reshape(part.sizes)


def _joined(name: str, parts: Sequence[StoredPart]) -> TensorHeader:
    """The header of the tensor that the parts make up.

    Raises:
        ValueError: they do not; says why.
    """
    files = " and in ".join(part.path.name for part in parts[:3])
    if len(parts) > 1 and not all(part.is_placed for part in parts):
        raise ValueError(f"in {files}")
    dtypes = sorted({part.dtype for part in parts})
    if len(dtypes) > 1 or len({len(part.sizes) for part in parts}) > 1:
        raise ValueError(f"in {files}, with {' and '.join(dtypes)} of different forms")
    shape: Shape = tuple(
        max(part.starts[axis] + part.sizes[axis] for part in parts) for axis in range(len(parts[0].sizes))
    )
    check_parts(parts, shape=shape)
    return TensorHeader(name=name, shape=shape, dtype=dtypes[0])


def _files(path: Path) -> tuple[list[Path], frozenset[str] | None]:
    """The files to open and, where an index says so, the tensors they must hold."""
    indices = sorted(path.glob(f"*{INDEX_SUFFIX}"))
    if not indices:
        return sorted(path.glob(f"*{SUFFIX}")), None
    if len(indices) > 1:
        raise CheckpointError(f"{path}: several indices: {', '.join(index.name for index in indices)}; keep one")
    return read_index(indices[0])


def read_index(index: Path) -> tuple[list[Path], frozenset[str]]:
    """The files that an index of `save_pretrained` names, and the tensors they must hold.

    Raises:
        CheckpointError: it is malformed, or leads outside of its directory.
    """
    try:
        weight_map = read_json(index)["weight_map"]
        files = sorted({index.parent / str(file) for file in weight_map.values()})
        names = frozenset(map(str, weight_map))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: no index of a sharded checkpoint: {type(error).__name__}: {error}") from error
    outside = [str(file) for file in files if file.parent != index.parent or not file.name.isprintable()]
    if outside:
        raise CheckpointError(f"{index}: points outside of its directory: {', '.join(outside)}")
    return files, names


def _no_index(path: Path, num_files: int) -> str:
    return (
        f"{path}: {num_files} safetensors files, and neither a *{INDEX_SUFFIX} nor the files themselves say how they "
        "belong together; keep one file, or add the index that `save_pretrained` writes"
    )
