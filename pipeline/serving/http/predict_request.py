"""The body of `/v1/predict`, read and judged.

Owns every rule about what a client may send: JSON, one `.npy` array, or an `.npz` file of arrays. Pure. The one
decision: a body is judged completely, with all complaints in one answer, before anything runs; what reaches the model
has exactly the shapes and dtypes that were compiled.

Shapes: N rows of a request; an input is [N, *shape of a row].
"""

import io
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from pipeline.serving.engine.forward_executor import InputForm
from pipeline.serving.json_body import Fields, Rejected

MAX_PREDICT_BYTES = 32 * 2**20
"""Of a body, and of what an `.npz` body unpacks to."""
_FIELDS = ("model", "inputs")
_UNPACKED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""How numpy packs; of the other methods of zip the unpacked size cannot be bounded."""
_ZIP_ERRORS = (
    *(zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, NotImplementedError, RuntimeError),
    *(ValueError, EOFError, OSError, struct.error),
)
"""What `zipfile` raises for whatever is wrong with a file."""


class MediaType(StrEnum):
    """How arrays are written."""

    JSON = "application/json"
    NPY = "application/x-npy"
    NPZ = "application/x-npz"


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictModel:
    """What a body is judged against."""

    name: str
    inputs: Mapping[str, InputForm]
    outputs: Mapping[str, tuple[int, ...]]
    """Shape of one row's outputs by name."""
    max_rows: int
    """Of one request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictRequest:
    """A body without faults."""

    inputs: Mapping[str, NDArray[Any]]
    num_rows: int
    answer: MediaType


def parse_prediction(
    body: bytes | Mapping[str, Any], *, content_type: str, accept: str, model: PredictModel
) -> PredictRequest:
    """Judge a body for this model.

    Args:
        body: what was sent; its fields where it is JSON.
        content_type: header; JSON where it is empty.
        accept: header; the answer is written as the question was where it leaves the type open, several outputs of a
            single array as `.npz`.
        model: what is served.

    Raises:
        Rejected: 400 with every complaint, 415 for another content type, 406 where the answer cannot be written as
            asked.
    """
    kind = _media_type(content_type)
    is_single = len(model.outputs) == 1
    answer = _accepted(accept, default=kind if is_single or kind is not MediaType.NPY else MediaType.NPZ)
    if answer is MediaType.NPY and not is_single:
        raise Rejected(
            f"{MediaType.NPY} holds one array; this model gives {', '.join(model.outputs)}; accept {MediaType.NPZ}",
            status=406,
        )
    if not isinstance(body, bytes):
        given = _from_json(body, model=model)
    else:
        given = _from_npy(body, model=model) if kind is MediaType.NPY else _from_npz(body)
    arrays = _judged(given, model=model)
    return PredictRequest(inputs=arrays, num_rows=len(next(iter(arrays.values()))), answer=answer)


def _media_type(header: str) -> MediaType:
    name = header.partition(";")[0].strip().lower() or MediaType.JSON
    try:
        return MediaType(name)
    except ValueError:
        raise Rejected(f"content-type {name!r}; this takes {', '.join(MediaType)}", status=415) from None


def _accepted(header: str, *, default: MediaType) -> MediaType:
    for part in header.split(","):
        name = part.partition(";")[0].strip().lower()
        if name in tuple(MediaType):
            return MediaType(name)
        if name in ("", "*/*", "application/*"):
            return default
    raise Rejected(f"accept {header!r}; this answers as {', '.join(MediaType)}", status=406)


def _from_json(fields: Mapping[str, Any], *, model: PredictModel) -> dict[str, Any]:
    reader = Fields(fields)
    reader.refuse_unknown(_FIELDS)
    inputs = fields.get("inputs")
    if not isinstance(inputs, dict):
        example = ", ".join(f'"{name}": [...]' for name in model.inputs)
        reader.complain("inputs", f"must be an object of arrays by name, such as {{{example}}}")
    reader.raise_complaints()
    assert isinstance(inputs, dict)
    return inputs


def _from_npy(body: bytes, *, model: PredictModel) -> dict[str, Any]:
    if len(model.inputs) != 1:
        raise Rejected(
            f"{MediaType.NPY} holds one array; this model takes {', '.join(model.inputs)}; send {MediaType.NPZ}"
        )
    return {next(iter(model.inputs)): read_npy(body, name="the body")}


def _from_npz(body: bytes) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            items = archive.infolist()
            unpacked = sum(item.file_size for item in items)
            if unpacked > MAX_PREDICT_BYTES:
                raise Rejected(f"the body unpacks to {unpacked} bytes; {MAX_PREDICT_BYTES} are allowed", status=413)
            if any(item.compress_type not in _UNPACKED for item in items):
                raise Rejected("the body is packed as numpy packs no .npz file")
            names = [item.filename.removesuffix(".npy") for item in items]
            if len(set(names)) != len(names):
                raise Rejected("the body holds an array twice")
            return {name: read_npy(_unpack(archive, item), name=name) for name, item in zip(names, items, strict=True)}
    except _ZIP_ERRORS as error:
        raise Rejected(f"the body is no .npz file: {error}") from error


def _unpack(archive: zipfile.ZipFile, item: zipfile.ZipInfo) -> bytes:
    with archive.open(item) as file:
        # Not read(): that would unpack everything there is, whatever size the archive states.
        return file.read(item.file_size)


def read_npy(content: bytes, *, name: str) -> NDArray[Any]:
    """One `.npy` array, without running anything and without taking memory for more than is there.

    Raises:
        Rejected: it is damaged, holds Python objects, or its header and its size disagree.
    """
    file = io.BytesIO(content)
    try:
        version = npy_format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"format version {version}")
        read_header = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
        shape, is_fortran, dtype = read_header(file)
        if dtype.hasobject or dtype.itemsize == 0:
            raise ValueError(f"dtype {dtype}")
        count = 1
        for size in shape:
            count *= size
        if count * dtype.itemsize != len(content) - file.tell():
            raise ValueError(f"the header says {dtype} {shape}, and {len(content) - file.tell()} bytes follow")
        array = np.frombuffer(content, dtype=dtype, offset=file.tell())
        return array.reshape(shape, order="F" if is_fortran else "C")
    except (ValueError, TypeError, KeyError, SyntaxError, RecursionError, MemoryError, OverflowError) as error:
        raise Rejected(f"{name}: no .npy array: {error}") from error


def _judged(given: Mapping[str, Any], *, model: PredictModel) -> dict[str, NDArray[Any]]:
    """The arrays in the compiled dtypes."""
    complaints = Fields(given)
    complaints.refuse_unknown(tuple(model.inputs))
    arrays: dict[str, NDArray[Any]] = {}
    for name, form in model.inputs.items():
        if name not in given:
            complaints.complain(name, "missing")
            continue
        try:
            arrays[name] = _array(given[name], form)
        except ValueError as error:
            complaints.complain(name, str(error))
    counts = {name: len(array) for name, array in arrays.items()}
    if len(set(counts.values())) > 1:
        complaints.complain("inputs", f"different numbers of rows: {', '.join(f'{n} {c}' for n, c in counts.items())}")
    for name, count in counts.items():
        if not 1 <= count <= model.max_rows:
            complaints.complain(name, f"{count} rows; a request has 1 to {model.max_rows}")
    complaints.raise_complaints()
    return arrays


def _array(value: Any, form: InputForm) -> NDArray[Any]:
    """`value` in the form's dtype.

    Raises:
        ValueError: it is no array of numbers of this shape, or a number does not fit the dtype.
    """
    wanted = f"[rows{''.join(f', {size}' for size in form.shape)}]"
    if not isinstance(value, np.ndarray):
        if not isinstance(value, list):
            raise ValueError(f"must be a nested list of shape {wanted}")
        try:
            value = np.asarray(value)
        except (ValueError, OverflowError) as error:
            raise ValueError(f"must be a nested list of shape {wanted}; its lists have different lengths") from error
    if value.shape[1:] != form.shape or value.ndim != 1 + len(form.shape):
        raise ValueError(f"shape {list(value.shape)}; must be {wanted}")
    return _cast(value, np.dtype(form.dtype))


def _cast(value: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    if value.dtype.kind not in "fiub":
        raise ValueError("holds something else than numbers" if value.dtype.kind in "OUS" else f"dtype {value.dtype}")
    allowed = {"f": "fiu", "i": "iu", "u": "iu", "b": "b"}[dtype.kind]
    if value.dtype.kind not in allowed:
        held = {"f": "floats", "b": "booleans"}.get(value.dtype.kind, "integers")
        raise ValueError(f"holds {held}; must be {dtype}")
    if dtype.kind in "iu":
        # jax computes in 32 bits; a larger number would wrap around.
        limits = np.iinfo(np.int32 if dtype == np.int64 else dtype)
        if value.size and (value.min() < limits.min or value.max() > limits.max):
            raise ValueError(f"numbers must be from {limits.min} to {limits.max}")
    with np.errstate(over="ignore"):
        cast = value.astype(dtype)
    if dtype.kind == "f":
        bad = np.argwhere(~np.isfinite(cast))
        if len(bad):
            raise ValueError(f"{len(bad)} numbers are not finite in {dtype}, the first in row {bad[0][0]}")
    return cast


def write_arrays(arrays: Mapping[str, NDArray[Any]], *, media_type: MediaType) -> bytes:
    """The body of a binary answer."""
    file = io.BytesIO()
    if media_type is MediaType.NPY:
        np.save(file, next(iter(arrays.values())), allow_pickle=False)
    else:
        named: dict[str, Any] = dict(arrays)
        np.savez(file, **named)
    return file.getvalue()


def not_finite(arrays: Mapping[str, NDArray[Any]]) -> Sequence[str]:
    """Names of outputs that hold NaN or infinity, which JSON cannot write."""
    return [name for name, array in arrays.items() if array.dtype.kind == "f" and not np.isfinite(array).all()]
