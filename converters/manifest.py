"""The record of one conversion, written beside the parameters as `conversion.json`.

Owns its fields and its JSON. Knows nothing of how a conversion is done. The one decision: it holds no paths, hosts or
times, so the same checkpoint always gives the same record, byte for byte.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import ArtifactError

MANIFEST_FILE = "conversion.json"
CONVERTER_VERSION = 2
"""Raised by hand when the same checkpoint would become other parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceTensor:
    """One tensor that was read."""

    name: str
    """In torch, without wrapper prefixes."""
    stored_name: str
    shape: tuple[int, ...]
    dtype: str
    sha256: str
    """Of its bytes in row-major order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetLeaf:
    """One leaf that was written."""

    path: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """One application of a rule."""

    sources: tuple[SourceTensor, ...]
    targets: tuple[TargetLeaf, ...]
    operations: tuple[str, ...]
    is_exact: bool
    """False where a cast rounded, so the way back is not bit-identical."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionManifest:
    """The whole of `conversion.json`."""

    converter_version: int
    road: str
    """`family` or `trace`."""
    road_reason: str
    family: str
    """The family's `model_type`, or `traced`."""
    source_format: str
    dtype_policy: str
    facts: Mapping[str, Any]
    """Layout facts of the family, from config.json."""
    tensors: tuple[Conversion, ...]
    tied: Mapping[str, str]
    """Present tensor to the one it was found bit-identical to."""
    ignored: tuple[str, ...]
    carried: tuple[SourceTensor, ...]
    """Tensors that the Flax model does not use and that go back unchanged."""
    prefixes_removed: tuple[str, ...]
    """Components of stored names that the model's own names lack, in alphabetical order."""
    dequantized: Mapping[str, str]
    """Tensor name to how it was stored, where its numbers were made from a quantized form."""
    warnings: tuple[str, ...]
    num_source_tensors: int
    """Tensors in the checkpoint, ignored and tied ones included."""
    num_target_leaves: int
    num_parameters: int
    """Numbers in the target leaves; shared ones count once."""
    num_bytes: int
    """Bytes of the target leaves."""

    @property
    def source_dtypes(self) -> dict[str, str]:
        """The original dtype by torch name; what the way back casts to."""
        return {tensor.name: tensor.dtype for tensor in self.sources}

    @property
    def sources(self) -> tuple[SourceTensor, ...]:
        """Every tensor that became a leaf."""
        return tuple(tensor for conversion in self.tensors for tensor in conversion.sources)

    def write(self, directory: Path) -> None:
        """Write `conversion.json` into `directory`."""
        text = json.dumps(asdict(self), indent=1, sort_keys=True)
        (directory / MANIFEST_FILE).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> "ConversionManifest":
        """Read `conversion.json` of a converted model.

        Raises:
            ArtifactError: it is missing, not JSON, or of another version.
        """
        path = directory / MANIFEST_FILE
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            if raw["converter_version"] != CONVERTER_VERSION:
                raise ArtifactError(
                    f"{path}: converter version {raw['converter_version']!r}, this one reads {CONVERTER_VERSION}"
                )
            raw["tensors"] = tuple(_conversion(entry) for entry in raw["tensors"])
            raw["carried"] = tuple(_source(entry) for entry in raw["carried"])
            raw.update({name: tuple(raw[name]) for name in ("ignored", "prefixes_removed", "warnings")})
            return cls(**raw)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArtifactError(f"{path}: not a conversion record: {type(error).__name__}: {error}") from error


def _conversion(raw: Mapping[str, Any]) -> Conversion:
    return Conversion(
        sources=tuple(map(_source, raw["sources"])),
        targets=tuple(TargetLeaf(**{**entry, "shape": tuple(entry["shape"])}) for entry in raw["targets"]),
        operations=tuple(raw["operations"]),
        is_exact=bool(raw["is_exact"]),
    )


def _source(raw: Mapping[str, Any]) -> SourceTensor:
    return SourceTensor(**{**raw, "shape": tuple(raw["shape"])})
