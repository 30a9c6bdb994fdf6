"""What a stage computes, as a hash.

Owns what belongs to a stage's identity and its canonical form. Pure but for reading the declared source files. The
one decision: kind and version, parameters, digests of inputs, contents of source files, and nothing else; never a path
of an input or source, a host, a worker count, a gate or a retry.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from pipeline.artifacts.manifest import sha256_of
from pipeline.errors import ParameterError
from pipeline.plan.inputs import has_mark, takes_artifacts
from pipeline.plan.stage import ResolvedStage

FORMAT = 1
"""Raised when the canonical form changes; every artifact is then computed anew."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """The hash and what it was made of."""

    value: str
    """sha256, hexadecimal."""
    parts: Mapping[str, Any] = field(default_factory=dict)
    """JSON: `format`, `kind`, `version`, `parameters`, `inputs`, `files`, `sources`."""

    def __str__(self) -> str:
        return self.value


def fingerprint_of(stage: ResolvedStage, *, inputs: Mapping[str, str], sources: Mapping[str, str]) -> Fingerprint:
    """The fingerprint of a stage whose inputs are committed.

    Args:
        stage: the stage.
        inputs: digest of each input artifact by parameter name; exactly the names of `stage.inputs`.
        sources: digests of what the kind reads from outside the flow, by a name that is no path.

    Raises:
        ParameterError: a parameter has no stable form, or a source file cannot be read.
        ValueError: `inputs` has other names than the stage.
    """
    if set(inputs) != set(stage.inputs):
        raise ValueError(f"stage {stage.name!r} has the inputs {sorted(stage.inputs)}, digests of {sorted(inputs)}")
    parts = {
        "format": FORMAT,
        "kind": stage.kind.name,
        "version": stage.kind.version,
        "parameters": _identity(stage),
        "inputs": dict(inputs),
        "files": _file_digests(stage),
        "sources": dict(sources),
    }
    canonical = canonical_json(parts, where=f"stage {stage.name}")
    return Fingerprint(value=hashlib.sha256(canonical.encode()).hexdigest(), parts=json.loads(canonical))


def canonical_json(value: object, *, where: str) -> str:
    """JSON that is equal for equal values: sorted keys, no spaces, ASCII.

    Raises:
        ParameterError: a value has no stable form; the message names the field below `where`.
    """
    return json.dumps(
        _stable(value, where=where), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )


def _identity(stage: ResolvedStage) -> dict[str, object]:
    """Parameters that decide what is computed; inputs and source files are in by their contents instead."""
    given = stage.parameters
    return {
        name: getattr(given, name)
        for name, info in type(given).model_fields.items()
        if not has_mark(info, "identity", value=False)
        and not has_mark(info, "source_file", value=True)
        and not takes_artifacts(info)
    }


def _file_digests(stage: ResolvedStage) -> dict[str, str]:
    digests = {}
    for name, path in stage.source_files.items():
        try:
            digests[name] = sha256_of(path)
        except OSError as error:
            raise ParameterError(
                f"stage {stage.name!r}: the file of {name!r} cannot be read: {error}",
                hint="its content is part of what the stage computes",
            ) from error
    return digests


def _stable(value: object, *, where: str) -> object:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ParameterError(f"{where}: {value} has no stable form; use a finite number")
        return value + 0.0  # -0.0 and 0.0 are equal and must hash alike
    if isinstance(value, BaseModel):
        return {name: _stable(getattr(value, name), where=f"{where}.{name}") for name in type(value).model_fields}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ParameterError(f"{where}: the key {key!r} is no text and has no stable form")
        return {key: _stable(item, where=f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_stable(item, where=f"{where}.{index}") for index, item in enumerate(value)]
    raise ParameterError(
        f"{where}: a {type(value).__name__} has no stable form, so the stage cannot be recognised again",
        hint="use numbers, text, true or false, lists and mappings",
    )
