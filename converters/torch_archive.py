"""What may lie in a file that `torch.save` wrote, before torch is asked to read it.

Owns the checks of the zip archive and of the names in its pickles. Loads no framework. The one decision: nothing of the
file is executed or inflated to learn whether it is harmless. Its pickles are read as a list of instructions, and one
name that no state dict holds is a refusal.

Layout: a zip archive of stored (never deflated) records, `data.pkl` beside `data/0`, `data/1`, ... one for each
storage; before torch 1.6 a row of pickles with the storages behind them.
"""

import io
import re
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from converters.pickle_instructions import instructions
from pipeline.errors import CheckpointError

MAX_PICKLE_BYTES = 200_000_000
"""Names, shapes and strides of a million tensors."""
NUM_LEGACY_PICKLES = 5
"""Magic number, protocol version, system, the state itself, the list of storages."""
CHUNK_BYTES = 1 << 24

_ALLOWED_NAMES = re.compile(
    r"torch\._utils _rebuild_(tensor|tensor_v2|tensor_v3|parameter|parameter_with_state)"
    r"|torch\._tensor _rebuild_from_type_v2"
    r"|torch\.nn\.parameter (Parameter|Buffer)"
    r"|torch(\.cuda|\.storage)? [A-Za-z0-9]*Storage"
    r"|torch (Size|Tensor|device|u?int\d+|b?float\d+\w*|complex\d+|bool)"
    r"|collections (OrderedDict|defaultdict)"
    r"|torch\.serialization _get_layout|_codecs encode"
    # Named by tensors of kinds that are refused later by their own names.
    r"|torch\._utils _rebuild_(sparse_tensor|qtensor|meta_tensor_no_storage|nested_tensor)"
    r"|torch (per_\w+_(affine|symmetric)|Q\w+|qu?int\d+)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One storage in an archive."""

    name: str
    num_bytes: int
    checksum: int
    """CRC-32; 0 where the file was saved without."""


def is_archive(path: Path) -> bool:
    """True where the file is a zip archive (torch 1.6 and later).

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return file.read(4) == b"PK\x03\x04"
    except OSError as error:
        raise _refusal(path, error) from error


def read_records(path: Path) -> dict[int, Record]:
    """The storages of an archive by the offset of their bytes in the file.

    Raises:
        CheckpointError: the archive is damaged, deflated, big-endian, a TorchScript module, or its pickle names
            something that no state dict holds.
    """
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            members = archive.infolist()
            by_name = {member.filename.partition("/")[2]: member for member in members}  # as torch asks for them
            if "constants.pkl" in by_name:
                raise ValueError("a TorchScript module, whose weights come with code; save its state dict instead")
            _check_members(members, size=path.stat().st_size)
            if "byteorder" in by_name and _content(file, by_name["byteorder"]) != b"little":
                raise ValueError("its numbers are in big-endian order, which is not read")
            if "data.pkl" not in by_name:
                raise ValueError("a zip archive without data.pkl, which torch.save writes")
            _check_names(io.BytesIO(_content(file, by_name["data.pkl"])), num_pickles=1)
            return {
                _data_offset(file, member): Record(
                    name=member.filename, num_bytes=member.file_size, checksum=member.CRC
                )
                for member in members
                if "/data/" in member.filename
            }
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError) as error:  # the last: a later zip version
        raise _refusal(path, error) from error


def check_legacy(path: Path) -> None:
    """Read the pickles of a file from before torch 1.6 as a list of instructions.

    Raises:
        CheckpointError: it is none, or a pickle names something that no state dict holds.
    """
    try:
        with path.open("rb") as file:
            _check_names(file, num_pickles=NUM_LEGACY_PICKLES)
    except (OSError, ValueError) as error:
        raise _refusal(path, error) from error


def hold_checksum(path: Path, *, offset: int, record: Record, content: memoryview | None) -> None:
    """Hold a storage's checksum against its bytes.

    Args:
        path: of the archive.
        offset: of the storage in it.
        record: the storage.
        content: all of its bytes, where they were read already; else they are read in chunks.

    Raises:
        CheckpointError: it does not hold, or the file became shorter.
    """
    checksum, left = 0, record.num_bytes
    if content is not None:
        checksum, left = zlib.crc32(content), left - content.nbytes
    try:
        with path.open("rb") as file:
            file.seek(offset)
            while left and (chunk := file.read(min(CHUNK_BYTES, left))):
                checksum, left = zlib.crc32(chunk, checksum), left - len(chunk)
    except OSError as error:
        raise _refusal(path, error) from error
    if left or checksum != record.checksum:
        raise CheckpointError(f"{path}: the checksum of {record.name} does not hold; the file is damaged")


def _check_members(members: list[zipfile.ZipInfo], *, size: int) -> None:
    names = [member.filename for member in members]
    if len(set(names)) != len(names):
        raise ValueError(f"holds {next(name for name in names if names.count(name) > 1)} twice")
    if len({name.partition("/")[0] for name in names}) > 1:  # torch reads the first alone
        raise ValueError("its records lie under more than one name, as torch.save never writes them")
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
            raise ValueError(f"{member.filename} is deflated, which torch.save never does")
        if member.header_offset + member.file_size > size:
            raise ValueError(f"{member.filename} has {member.file_size} bytes in a file of {size}")
        if member.filename.endswith("data.pkl") and member.file_size > MAX_PICKLE_BYTES:
            raise ValueError(f"{member.filename} has {member.file_size} bytes; at most {MAX_PICKLE_BYTES} are read")


def _content(file: IO[bytes], member: zipfile.ZipInfo) -> bytes:
    """The bytes of a small record. zipfile itself takes the 0 of a file that was saved without checksums for one."""
    file.seek(_data_offset(file, member))
    content = file.read(member.file_size)
    if len(content) != member.file_size or (member.CRC and zlib.crc32(content) != member.CRC):
        raise ValueError(f"the checksum of {member.filename} does not hold; the file is damaged")
    return content


def _data_offset(file: IO[bytes], member: zipfile.ZipInfo) -> int:
    """Behind the member's own header, whose name and padding have lengths of their own."""
    file.seek(member.header_offset)
    header = file.read(30)
    if len(header) != 30 or header[:4] != b"PK\x03\x04":
        raise ValueError(f"{member.filename} does not start where the archive says")
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    return int(member.header_offset + 30 + name_length + extra_length)


def _check_names(pickles: IO[bytes], *, num_pickles: int) -> None:
    for _ in range(num_pickles):
        for instruction, argument in instructions(pickles):
            if instruction == "GLOBAL" and _ALLOWED_NAMES.fullmatch(str(argument)) is None:
                raise ValueError(f"it names {str(argument).replace(' ', '.')}, which no state dict of tensors holds")
            if instruction in ("STACK_GLOBAL", "INST", "OBJ", "EXT1", "EXT2", "EXT4"):
                raise ValueError(f"it has the instruction {instruction}, which torch.save never writes")


def _refusal(path: Path, error: Exception) -> CheckpointError:
    text = str(error).strip().splitlines()
    return CheckpointError(
        f"{path}: not read as a torch checkpoint: {text[0][:300] if text else type(error).__name__}",
        hint="only tensors are read, never code: save model.state_dict() with torch.save, or safetensors",
    )
