"""A stage as everything below the flow file sees it.

Owns `ResolvedStage`. The one decision: parameters are the kind's own typed model, so nobody below handles a raw dict.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import FailureClass
from pipeline.spec.gate import Gate
from pipeline.spec.grammar import ResourcesSpec, RetryPolicy
from pipeline.stages.parameters import Parameters
from pipeline.stages.protocol import Resources
from pipeline.stages.reference import OutputReference
from pipeline.stages.registry import StageKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Hop:
    """What is tried when a stage has failed."""

    on: tuple[FailureClass, ...]
    stage: "ResolvedStage | None"
    """The stage as it is then; None where the stage ends and what was there before stays."""
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What it says of `with`, `resources` and `timeout_seconds`, resolved, as a flow would write it."""

    def __str__(self) -> str:
        said = [f"{name} {value}" for part in self.changes.values() for name, value in part.items()]
        what = (", ".join(said) or "the same again") if self.stage is not None else "keep the champion"
        return f"{what} (on {', '.join(self.on)})"


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedStage:
    """One stage of a flow, checked against its kind."""

    name: str
    kind: StageKind
    parameters: Parameters
    inputs: Mapping[str, OutputReference]
    """By parameter name; items of a list are `evidence.0`, of a mapping `inputs.key`."""
    needs: tuple[str, ...]
    """Names of the stages that `inputs` refer to, in file order, each once."""
    outputs: Mapping[str, str]
    """Output name to artifact type."""
    resources: Resources
    gates: tuple[Gate, ...] = ()
    retry: RetryPolicy = field(default_factory=lambda: RetryPolicy())
    timeout_seconds: float | None = None
    description: str = ""
    display: Mapping[str, Any] = field(default_factory=dict)
    """Every parameter with its value, defaults included, as JSON; references as they are written in a flow."""
    fallback: tuple[Hop, ...] = ()
    """In the order they are tried; hops themselves have none."""
    source_files: Mapping[str, Path] = field(default_factory=dict)
    """Files whose content is part of the identity, by parameter name (`model`, `sources.0`)."""


def resources_of(asked: ResourcesSpec, *, kind: StageKind) -> Resources:
    """What a flow asks for, with the kind's default where it does not say."""
    return Resources(
        workers=asked.max_workers,
        min_workers=asked.min_workers if asked.min_workers < asked.max_workers else None,
        cpus=kind.default_cpus if asked.cpus is None else asked.cpus,
        gpus=asked.gpus,
        memory_bytes=asked.memory_bytes,
        labels=asked.labels,
    )
