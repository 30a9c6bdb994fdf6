"""torch.distributed.checkpoint directories, read without FSDP, without a process group, at any saved world size.

Owns the reading of `.metadata` and of the chunks of the model subtree; optimizer state is never touched. Knows nothing
of families or Flax. The one decision: the metadata's offsets, not the ranks, say where a chunk belongs, so one reader
serves checkpoints of one rank and of a thousand; and nothing is unpickled beyond the classes that DCP itself writes.

Layout: `.metadata` (a pickle of `torch.distributed.checkpoint.metadata.Metadata`) beside `*.distcp` files, each a
row of `torch.save` archives at the offsets that the metadata gives.
"""

import io
import math
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from converters.model_subtree import AVERAGE, model_subtree
from converters.operations import Array, Shape
from converters.parts import check_parts, place_of
from converters.pickle_instructions import check_instructions
from converters.source import CONFIG_FILE, BesideTheWeights, TensorHeader, first_line, stored_dtype
from converters.torch_file_reader import TORCH_ERRORS, to_numpy
from pipeline.errors import CheckpointError

METADATA_FILE = ".metadata"
DCP_DIRECTORY = "dcp"

_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"Path", "PosixPath", "PurePath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}
_DAMAGE = (*TORCH_ERRORS, zipfile.BadZipFile)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chunk:
    file: str
    offset: int
    length: int
    starts: Shape
    sizes: Shape


class TorchDcpSource(BesideTheWeights):
    """An open DCP checkpoint; holds headers and chunk places, no weights."""

    format = "torch-dcp"

    def __init__(
        self, *, directory: Path, data: Path, headers: Mapping[str, TensorHeader], chunks: Mapping[str, list[_Chunk]]
    ) -> None:
        self.directory = directory
        self.headers = headers
        self._data = data
        self._chunks = chunks

    @staticmethod
    def recognises(path: Path) -> bool:
        """True where `path` is a checkpoint artifact with `dcp/`, or a plain DCP directory."""
        return (
            (path / DCP_DIRECTORY).is_dir()
            or (path / METADATA_FILE).exists()
            or (path.is_dir() and any(path.glob("*.distcp")))
        )

    @classmethod
    def open(cls, path: Path) -> "TorchDcpSource":
        """Read the headers under `path`.

        Raises:
            CheckpointError: `.metadata` is missing or unreadable, a shard is missing or truncated, or chunks do not
                make up their tensor; names every file and tensor concerned.
        """
        data = path / DCP_DIRECTORY if (path / DCP_DIRECTORY).is_dir() else path
        directory = path if data != path or (path / CONFIG_FILE).exists() else path.parent
        metadata = _read_metadata(data / METADATA_FILE)
        try:
            headers, chunks, complaints = _plan(metadata, where=str(data / METADATA_FILE))
            complaints += _file_complaints(data, chunks)
        except _DAMAGE as error:
            raise CheckpointError(f"{data / METADATA_FILE}: damaged DCP metadata: {first_line(error)}") from error
        if complaints:
            raise CheckpointError(f"{data}: damaged checkpoint:\n" + "\n".join(f"  {text}" for text in complaints))
        if not headers:
            raise CheckpointError(
                f"{data / METADATA_FILE}: it holds no tensors",
                hint="save {'model': model.state_dict(), ...} with torch.distributed.checkpoint",
            )
        order = sorted(headers, key=lambda name: [(c.file, c.offset) for c in chunks[name][:1]])
        return cls(directory=directory, data=data, headers={name: headers[name] for name in order}, chunks=chunks)

    def read(self, name: str) -> Array:
        """The tensor, assembled from its chunks; peak memory is the tensor and one chunk's bytes.

        Raises:
            CheckpointError: a shard is damaged, or the dtype is none that is read; names it.
        """
        header = self.headers[name]
        stored_dtype(header, path=self._data)
        chunks = self._chunks[name]
        parts = ((chunk, self._read_chunk(name, chunk)) for chunk in chunks)
        if len(chunks) == 1 and chunks[0].sizes == header.shape:
            return to_numpy(next(parts)[1])
        whole = torch.empty(header.shape, dtype=getattr(torch, header.dtype))
        for chunk, part in parts:
            whole[place_of(chunk)] = part
        return to_numpy(whole)

    def _read_chunk(self, name: str, chunk: _Chunk) -> torch.Tensor:
        header = self.headers[name]
        path = self._data / chunk.file
        try:
            with path.open("rb") as file:
                file.seek(chunk.offset)
                archive = io.BytesIO(file.read(chunk.length))
            _check_sums(archive)
            tensor = torch.load(archive, map_location="cpu", weights_only=True)
        except _DAMAGE as error:
            raise CheckpointError(
                f"{path}: the bytes of {name} at offset {chunk.offset} are damaged: {first_line(error)}"
            ) from error
        found = (tuple(getattr(tensor, "shape", ())), str(getattr(tensor, "dtype", type(tensor).__name__)))
        if found != (chunk.sizes, f"torch.{header.dtype}"):
            raise CheckpointError(
                f"{path}: {name} at offset {chunk.offset} holds {found[0]} {found[1]}, "
                f"the metadata says {chunk.sizes} torch.{header.dtype}"
            )
        return tensor


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles what DCP writes and refuses every other class, so that a checkpoint cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        """Resolve a class of the list, or a torch dtype."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _METADATA_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no DCP metadata holds")
        return super().find_class(module, name)


def _check_sums(archive: io.BytesIO) -> None:
    """Refuse an archive that would inflate, and hold its checksums against its bytes; `torch.load` does neither.

    Raises:
        ValueError: a member is damaged.
    """
    with zipfile.ZipFile(archive) as members:
        deflated = [member.filename for member in members.infolist() if member.compress_type != zipfile.ZIP_STORED]
        if deflated:
            raise ValueError(f"{deflated[0]} is deflated, which torch.save never does")
        damaged = members.testzip()
    if damaged is not None:
        raise ValueError(f"the checksum of {damaged} does not hold")
    archive.seek(0)


def _read_metadata(path: Path) -> Any:
    if not path.is_file():
        what = "is no regular file" if path.exists() else "missing"
        raise CheckpointError(
            f"{path}: {what}, so this is not a complete torch.distributed.checkpoint directory",
            hint="DCP writes .metadata last; a checkpoint without it was interrupted while it was saved",
        )
    try:
        with path.open("rb") as file:
            check_instructions(file)
            file.seek(0)
            metadata = _MetadataUnpickler(file).load()
    except _DAMAGE as error:
        raise CheckpointError(f"{path}: not readable as DCP metadata: {first_line(error)}") from error
    if not isinstance(getattr(metadata, "state_dict_metadata", None), dict) or not metadata.storage_data:
        raise CheckpointError(f"{path}: holds {type(metadata).__name__}, not the metadata of a DCP checkpoint")
    return metadata


def _paths(metadata: Any) -> dict[str, tuple[str, ...]]:
    """The nested path of each flat key, as DCP's planner recorded it."""
    recorded = metadata.planner_data or {}
    return {key: tuple(map(str, recorded.get(key, (key,)))) for key in metadata.state_dict_metadata}


def _model_tensors(metadata: Any, *, where: str) -> Iterator[tuple[str, str, TensorStorageMetadata]]:
    """(name in the model, flat key, stored metadata) of each tensor of the model, or of its average."""
    paths = {
        key: path
        for key, path in _paths(metadata).items()
        if isinstance(metadata.state_dict_metadata[key], TensorStorageMetadata)
    }
    subtree = model_subtree(paths.values(), where=where)
    averaged = {".".join(path[len(AVERAGE) :]): key for key, path in paths.items() if path[: len(AVERAGE)] == AVERAGE}
    for key, path in paths.items():
        if path[: len(subtree)] == subtree:
            name = ".".join(path[len(subtree) :])
            taken = averaged.get(name, key)
            yield name, taken, metadata.state_dict_metadata[taken]


def _plan(metadata: Any, *, where: str) -> tuple[dict[str, TensorHeader], dict[str, list[_Chunk]], list[str]]:
    """Headers and chunk places by tensor name, and what is wrong with them."""
    headers, chunks, complaints = {}, {}, []
    places = {(index.fqn, tuple(index.offset or ())): info for index, info in metadata.storage_data.items()}
    for name, key, stored in _model_tensors(metadata, where=where):
        try:
            chunks[name] = _chunks(key, stored, places)
        except ValueError as error:
            complaints.append(f"{key}: {error}")
        dtype = str(stored.properties.dtype).removeprefix("torch.")
        headers[name] = TensorHeader(name=name, shape=tuple(map(int, stored.size)), dtype=dtype)
    return headers, chunks, complaints


def _chunks(key: str, stored: TensorStorageMetadata, places: Mapping[tuple[str, Shape], Any]) -> list[_Chunk]:
    """Where the parts of one tensor lie.

    Raises:
        ValueError: a part has no place or too little of it, lies outside of the tensor, is compressed, or parts are
            missing or overlap.
    """
    itemsize = stored.properties.dtype.itemsize
    chunks = []
    for part in stored.chunks:
        starts, sizes = tuple(map(int, part.offsets)), tuple(map(int, part.sizes))
        if 0 in sizes:  # ranks beyond the first axis of a small tensor hold nothing
            continue
        info = places.get((key, starts))
        if info is None:
            raise ValueError(f"the part at {starts} has no place in the metadata")
        if getattr(info, "transform_descriptors", None):
            raise ValueError(f"the part at {starts} is stored with {info.transform_descriptors}, which is not read")
        chunk = _Chunk(
            file=str(info.relative_path),
            offset=int(info.offset),
            length=int(info.length),
            starts=starts,
            sizes=sizes,
        )
        if chunk.offset < 0 or math.prod(sizes) * itemsize > chunk.length:
            raise ValueError(f"the part {sizes} at {starts} does not fit the {chunk.length} bytes of its place")
        chunks.append(chunk)
    check_parts(chunks, shape=tuple(map(int, stored.size)))
    return chunks


def _file_complaints(data: Path, chunks: Mapping[str, list[_Chunk]]) -> list[str]:
    ends: dict[str, int] = {}
    for chunk in (chunk for parts in chunks.values() for chunk in parts):
        ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.offset + chunk.length)
    complaints = []
    for file, end in sorted(ends.items()):
        path = data / file
        if Path(file).is_absolute() or ".." in Path(file).parts:
            complaints.append(f"{file}: the metadata points outside of the checkpoint")
        elif not path.is_file():
            complaints.append(f"{path}: shard is missing")
        elif path.stat().st_size < end:
            complaints.append(f"{path}: shard is truncated: {path.stat().st_size} bytes, the model needs {end}")
    return complaints
