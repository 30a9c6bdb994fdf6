"""Float8 weights and the scales that make numbers of them.

Owns which scale belongs to which tensor and the product of both. Knows no file format. The one decision: an 8-bit
tensor without its scale is a wrong tensor of the right shape, so both are found from headers alone or the checkpoint
is refused; what comes out is float32, in which the product of an 8-bit number and a float32 scale is rounded once.

Conventions, by the name beside `NAME.weight`: `NAME.weight_scale_inv` (DeepSeek, transformers' `fp8`; one scale a
block of 128 x 128, multiplied in spite of its name), `NAME.weight_scale` and `NAME.scale_weight` (compressed-tensors,
modelopt, diffusers; one a tensor or one a row).
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from converters.operations import Array, Shape
from converters.source import CONFIG_FILE, CheckpointSource, TensorHeader
from pipeline.errors import CheckpointError

FLOAT8_DTYPES = ("float8_e4m3fn", "float8_e5m2")
SCALE_SUFFIXES = ("_scale_inv", "_scale")
ACTIVATION_SCALES = (
    "input_scale",
    "input_scale_inv",
    "output_scale",
    "activation_scale",
    "k_scale",
    "v_scale",
    "q_scale",
)
"""Scales of what flows through a layer in 8 bits; here it flows in the dtype of the weights, so they have no use."""
DEFAULT_BLOCK = (128, 128)


class DequantizedSource:
    """A checkpoint whose float8 tensors are read as float32.

    Raises:
        CheckpointError: a float8 tensor has no scale, a scale has no float8 tensor, or their shapes do not fit.
    """

    def __init__(self, source: CheckpointSource) -> None:
        self._source = source
        self._block = _block_size(source)
        self._scales = _pairs(source, block=self._block)
        hidden = {*self._scales.values(), *_activation_scales(source.headers)}
        self.headers = {
            name: TensorHeader(name=name, shape=header.shape, dtype="float32") if name in self._scales else header
            for name, header in source.headers.items()
            if name not in hidden
        }
        self.dequantized: Mapping[str, str] = dict(source.dequantized) | {
            name: f"{source.headers[name].dtype} with {scale} {source.headers[scale].shape}"
            for name, scale in self._scales.items()
        }

    @staticmethod
    def is_needed(headers: Mapping[str, TensorHeader]) -> bool:
        """True where some tensor is stored in eight bits."""
        return any(header.dtype in FLOAT8_DTYPES for header in headers.values())

    @property
    def format(self) -> str:
        """Of the checkpoint itself."""
        return self._source.format

    @property
    def directory(self) -> Path:
        """Of the checkpoint itself."""
        return self._source.directory

    def config(self) -> dict[str, Any]:
        """The config of the dequantized model: without `quantization_config`."""
        return {key: value for key, value in self._source.config().items() if key != "quantization_config"}

    def companions(self) -> dict[str, bytes]:
        """Of the checkpoint itself."""
        return self._source.companions()

    def read(self, name: str) -> Array:
        """The tensor; a float8 one multiplied with its scale, float32."""
        if name not in self._scales:
            return self._source.read(name)
        scale = self._source.read(self._scales[name]).astype(np.float32)
        values = self._source.read(name).astype(np.float32)
        if scale.size == 1 or scale.ndim != 2 or scale.shape == (len(values), 1):
            values *= scale.reshape(_broadcast(scale.shape, shape=values.shape))
            return values
        rows, columns = self._block
        for number, row in enumerate(scale):  # one row of blocks at a time, or the scales take as much as the tensor
            values[number * rows : (number + 1) * rows] *= np.repeat(row, columns)[: values.shape[1]]
        return values


def _block_size(source: CheckpointSource) -> tuple[int, int]:
    """`weight_block_size` of the config, where there is one; a checkpoint without a config has the usual blocks."""
    path = source.directory / CONFIG_FILE
    if not path.is_file():
        return DEFAULT_BLOCK
    quantization = source.config().get("quantization_config") or {}
    if not isinstance(quantization, dict):
        raise CheckpointError(f"{path}: quantization_config must be an object, found {str(quantization)[:40]!r}")
    declared = quantization.get("weight_block_size") or DEFAULT_BLOCK
    if not (
        isinstance(declared, list | tuple) and len(declared) == 2 and all(type(n) is int and n > 0 for n in declared)
    ):
        raise CheckpointError(f"{path}: weight_block_size is {declared!r}; allowed: two sizes, as [128, 128]")
    return (declared[0], declared[1])


def _pairs(source: CheckpointSource, *, block: tuple[int, int]) -> dict[str, str]:
    """The scale of each float8 tensor, by name."""
    headers = source.headers
    scales: dict[str, str] = {}
    claimed = set(_activation_scales(headers))
    complaints = []
    for name, header in headers.items():
        if header.dtype not in FLOAT8_DTYPES:
            continue
        found = [candidate for candidate in _scale_names(name) if candidate in headers]
        claimed.update(found)
        if len(found) != 1:
            held = f"several: {', '.join(found)}" if found else f"none of {', '.join(_scale_names(name))}"
            complaints.append(f"{name} is {header.dtype} and needs one scale; the checkpoint has {held}")
        elif not _fits(headers[found[0]], shape=header.shape, block=block):
            scale = headers[found[0]]
            complaints.append(
                f"{found[0]}: {scale.shape} {scale.dtype} is no scale for {name} {header.shape}; allowed: one number, "
                f"one a row, or one a block of {block[0]} x {block[1]}, in floats"
            )
        else:
            scales[name] = found[0]
    complaints += [
        f"{name}: a scale, but {name[: -len(suffix)]} is no float8 tensor of this checkpoint"
        for name in headers
        for suffix in SCALE_SUFFIXES
        if name.endswith(suffix) and name not in claimed
    ]
    if complaints:
        raise CheckpointError(
            f"{source.directory}: float8 tensors and scales do not fit together:\n"
            + "\n".join(f"  {text}" for text in complaints)
        )
    return scales


def _scale_names(name: str) -> list[str]:
    layer, _, last = name.rpartition(".")
    prefix = f"{layer}." if layer else ""
    return [*(name + suffix for suffix in SCALE_SUFFIXES), f"{prefix}scale_{last}"]


def _activation_scales(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.rpartition(".")[2] in ACTIVATION_SCALES]


def _fits(scale: TensorHeader, *, shape: Shape, block: tuple[int, int]) -> bool:
    if scale.dtype not in ("float32", "bfloat16", "float16", "float8_e8m0fnu"):
        return False
    if math.prod(scale.shape) == 1:
        return True
    if len(shape) == 2 and scale.shape == tuple(math.ceil(n / b) for n, b in zip(shape, block, strict=True)):
        return True
    return bool(shape) and scale.shape in ((shape[0],), (shape[0],) + (1,) * (len(shape) - 1))


def _broadcast(scale: Shape, *, shape: Shape) -> Shape:
    """The shape in which one number, or one a row, multiplies a tensor."""
    return () if math.prod(scale) == 1 else (shape[0],) + (1,) * (len(shape) - 1)
