"""Files that `torch.save` wrote: `.bin`, `.pt`, `.pth`, one or several with an index.

Owns the way from a state dict to tensors that are read one by one. Knows nothing of families or Flax. The one decision:
torch unpickles with `weights_only` onto the meta device, so that headers come without bytes, and numpy reads the bytes
from where torch says they lie; the file is never mapped, for a file that is cut meanwhile would end the process.

A tensor is a view (offset, shape, strides) of a storage: transposed, expanded and shared ones come out as what they
show. Files from before torch 1.6 cannot be read in parts and are loaded whole.
"""

import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch

from converters.model_subtree import WRAPPER_KEYS, KeyPath, model_subtree
from converters.operations import Array
from converters.parts import read_range, regular_file_complaints
from converters.safetensors_reader import read_index
from converters.source import BesideTheWeights, TensorHeader, first_line, stored_dtype
from converters.torch_archive import Record, check_legacy, hold_checksum, is_archive, read_records
from pipeline.errors import CheckpointError

SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
INDEX_SUFFIX = ".bin.index.json"
NOT_A_MODEL = ("training_args", "optimizer", "scheduler", "scaler", "rng_state")
"""Stems of files that a trainer writes beside the model."""
MAX_EXPANDED_BYTES = 1 << 26
"""What a tensor that repeats its storage (stride 0) may become beyond the size of its file."""

TORCH_ERRORS = (
    pickle.UnpicklingError,
    RuntimeError,
    ValueError,
    EOFError,
    OverflowError,
    OSError,
    KeyError,
    IndexError,
    AttributeError,
    TypeError,
    AssertionError,
    MemoryError,
)
"""What `torch.load` raises on damaged files; the set is not documented, these were seen under bit flips."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _View:
    path: Path
    tensor: torch.Tensor
    """On the meta device, or with its data where the file had to be loaded whole."""
    offset: int | None
    """Of its storage in the file; None where the tensor has its data."""
    record: Record | None


class TorchFileSource(BesideTheWeights):
    """An open torch checkpoint; holds headers, no weights."""

    format = "torch-file"

    def __init__(self, *, directory: Path, headers: Mapping[str, TensorHeader], views: Mapping[str, _View]) -> None:
        self.directory = directory
        self.headers = headers
        self._views = views
        self._held: set[tuple[Path, int]] = set()

    @staticmethod
    def recognises(path: Path) -> bool:
        """True for a file with a torch suffix, and for a directory that holds one which may be a model."""
        if path.is_dir():
            return any(path.glob(f"*{INDEX_SUFFIX}")) or bool(_candidates(path))
        return path.name.endswith(SUFFIXES)

    @classmethod
    def open(cls, path: Path) -> "TorchFileSource":
        """Read the headers of the file `path`, or of the checkpoint in the directory `path`.

        Raises:
            CheckpointError: a file is missing, damaged, executes something or holds no tensors; names it.
        """
        files, wanted = _files(path) if path.is_dir() else ([path], None)
        complaints = regular_file_complaints(files)
        if complaints:
            raise CheckpointError(f"{path}: incomplete checkpoint:\n" + "\n".join(f"  {text}" for text in complaints))
        views: dict[str, _View] = {}
        for file in files:
            for name, view in _views(file).items():
                if name in views:
                    complaints.append(f"{name}: in {views[name].path.name} and in {file.name}")
                views[name] = view
        if wanted is not None:
            complaints += [f"{name}: the index names it, no file holds it" for name in wanted - views.keys()]
            complaints += [f"{name}: in {views[name].path.name}, not in the index" for name in views.keys() - wanted]
        if complaints:
            raise CheckpointError(f"{path}: damaged checkpoint:\n" + "\n".join(f"  {text}" for text in complaints))
        order = sorted(views, key=lambda name: (views[name].path, views[name].offset or 0))
        return cls(
            directory=path if path.is_dir() else path.parent,
            headers={
                name: TensorHeader(name=name, shape=tuple(views[name].tensor.shape), dtype=_dtype(views[name].tensor))
                for name in order
            },
            views=views,
        )

    def read(self, name: str) -> Array:
        """The tensor as a new array.

        Raises:
            CheckpointError: the file is damaged or became shorter, or the dtype is none that is read.
        """
        header, view = self.headers[name], self._views[name]
        dtype = stored_dtype(header, path=view.path)
        if view.offset is None:
            return to_numpy(view.tensor)
        if math.prod(header.shape) == 0:
            return np.empty(header.shape, dtype)
        begin = view.offset + int(view.tensor.storage_offset()) * dtype.itemsize
        num_bytes = _span(view.tensor) * dtype.itemsize
        raw = read_range(view.path, offset=begin, num_bytes=num_bytes, name=name)
        if view.record is not None and view.record.checksum and (view.path, view.offset) not in self._held:
            is_whole = num_bytes == view.record.num_bytes
            hold_checksum(view.path, offset=view.offset, record=view.record, content=raw.data if is_whole else None)
            self._held.add((view.path, view.offset))
        strides = [stride * dtype.itemsize for stride in view.tensor.stride()]
        shown = np.lib.stride_tricks.as_strided(raw.view(dtype), header.shape, strides, writeable=False)
        return np.ascontiguousarray(shown).reshape(header.shape)


def to_numpy(tensor: torch.Tensor) -> Array:
    """The same numbers in numpy; dtypes that torch does not export go through their bits."""
    tensor = tensor.detach().contiguous()
    name = _dtype(tensor)
    if name.startswith(("bfloat16", "float8")):
        bits = torch.int16 if name == "bfloat16" else torch.uint8
        return np.asarray(tensor.view(bits).numpy().view(getattr(ml_dtypes, name)))
    return np.asarray(tensor.numpy())


def _candidates(directory: Path) -> list[Path]:
    return sorted(
        path
        for path in directory.iterdir()
        if path.name.endswith(SUFFIXES) and not path.name.startswith(NOT_A_MODEL) and not path.is_dir()
    )


def _files(directory: Path) -> tuple[list[Path], frozenset[str] | None]:
    indices = sorted(directory.glob(f"*{INDEX_SUFFIX}"))
    if len(indices) == 1:
        return read_index(indices[0])
    candidates = _candidates(directory)
    if len(indices) > 1 or len(candidates) > 1:
        raise CheckpointError(
            f"{directory}: several files could be the model: "
            + ", ".join(path.name for path in (*indices, *candidates)),
            hint="name the file itself",
        )
    return candidates, None


def _views(path: Path) -> dict[str, _View]:
    """Every tensor of the model in one file.

    Raises:
        CheckpointError: see `TorchFileSource.open`.
    """
    records: dict[int, Record] | None = None
    if is_archive(path):
        records = read_records(path)
    else:
        check_legacy(path)
    try:
        state = torch.load(path, map_location="cpu" if records is None else "meta", weights_only=True)
    except TORCH_ERRORS as error:
        raise CheckpointError(
            f"{path}: not readable as a torch checkpoint: {first_line(error)}",
            hint="only tensors are read, never code: save model.state_dict() with torch.save, or safetensors",
        ) from error
    views, complaints = {}, []
    for name, tensor in _model(state, path=path).items():
        try:
            views[name] = _view(tensor, path=path, records=records)
        except ValueError as error:
            complaints.append(f"{name}: {error}")
    if complaints:
        raise CheckpointError(f"{path}: damaged checkpoint:\n" + "\n".join(f"  {text}" for text in complaints))
    if not views:
        raise CheckpointError(f"{path}: holds no tensors", hint="save model.state_dict() with torch.save")
    return views


def _model(state: Any, *, path: Path) -> dict[str, torch.Tensor]:
    """The tensors of the model's state dict by name."""
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"{path}: holds a {type(state).__name__}, not a state dict",
            hint="save model.state_dict() with torch.save",
        )
    tree: dict[KeyPath, Mapping[Any, Any]] = {(): state}
    tree |= {(key,): state[key] for key in WRAPPER_KEYS if isinstance(state.get(key), Mapping)}
    tensors: dict[KeyPath, torch.Tensor] = {}
    for prefix, branch in tree.items():
        for key, value in branch.items():
            inner = value if isinstance(value, Mapping) else {}
            tensors |= {(*prefix, str(key), str(k)): v for k, v in inner.items() if isinstance(v, torch.Tensor)}
            if isinstance(value, torch.Tensor):
                tensors[(*prefix, str(key))] = value
    chosen = model_subtree(tensors, where=str(path))
    return {keys[-1]: value for keys, value in tensors.items() if keys[:-1] == chosen}


def _view(tensor: torch.Tensor, *, path: Path, records: Mapping[int, Record] | None) -> _View:
    """Where a tensor's numbers lie.

    Raises:
        ValueError: it is no plain tensor, or they do not lie in the file.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or tensor.layout != torch.strided:
        raise ValueError(f"is a {type(tensor).__name__} in {tensor.layout} layout; only dense tensors are read")
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"is a quantized, conjugated or negated view of {tensor.dtype}; save it as a plain tensor")
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes > max(path.stat().st_size, MAX_EXPANDED_BYTES):
        raise ValueError(f"shape {tuple(tensor.shape)} takes {num_bytes} bytes, far more than its file holds")
    if records is None:
        return _View(path=path, tensor=tensor, offset=None, record=None)
    storage = tensor.untyped_storage()
    offset, record = storage._checkpoint_offset, None
    if num_bytes:
        record = records.get(-1 if offset is None else offset)
        if record is None or record.num_bytes != storage.nbytes():
            raise ValueError(f"its storage of {storage.nbytes()} bytes is none of the file's")
        end = (tensor.storage_offset() + _span(tensor)) * tensor.element_size()
        if tensor.storage_offset() < 0 or min(tensor.stride(), default=0) < 0 or end > record.num_bytes:
            raise ValueError(f"ends at byte {end} of a storage of {record.num_bytes}")
    return _View(path=path, tensor=tensor, offset=offset or 0, record=record)


def _span(tensor: torch.Tensor) -> int:
    """Elements of the storage from the first to the last that the view shows."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
