"""References from one stage's parameters to another stage's output, as types.

Owns the annotation that marks a parameter as an input artifact and says which artifact types fit. The one decision:
a reference is checked by type when the flow is planned, so a checkpoint never reaches a stage that wants a dataset.
"""

import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, WithJsonSchema

_REFERENCE = re.compile(r"^\$\{stages\.([A-Za-z][\w-]*)\.outputs\.([A-Za-z][\w-]*)\}$")
REFERENCE_FORM = "${stages.STAGE.outputs.OUTPUT}"


class OutputReference(BaseModel):
    """`${stages.train.outputs.checkpoint}`, parsed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: str
    output: str

    def __str__(self) -> str:
        return f"${{stages.{self.stage}.outputs.{self.output}}}"


@dataclass(frozen=True, slots=True)
class Accepts:
    """Marks a parameter as an input artifact of one of these types."""

    types: tuple[str, ...]


def _parse(value: object) -> object:
    if isinstance(value, str):
        match = _REFERENCE.match(value)
        if match is None:
            raise ValueError(f"an output of a stage is written {REFERENCE_FORM}, found {value!r}")
        return OutputReference(stage=match[1], output=match[2])
    return value


def _parse_or_keep(value: object) -> object:
    """A path stays as it is; what begins like a reference must be one."""
    return _parse(value) if isinstance(value, str) and value.startswith("${") else value


_SCHEMA = WithJsonSchema({"type": "string", "pattern": _REFERENCE.pattern, "description": REFERENCE_FORM})

DatasetInput = Annotated[OutputReference, BeforeValidator(_parse), _SCHEMA, Accepts(("dataset",))]
CheckpointInput = Annotated[OutputReference, BeforeValidator(_parse), _SCHEMA, Accepts(("checkpoint",))]
CheckpointOrPlace = Annotated[
    OutputReference | str,
    BeforeValidator(_parse_or_keep),
    WithJsonSchema({"type": "string", "description": f"{REFERENCE_FORM}, a path or an fsspec URL"}),
    Accepts(("checkpoint",)),
]
"""A checkpoint of the flow, or of anywhere else; what is there is identity, by the kind's `sources`."""
TokenizerOrPlace = Annotated[
    OutputReference | str,
    BeforeValidator(_parse_or_keep),
    WithJsonSchema({"type": "string", "description": f"{REFERENCE_FORM}, a path or an fsspec URL"}),
    Accepts(("checkpoint", "dataset")),
]
"""A tokenizer of the flow, or of anywhere else."""
FlaxModelInput = Annotated[OutputReference, BeforeValidator(_parse), _SCHEMA, Accepts(("flax-model",))]
EvidenceInput = Annotated[OutputReference, BeforeValidator(_parse), _SCHEMA, Accepts(("report",))]
ExportInput = Annotated[OutputReference, BeforeValidator(_parse), _SCHEMA, Accepts(("flax-model", "checkpoint"))]
AnyInput = Annotated[
    OutputReference,
    BeforeValidator(_parse),
    _SCHEMA,
    Accepts(("dataset", "checkpoint", "flax-model", "onnx-model", "report", "registration", "deployment", "files")),
]
