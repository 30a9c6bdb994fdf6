"""GGUF files: quantized models of llama.cpp, as the transformers checkpoint they came from.

Owns the way from GGUF's tensors to named, dequantized ones. Knows rows of families, and nothing of Flax. The one
decision: numbers are dequantized to float32 by the gguf package and everything llama.cpp changed is changed back, so
that behind this reader a GGUF file is a checkpoint like any other; floats that are stored as floats keep their dtype.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from converters.gguf_families import GgufFamily, gguf_config, gguf_family
from converters.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from converters.gguf_rope import RopeFacts
from converters.operations import Array, DeinterleaveRope, Shape
from converters.parts import read_range
from converters.rules import match, render
from converters.source import BesideTheWeights, TensorHeader, only_file
from converters.torch_gguf_tokenizer import tokenizer_files
from pipeline.errors import CheckpointError

SUFFIX = ".gguf"
_PLAIN: Mapping[GGMLQuantizationType, np.dtype[Any]] = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
    GGMLQuantizationType.F64: np.dtype(np.float64),
    GGMLQuantizationType.I8: np.dtype(np.int8),
    GGMLQuantizationType.I16: np.dtype(np.int16),
    GGMLQuantizationType.I32: np.dtype(np.int32),
    GGMLQuantizationType.I64: np.dtype(np.int64),
}
_MALFORMED = (ValueError, OSError, TypeError, ArithmeticError, LookupError)
"""What a header raises that is damaged, or whose values are of other kinds than a family's row expects."""
_MAX_EXPERTS = 1024
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Constants that the config expresses; they are no weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    tensor: GgufTensor
    template: str
    """Its GGUF name as the family's row has it."""
    expert: int | None
    """Which slice of the first axis, where the file keeps experts in one tensor."""


class GgufSource(BesideTheWeights):
    """An open GGUF file; holds its header, no weights."""

    format = "gguf"

    def __init__(self, path: Path, *, header: GgufHeader, family: GgufFamily, places: Mapping[str, _Place]) -> None:
        self._path = path
        self._family = family
        self._places = places
        self._config = self._make_config(header)
        self._tokenizer: dict[str, bytes] | None = None
        """Once made (1.3 s for the vocabulary of SmolLM2)."""
        self.directory = path.parent
        self.headers = {name: self._header(name, place) for name, place in places.items()}
        self.dequantized = {
            name: _stored_as(place, subtracts_one=self._subtracts_one(place))
            for name, place in places.items()
            if place.tensor.kind not in _PLAIN or self._subtracts_one(place)
        }

    @staticmethod
    def recognises(path: Path) -> bool:
        """True for a `.gguf` file, and for a directory that holds one."""
        return any(path.glob(f"*{SUFFIX}")) if path.is_dir() else path.name.endswith(SUFFIX)

    @classmethod
    def open(cls, path: Path) -> "GgufSource":
        """Read the header of the file, or of the only GGUF file in the directory.

        Raises:
            CheckpointError: the file is damaged, of an unknown architecture, or holds tensors that its family does not
                have; names them.
        """
        path = only_file(path, suffix=SUFFIX)
        try:
            header = read_gguf_header(path)
            family = gguf_family(header.metadata)
            return cls(path, header=header, family=family, places=_places(header, family))
        except _MALFORMED as error:
            raise CheckpointError(f"{path}: not read as a GGUF checkpoint: {error}") from error

    def config(self) -> dict[str, Any]:
        """A transformers config, from the metadata."""
        return dict(self._config)

    def companions(self) -> dict[str, bytes]:
        """What lies beside the file; without a tokenizer there, the one that transformers makes of its vocabulary."""
        beside = super().companions()
        if "tokenizer.json" in beside:
            return beside
        if self._tokenizer is None:
            self._tokenizer = tokenizer_files(self._path)
        return self._tokenizer | beside

    def read(self, name: str) -> Array:
        """The tensor as it was before llama.cpp: dequantized, in transformers' layout.

        Raises:
            CheckpointError: the file became shorter since it was opened.
        """
        place = self._places[name]
        array = self._dequantized(place)
        rows = self._family.rotary_rows.get(place.template)
        if rows is not None:
            (array,) = DeinterleaveRope(int(self._config[rows])).apply([array])
        if self._is_transposed(name, place):
            array = array.T
        if self._subtracts_one(place):
            array = array - np.ones((), array.dtype)
        return np.ascontiguousarray(array).reshape(self.headers[name].shape)

    def _dequantized(self, place: _Place) -> Array:
        tensor, shape = place.tensor, _own_shape(place)
        num_bytes = tensor.num_bytes if place.expert is None else tensor.num_bytes // tensor.shape[0]
        offset = tensor.offset + (place.expert or 0) * num_bytes
        raw = read_range(self._path, offset=offset, num_bytes=num_bytes, name=tensor.name)
        if tensor.kind in _PLAIN:
            return raw.view(_PLAIN[tensor.kind]).reshape(shape)
        block, block_bytes = GGML_QUANT_SIZES[tensor.kind]
        rows = raw.reshape(*shape[:-1], shape[-1] // block * block_bytes)
        return dequantize(rows, tensor.kind).astype(np.float32, copy=False).reshape(shape)

    def _header(self, name: str, place: _Place) -> TensorHeader:
        shape = _own_shape(place)
        return TensorHeader(
            name=name,
            shape=shape[::-1] if self._is_transposed(name, place) else shape,
            dtype=str(_PLAIN.get(place.tensor.kind, np.dtype(np.float32))),
        )

    def _is_transposed(self, name: str, place: _Place) -> bool:
        return place.template in self._family.transposed and name.endswith(".weight")

    def _subtracts_one(self, place: _Place) -> bool:
        return self._family.offset_norms and place.template.endswith("norm")

    def _make_config(self, header: GgufHeader) -> dict[str, Any]:
        divisors, long, short = (
            self._dequantized(_Place(tensor=header.tensors[name], template=name, expert=None)).reshape(-1)
            if name in header.tensors
            else None
            for name in _ROPE_TENSORS
        )
        has_bias = any(name.endswith((".attn_q.bias", ".attn_qkv.bias")) for name in header.tensors)
        embedding = header.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise ValueError("it has no token_embd.weight with two axes")
        config = gguf_config(
            header.metadata,
            vocab_size=embedding.shape[0],
            is_tied="output.weight" not in header.tensors,
            rope=RopeFacts(divisors=divisors, long=long, short=short, has_attention_bias=has_bias),
        )
        complaints = [
            f"{template}: rows for {config[key]} heads"
            for template, key in self._family.rotary_rows.items()
            if any(p.template == template and p.tensor.shape[0] % (2 * int(config[key])) for p in self._places.values())
        ]
        if complaints:
            raise ValueError(f"its tensors do not fit its metadata: {', '.join(complaints)}")
        return config


def _own_shape(place: _Place) -> Shape:
    return place.tensor.shape if place.expert is None else place.tensor.shape[1:]


def _places(header: GgufHeader, family: GgufFamily) -> dict[str, _Place]:
    """Where each tensor of the transformers checkpoint lies.

    Raises:
        ValueError: the family's row does not know a tensor, or it cannot be dequantized; lists every such tensor.
    """
    places: dict[str, _Place] = {}
    complaints = []
    for tensor in header.tensors.values():
        if not _can_dequantize(tensor.kind):
            complaints.append(f"{tensor.name}: the gguf package does not dequantize {tensor.kind.name}")
            continue
        if tensor.name in _ROPE_TENSORS:
            continue
        stem, _, suffix = tensor.name.rpartition(".")
        found = [
            (template, theirs, captures)
            for table in (family.names, family.expert_names)
            for template, theirs in table.items()
            if (captures := match(template, stem)) is not None
        ]
        if not found or suffix not in ("weight", "bias"):
            complaints.append(f"{tensor.name} {tensor.shape}: no {family.model_type} has it")
            continue
        template, theirs, captures = found[0]
        experts: Sequence[int | None] = [None]
        if template in family.expert_names:
            if len(tensor.shape) != 3 or tensor.shape[0] > _MAX_EXPERTS:
                complaints.append(f"{tensor.name} {tensor.shape}: not up to {_MAX_EXPERTS} experts of two axes each")
                continue
            experts = range(tensor.shape[0])
        for expert in experts:
            name = render(theirs, {**captures, "expert": str(expert)})
            places[f"{name}.{suffix}"] = _Place(tensor=tensor, template=template, expert=expert)
    if complaints:
        shown = "\n".join(f"  {text}" for text in complaints[:20])
        raise ValueError(f"{len(complaints)} tensors are not understood:\n{shown}")
    return dict(sorted(places.items(), key=lambda item: (item[1].tensor.offset, item[1].expert or 0)))


def _can_dequantize(kind: GGMLQuantizationType) -> bool:
    if kind in _PLAIN:
        return True
    try:  # the package has no list of the kinds that it dequantizes; it says so of each by this exception
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _stored_as(place: _Place, *, subtracts_one: bool) -> str:
    return place.tensor.kind.name + (" with one added" if subtracts_one else "")
