"""What a reader offers, whatever the format: headers first, tensors one by one.

Owns the seam between file formats and the converter. Knows nothing of any format. The one decision: everything needed
to plan a conversion is in the headers, so a checkpoint that does not fit is refused before its weights are read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from converters.operations import DTYPES, Array, Shape
from pipeline.errors import CheckpointError
from pipeline.models.config_file import CONFIG_FILE as CONFIG_FILE
from pipeline.models.config_file import read_config

COMPANION_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "modules.json",
    "sentence_bert_config.json",
    "1_Pooling/config.json",
)
"""Files beside the weights that go with the model unchanged, where they exist."""
COMPANION_PATTERN = "additional_chat_templates/*.jinja"
"""More of them, by the names of chat templates."""


STORED_DTYPES: Mapping[str, np.dtype[Any]] = {
    **DTYPES,
    **{name: np.dtype(getattr(ml_dtypes, name)) for name in ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")},
}
"""Dtypes whose bytes a reader can give; those beyond `DTYPES` are dequantized before anybody sees them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorHeader:
    """One tensor of a checkpoint, unread."""

    name: str
    """As stored, wrapper prefixes included."""
    shape: Shape
    dtype: str
    """`float32`, `bfloat16`, ...; any other name is passed on so that an error can say it."""


class CheckpointSource(Protocol):
    """A checkpoint that is open for reading."""

    @property
    def format(self) -> str:
        """Name of the format, for the manifest."""
        ...

    @property
    def directory(self) -> Path:
        """Where the files beside the weights lie."""
        ...

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        """Every model tensor by its stored name, in the order in which reading is cheapest."""
        ...

    @property
    def dequantized(self) -> Mapping[str, str]:
        """How each tensor was stored whose numbers are made from a quantized form (`Q4_1`, `float8 ...`), by name."""
        ...

    def config(self) -> dict[str, Any]:
        """The transformers config of the model: `config.json`, or what the format itself says.

        Raises:
            ArtifactError: there is none, or it is malformed.
            CheckpointError: the format describes the model in a way that no config expresses.
        """
        ...

    def companions(self) -> dict[str, bytes]:
        """Tokenizer and the like by file name (`COMPANION_FILES`, `COMPANION_PATTERN`), for a converted model.

        Raises:
            CheckpointError: one exists and cannot be read.
        """
        ...

    def read(self, name: str) -> Array:
        """The tensor `name` as a C-contiguous array of exactly its header's shape and dtype.

        Raises:
            CheckpointError: a file is missing, truncated or altered; names it.
        """
        ...


class BesideTheWeights:
    """Config and companions of a format that keeps them as files beside the weights."""

    directory: Path
    dequantized: Mapping[str, str] = MappingProxyType({})

    def config(self) -> dict[str, Any]:
        """See `CheckpointSource.config`."""
        return read_config(self.directory)

    def companions(self) -> dict[str, bytes]:
        """See `CheckpointSource.companions`."""
        named = (path.relative_to(self.directory).as_posix() for path in self.directory.glob(COMPANION_PATTERN))
        names = (*COMPANION_FILES, *sorted(named))
        return {name: read_bytes(self.directory / name) for name in names if (self.directory / name).is_file()}


def stored_dtype(header: TensorHeader, *, path: Path) -> np.dtype[Any]:
    """What the bytes of a tensor in the file or directory `path` are in numpy.

    Raises:
        CheckpointError: the dtype is none that is read; names the allowed ones.
    """
    if header.dtype not in STORED_DTYPES:
        raise CheckpointError(
            f"{path}: {header.name} has dtype {header.dtype}, which is not read; allowed: {', '.join(STORED_DTYPES)}"
        )
    return STORED_DTYPES[header.dtype]


def only_file(path: Path, *, suffix: str) -> Path:
    """The regular file `path`, or the only one in the directory `path` whose name ends so.

    Raises:
        CheckpointError: there are several, or it is no regular file.
    """
    if path.is_dir():
        files = sorted(path.glob(f"*{suffix}"))
        if len(files) > 1:
            raise CheckpointError(
                f"{path}: several {suffix} files: {', '.join(file.name for file in files)}", hint="name the file itself"
            )
        (path,) = files
    if not path.is_file():
        raise CheckpointError(f"{path}: is no regular file")
    return path


def read_bytes(path: Path) -> bytes:
    """The content of a small file.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def first_line(error: BaseException) -> str:
    """What an error of a framework says, without the pages that follow."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error).strip() else 'no message'}"
