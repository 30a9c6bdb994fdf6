"""A stage as everything below the flow file sees it.

Owns `ResolvedStage`. The one decision: parameters are the kind's own typed model, so nobody below handles a raw dict.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.spec.gate import Gate
from pipeline.spec.grammar import RetryPolicy
from pipeline.stages.parameters import Parameters
from pipeline.stages.protocol import Resources
from pipeline.stages.reference import OutputReference
from pipeline.stages.registry import StageKind


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
    source_files: Mapping[str, Path] = field(default_factory=dict)
    """Files whose content is part of the identity, by parameter name (`model`, `sources.0`)."""
