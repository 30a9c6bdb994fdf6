"""What planning reads of the world: commits, digests of outside sources, whether a commit still holds.

Owns the functions that `plan` and `run` hand to the pure planner. The one decision: both verbs read through here, so
that a plan validates exactly what a run will; only the depth differs (`hashes`), and a kind's check of things outside
the store is made in both.
"""

import importlib
import json
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.artifacts.commit import Commit, find_commit, why_damaged
from pipeline.artifacts.store import Store
from pipeline.errors import ArtifactError
from pipeline.plan.stage import ResolvedStage
from pipeline.stages.protocol import ModelRegistry


@dataclass(kw_only=True)
class Reading:
    """Reads one store for one flow. Digests of sources are computed once."""

    store: Store
    flow: str
    project_root: Path
    environment: Mapping[str, str]
    hashes: bool
    force: AbstractSet[str] = field(default_factory=frozenset)
    registry: ModelRegistry | None = None
    """The tracker's, where a run asks; `plan` loads no tracker."""
    _sources: dict[str, Mapping[str, str]] = field(default_factory=dict)

    def lookup(self, fingerprint: str) -> Commit | None:
        """The commit of a fingerprint; one that cannot be read counts as none, for the stage can commit again."""
        try:
            return find_commit(self.store, fingerprint)
        except ArtifactError:
            return None

    def sources(self, stage: ResolvedStage) -> Mapping[str, str]:
        """Digests of what the stage's kind reads from outside the store."""
        if stage.kind.sources is None:
            return {}
        if stage.name not in self._sources:
            function = _resolve(stage.kind.sources)
            self._sources[stage.name] = function(stage.parameters, self.project_root)
        return self._sources[stage.name]

    def verify(self, stage: ResolvedStage, commit: Commit) -> str | None:
        """Why a commit cannot stand in for the stage, or None."""
        damage = why_damaged(self.store, commit, hashes=self.hashes)
        if damage is not None or stage.kind.verify is None:
            return damage
        reason: str | None = _resolve(stage.kind.verify)(commit, self.environment, self.registry)
        return reason

    @property
    def previous(self) -> Mapping[str, Mapping[str, Any]]:
        """What the fingerprint of each stage's newest commit in this flow was made of; explains why a stage runs."""
        found: dict[str, Mapping[str, Any]] = {}
        for name in self.store.list(f"flows/{self.flow}"):
            data = self.store.read(f"flows/{self.flow}/{name}")
            commit = self.lookup(json.loads(data)["fingerprint"]) if data else None
            if commit is not None:
                found[name.removesuffix(".json")] = commit.parts
        return found


def remember_commit(store: Store, commit: Commit) -> None:
    """Note a stage's newest commit; only a hint for explanations, never for reuse."""
    store.write(f"flows/{commit.flow}/{commit.stage}.json", json.dumps({"fingerprint": commit.fingerprint}).encode())


def _resolve(dotted: str) -> Any:
    module, _, name = dotted.partition(":")
    return getattr(importlib.import_module(module), name)
