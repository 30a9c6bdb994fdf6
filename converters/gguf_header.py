"""The header of a GGUF file: its metadata and where its tensors lie.

Owns its parsing and checking. Knows no model family. The one decision: counts and lengths are held against the bytes
that are left before anything is read for them, because the gguf package's own reader walks as far as a count says.

Layout (github.com/ggml-org/ggml, docs/gguf.md): magic, version, number of tensors and of metadata; the metadata as key,
type, value; for each tensor its name, its dimensions (fastest first), its type and its offset; then, aligned, the data.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from converters.operations import Shape

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_AXES = 4
MAX_STRING_BYTES = 1 << 24
"""The longest that a header has is a chat template of some kilobytes."""
_DEFAULT_ALIGNMENT = 32
_MAX_KEPT_NUMBERS = 4096
"""Arrays of numbers that describe a model have one a layer or a frequency; longer ones are scores of a vocabulary."""
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_KINDS = frozenset(int(kind) for kind in GGML_QUANT_SIZES)


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufTensor:
    """One tensor of the file, unread."""

    name: str
    shape: Shape
    """In the order of torch: slowest first."""
    kind: GGMLQuantizationType
    offset: int
    """In the file."""
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufHeader:
    """What a GGUF file says of itself."""

    metadata: Mapping[str, Any]
    """By key: numbers, texts, lists of numbers; of a list of texts, or of thousands of numbers, its length alone."""
    tensors: Mapping[str, GgufTensor]


def read_gguf_header(path: Path) -> GgufHeader:
    """Metadata and tensor places of the file.

    Raises:
        ValueError: the header is damaged, big-endian, of another version, or does not describe this file.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        cursor = _Cursor(file, size=path.stat().st_size)
        if cursor.take(4) != MAGIC:
            raise ValueError("not a GGUF file")
        version = int(cursor.number("I"))
        if version & 0xFFFF == 0:
            raise ValueError("its numbers are in big-endian order, which is not read")
        if version not in VERSIONS:
            raise ValueError(f"GGUF version {version}; allowed: {', '.join(map(str, VERSIONS))}")
        num_tensors, num_keys = cursor.count(least=24), cursor.count(least=13)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = cursor.text()
            if key in metadata:
                raise ValueError(f"it names {key!r} twice")
            metadata[key] = _value(cursor, cursor.number("I"))
        entries = [_entry(cursor) for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 16:
            raise ValueError(f"general.alignment is {alignment!r}, which is no power of two")
        start = math.ceil(cursor.position / alignment) * alignment
        return GgufHeader(metadata=metadata, tensors=_tensors(entries, start=start, size=cursor.size))


class _Cursor:
    """Reads forward, never further than the file."""

    def __init__(self, file: IO[bytes], *, size: int) -> None:
        self._file = file
        self.size = size
        self.position = 0

    def take(self, length: int) -> bytes:
        """The next bytes."""
        self._advance(length)
        return self._file.read(length)

    def skip(self, length: int) -> None:
        """Pass over bytes."""
        self._advance(length)
        self._file.seek(self.position)

    def _advance(self, length: int) -> None:
        if length > self.size - self.position:
            raise ValueError(f"truncated: {length} bytes expected at byte {self.position} of {self.size}")
        self.position += length

    def number(self, form: str) -> Any:
        """The next number."""
        return struct.unpack(f"<{form}", self.take(struct.calcsize(form)))[0]

    def count(self, *, least: int) -> int:
        """How many things follow, each of at least so many bytes."""
        count = int(self.number("Q"))
        if count * least > self.size - self.position:
            raise ValueError(f"{count} entries announced at byte {self.position} of {self.size}")
        return count

    def text(self) -> str:
        """The next string."""
        length = self.number("Q")
        if length > MAX_STRING_BYTES:
            raise ValueError(f"a text of {length} bytes at byte {self.position}; at most {MAX_STRING_BYTES} are read")
        return self.take(length).decode("utf-8")


def _value(cursor: _Cursor, kind: int) -> Any:
    if kind in _SCALARS:
        return cursor.number(_SCALARS[kind])
    if kind == _STRING:
        return cursor.text()
    if kind != _ARRAY:
        raise ValueError(f"a value of type {kind} at byte {cursor.position}, which GGUF does not have")
    element = cursor.number("I")
    if element == _STRING:
        count = cursor.count(least=8)
        for _ in range(count):
            cursor.skip(cursor.number("Q"))
        return count
    if element not in _SCALARS:
        raise ValueError(f"an array of type {element} at byte {cursor.position}, which is not read")
    width = struct.calcsize(_SCALARS[element])
    count = cursor.count(least=width)
    if count > _MAX_KEPT_NUMBERS:
        cursor.skip(count * width)
        return count
    return list(struct.unpack(f"<{count}{_SCALARS[element]}", cursor.take(count * width)))


def _entry(cursor: _Cursor) -> tuple[str, Shape, int, int]:
    name = cursor.text()
    num_axes = cursor.number("I")
    if num_axes > MAX_AXES or not name.isprintable():
        raise ValueError(f"tensor {name!r} with {num_axes} axes; at most {MAX_AXES} are allowed")
    sizes = tuple(int(cursor.number("Q")) for _ in range(num_axes))
    return name, sizes[::-1], int(cursor.number("I")), int(cursor.number("Q"))


def _tensors(entries: list[tuple[str, Shape, int, int]], *, start: int, size: int) -> dict[str, GgufTensor]:
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind_number, offset in entries:
        if name in tensors:
            raise ValueError(f"it names the tensor {name} twice")
        if kind_number not in _KINDS:
            raise ValueError(f"{name} has type {kind_number}, which the gguf package does not know")
        kind = GGMLQuantizationType(kind_number)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if (shape[-1] if shape else 1) % block:
            raise ValueError(f"{name}: rows of {shape[-1]} are not made of blocks of {block}, as {kind.name} needs")
        tensors[name] = GgufTensor(
            name=name,
            shape=shape,
            kind=kind,
            offset=start + offset,
            num_bytes=math.prod(shape) // block * block_bytes,
        )
    end = start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.num_bytes)):
        if tensor.offset < end:
            raise ValueError(f"{tensor.name} starts at byte {tensor.offset}, the tensor before it ends at {end}")
        end = tensor.offset + tensor.num_bytes
        if end > size:
            raise ValueError(f"truncated: {tensor.name} ends at byte {end} of {size}")
    return tensors
