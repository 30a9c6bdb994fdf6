"""ONNX files: the initializers of a graph, as the checkpoint of the torch model that was exported.

Owns the way from initializers to torch's parameter names. Knows nothing of families; the graph itself is not run. The
one decision: a weight has the name that the exporter kept, or the one of the module whose product uses it, written
beside that product by the exporter; a weight without either is listed and refused, never matched by its shape.

torch's exporters fold `x @ W.T` into a product with the transposed weight, under a name of their own (`val_113`,
`onnx::MatMul_131`). The module's path is in the product's `name_scopes` (torch.export) or name (TorchScript).
"""

import ast
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx.numpy_helper import to_array

from converters.operations import DTYPES, Array, Shape
from converters.parts import read_range
from converters.source import CONFIG_FILE, BesideTheWeights, TensorHeader, only_file
from pipeline.errors import CheckpointError

SUFFIX = ".onnx"
MAX_FILE_BYTES = 1 << 31
"""The limit of protobuf; larger models keep their numbers in files beside the graph."""
_SCOPES = "pkg.torch.onnx.name_scopes"
_QUANTIZED = ("DequantizeLinear", "MatMulInteger", "DynamicQuantizeLinear", "QLinearMatMul", "MatMulNBits")
_TYPES = {
    onnx.TensorProto.FLOAT: "float32",
    onnx.TensorProto.FLOAT16: "float16",
    onnx.TensorProto.BFLOAT16: "bfloat16",
    onnx.TensorProto.DOUBLE: "float64",
    onnx.TensorProto.INT64: "int64",
    onnx.TensorProto.INT32: "int32",
    onnx.TensorProto.INT16: "int16",
    onnx.TensorProto.INT8: "int8",
    onnx.TensorProto.UINT64: "uint64",
    onnx.TensorProto.UINT32: "uint32",
    onnx.TensorProto.UINT16: "uint16",
    onnx.TensorProto.UINT8: "uint8",
    onnx.TensorProto.BOOL: "bool",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Weight:
    tensor: onnx.TensorProto
    is_transposed: bool
    """True where torch keeps [out, in] and the graph [in, out]."""


class OnnxSource(BesideTheWeights):
    """An open ONNX file; holds the graph, and those numbers that lie inside of it."""

    format = "onnx"

    def __init__(self, path: Path, *, weights: Mapping[str, _Weight]) -> None:
        self.directory = path.parent
        self._path = path
        self._weights = weights
        self.headers = {name: _header(name, weight) for name, weight in weights.items()}

    @staticmethod
    def recognises(path: Path) -> bool:
        """True for an `.onnx` file, and for a directory that holds one."""
        return any(path.glob(f"*{SUFFIX}")) if path.is_dir() else path.name.endswith(SUFFIX)

    @classmethod
    def open(cls, path: Path) -> "OnnxSource":
        """Read the graph of the file, or of the only ONNX file in the directory.

        Raises:
            CheckpointError: the file is damaged or quantized, points outside of its directory, or weights have no names
                that torch knows; lists every one.
        """
        path = only_file(path, suffix=SUFFIX)
        graph = _graph(path)
        weights: dict[str, _Weight] = {}
        complaints = []
        for name, weight in _weights(graph):
            if not name:
                complaints.append(
                    f"{weight.tensor.name} {tuple(weight.tensor.dims)}: no module's name stands beside it"
                )
            elif name in weights and weights[name].tensor.name != weight.tensor.name:
                complaints.append(f"{name}: both {weights[name].tensor.name} and {weight.tensor.name}")
            else:
                weights[name] = weight
        for name, weight in weights.items():
            try:
                _check(weight.tensor, path=path)
            except ValueError as error:
                complaints.append(f"{name}: {error}")
        if complaints or not weights:
            raise CheckpointError(
                f"{path}: its weights are not those of a torch model:\n"
                + "\n".join(f"  {text}" for text in complaints or ["there are none with a name of torch's"]),
                hint="convert the torch checkpoint that the graph was exported from, or export it again with "
                "torch.onnx.export, which keeps the names of modules",
            )
        return cls(path, weights=weights)

    def config(self) -> dict[str, Any]:
        """`config.json` beside the graph, which itself names no family.

        Raises:
            CheckpointError: there is none.
        """
        if not (self.directory / CONFIG_FILE).is_file():
            raise CheckpointError(
                f"{self._path}: an ONNX graph does not say which family it is of, and no {CONFIG_FILE} lies beside it",
                hint=f"put the {CONFIG_FILE} of the model that was exported there; a graph of no family is not "
                "converted: trace the torch module instead (`via: trace`)",
            )
        return super().config()

    def read(self, name: str) -> Array:
        """The tensor in torch's layout.

        Raises:
            CheckpointError: a file beside the graph is missing or became shorter.
        """
        weight, header = self._weights[name], self.headers[name]
        array = _numbers(weight.tensor, directory=self.directory)
        return np.ascontiguousarray(array.T if weight.is_transposed else array).reshape(header.shape)


def _graph(path: Path) -> onnx.GraphProto:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"has {path.stat().st_size} bytes; an ONNX file holds {MAX_FILE_BYTES} at most")
        model = onnx.load_model(path, load_external_data=False)
        graph = model.graph
        if not graph.node or not model.opset_import:  # the latter is written last: a file that was cut has none
            raise ValueError("holds no whole graph")
        if not all(isinstance(text, str) for text in _texts(graph)):
            raise ValueError("holds a name that is no UTF-8")
    except (DecodeError, ValueError, OSError) as error:
        raise CheckpointError(f"{path}: not read as an ONNX model: {error}") from error
    quantized = sorted({node.op_type for node in graph.node if node.op_type in _QUANTIZED})
    if quantized or graph.sparse_initializer:
        what = f"computes with {', '.join(quantized)}" if quantized else "has sparse initializers"
        raise CheckpointError(
            f"{path}: {what}, so its weights are not the model's own",
            hint="convert the checkpoint that was quantized",
        )
    return graph


def _texts(graph: onnx.GraphProto) -> Iterator[Any]:
    """Every text that is looked at here; protobuf gives bytes for one that is damaged."""
    for node in graph.node:
        yield from (node.name, node.op_type, *node.input, *(attribute.name for attribute in node.attribute))
        yield from (text for entry in node.metadata_props for text in (entry.key, entry.value))
    for tensor in graph.initializer:
        yield tensor.name
        yield from (text for entry in tensor.external_data for text in (entry.key, entry.value))


def _weights(graph: onnx.GraphProto) -> Iterator[tuple[str, _Weight]]:
    """Each weight with its name in torch, empty where nothing tells it.

    An initializer with a dotted name is a parameter or buffer. Another is a constant of the graph (masks, sizes,
    rotary tables), which the Flax model computes itself, unless a product with it belongs to a module.
    """
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    if len(tensors) != len(graph.initializer):
        yield "", _Weight(tensor=onnx.TensorProto(name="two initializers of one name"), is_transposed=False)
    products = [node for node in graph.node if node.op_type in ("MatMul", "Gemm") and len(node.input) >= 2]
    for name, tensor in tensors.items():
        if "." in name and "::" not in name and "/" not in name:
            yield name, _Weight(tensor=tensor, is_transposed=False)
    for node in products:
        tensor = tensors.get(node.input[1])
        if tensor is None or len(tensor.dims) != 2 or ("." in tensor.name and "::" not in tensor.name):
            continue
        is_transposed = not any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
        module = _module(node)
        yield (f"{module}.weight" if module else ""), _Weight(tensor=tensor, is_transposed=is_transposed)


def _module(node: onnx.NodeProto) -> str:
    """Path of the module that a node computes, as the exporter wrote it."""
    scopes = next((prop.value for prop in node.metadata_props if prop.key == _SCOPES), None)
    if scopes is None:
        return ".".join(node.name.strip("/").split("/")[:-1]) if node.name.startswith("/") else ""
    try:
        path = ast.literal_eval(scopes)
        return str(path[-2])
    except (ValueError, SyntaxError, IndexError, TypeError, KeyError, MemoryError, RecursionError):
        return ""


def _header(name: str, weight: _Weight) -> TensorHeader:
    shape: Shape = tuple(map(int, weight.tensor.dims))
    kind = weight.tensor.data_type
    return TensorHeader(
        name=name,
        shape=shape[::-1] if weight.is_transposed else shape,
        dtype=_TYPES.get(kind, f"onnx type {kind}"),
    )


def _external(tensor: onnx.TensorProto) -> dict[str, str] | None:
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return None
    return {entry.key: entry.value for entry in tensor.external_data}


def _check(tensor: onnx.TensorProto, *, path: Path) -> None:
    """Hold a tensor's numbers against its shape.

    Numbers beside the graph are bytes without any form, so a link that leads elsewhere would make weights of whatever
    lies there; it may lead only to where the graph itself really lies, as in a cache of links.

    Raises:
        ValueError: they do not fill it, or lie outside of the graph's directory.
    """
    directory = path.parent
    kind = _TYPES.get(tensor.data_type)
    if kind is None:
        raise ValueError(f"has the ONNX type {tensor.data_type}; allowed: {', '.join(_TYPES.values())}")
    if any(size < 0 for size in tensor.dims):
        raise ValueError(f"has the shape {tuple(tensor.dims)}")
    wanted = math.prod(tensor.dims) * DTYPES[kind].itemsize
    place = _external(tensor)
    if place is not None:
        file = directory / place.get("location", "")
        if file.parent != directory or not file.is_file():
            raise ValueError(f"its numbers are to lie in {place.get('location')!r}, which is no file beside the graph")
        if file.resolve().parent not in (directory.resolve(), path.resolve().parent):
            raise ValueError(f"its numbers lie in {file.name}, a link to {file.resolve()}, away from the graph")
        offset, length = int(place.get("offset", 0)), int(place.get("length", wanted))
        if length != wanted or offset < 0 or offset + length > file.stat().st_size:
            raise ValueError(
                f"shape {tuple(tensor.dims)} {kind} does not fill {length} bytes at {offset} of {file.name}"
            )
    elif tensor.HasField("raw_data"):
        if len(tensor.raw_data) != wanted:
            raise ValueError(f"shape {tuple(tensor.dims)} {kind} does not fill {len(tensor.raw_data)} bytes")
    elif math.prod(tensor.dims) > tensor.ByteSize():
        raise ValueError(f"shape {tuple(tensor.dims)} {kind} does not fill {tensor.ByteSize()} bytes")


def _numbers(tensor: onnx.TensorProto, *, directory: Path) -> Array:
    place, dtype = _external(tensor), DTYPES[_TYPES[tensor.data_type]]
    shape = tuple(tensor.dims)
    if place is not None:
        raw = read_range(
            directory / place["location"],
            offset=int(place.get("offset", 0)),
            num_bytes=math.prod(shape) * dtype.itemsize,
            name=tensor.name,
        )
        return raw.view(dtype).reshape(shape)
    if tensor.HasField("raw_data"):
        return np.frombuffer(tensor.raw_data, dtype).reshape(shape)
    try:
        return np.asarray(to_array(tensor)).astype(dtype, copy=False).reshape(shape)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{directory}: {tensor.name} is damaged: {error}") from error
