"""A loaded model, and a model that answers.

Owns the two values between a replica and the ways of serving. The one decision: a way of serving is a function from
the first to the second, chosen by what the model is.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flax import nnx

from pipeline.models.description import ModelDescription
from pipeline.serving.accelerator.device import Placement
from pipeline.serving.accelerator.mesh import ServingMesh
from pipeline.serving.accelerator.multi_host import Leader
from pipeline.serving.engine.engine_thread import ServingEngine
from pipeline.serving.http.model_registry import Surface
from pipeline.serving.replica_settings import ReplicaSettings


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """Read and checked, with its parameters in the dtype it is served in."""

    settings: ReplicaSettings
    directory: Path
    description: ModelDescription
    module: nnx.Module
    device: Any
    """Of jax."""
    placement: Placement
    meshes: tuple[ServingMesh, ...]
    """Of each copy of the model; `module` lies on the first."""
    load: Callable[[ServingMesh], nnx.Module]
    """Reads one more copy; raises `ArtifactError`."""
    leader: Leader | None = None
    """Of the other hosts, where the model lies on several."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """Compiled, with its thread running."""

    engine: ServingEngine
    endpoint: str
    """What it answers: `completions`, `embeddings` or `predict`."""
    facts: Mapping[str, Any]
    """For `/health`."""
    make_surface: Callable[[Mapping[str, Any]], Surface]
    """From all facts of the deployment, which may change while it serves."""
    leaves_of: Callable[[nnx.Module], Any] | None = None
    """What `swap` takes, from a module of the same description; None where parameters cannot be exchanged."""
    swap: Callable[[Any, str], Any] | None = None
    """Run these leaves under this label from now on; returns those that ran before, in host memory. Waits until it is
    done."""
    close: Callable[[], None] = lambda: None
    """End what serves this model beside the engine, after the engine has stopped."""
