"""`module.json`: a torch module of the user's own, beside its checkpoint.

Owns how a module that is no transformers model is described: who makes it, and what goes in. Loads no framework. The
one decision: what training saw in its first batch is written down there, so whoever converts the checkpoint later
needs nothing from the author but the factory.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import ArtifactError
from pipeline.models.json_file import read_json

MODULE_FILE = "module.json"
BATCH = "batch"
"""The name of the dimension that counts examples; any other name is a dimension that may vary as well."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InputSpec:
    """One input of `forward`."""

    shape: tuple[int | str, ...]
    """A number is fixed, a name varies; the same name is the same size in every input."""
    dtype: str
    """`float32`, `int64`, `bool`, ..."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleFile:
    """The whole of `module.json`."""

    factory: str
    """`module:function`, importable from the project; called with `arguments`, gives a `torch.nn.Module`."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """JSON values."""
    inputs: Mapping[str, InputSpec] = field(default_factory=dict)
    """By keyword of `forward`, in its order."""

    def text(self) -> str:
        """`module.json` as it is written."""
        return json.dumps(asdict(self), indent=1) + "\n"

    def write(self, directory: Path) -> None:
        """Write `module.json` into `directory`."""
        (directory / MODULE_FILE).write_text(self.text(), encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> "ModuleFile":
        """Read `module.json` of a checkpoint.

        Raises:
            ArtifactError: it is missing or malformed.
        """
        path = directory / MODULE_FILE
        try:
            raw = read_json(path)
            inputs = {
                str(name): InputSpec(shape=tuple(_size(size) for size in spec["shape"]), dtype=str(spec["dtype"]))
                for name, spec in raw["inputs"].items()
            }
            return cls(factory=str(raw["factory"]), arguments=dict(raw["arguments"]), inputs=inputs)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArtifactError(f"{path}: not a module description: {type(error).__name__}: {error}") from error


def _size(value: Any) -> int | str:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise ValueError(f"a size is a number or a name, found {value!r}")
