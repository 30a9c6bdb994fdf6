"""The models that the trace road is measured on.

Owns the list of names and how a name becomes a module with inputs. Knows nothing of tracing. The one decision: a model
is known by name until it is built in a process of its own, so a model that kills its process costs one row.
"""

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any


class BuildError(Exception):
    """A model of the zoo could not be built; the message says why in a few words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ZooModel:
    """A torch module in evaluation mode with random weights, and inputs that it accepts."""

    module: Any
    inputs: Mapping[str, Any]
    """By keyword of `forward`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ZooEntry:
    """One model of the zoo, not yet built."""

    name: str
    group: str
    source: str
    """The module whose `build(name)` builds it."""

    def build(self) -> ZooModel:
        """Build it.

        Raises:
            BuildError: it cannot be built here.
        """
        return importlib.import_module(self.source).build(self.name)


SOURCES = (
    "pipeline.diagnostics.zoo_modules",
    "pipeline.diagnostics.zoo_torchvision",
    "pipeline.diagnostics.zoo_transformers",
)
"""Modules with `names()` and `build(name)`."""


def zoo(*, only: str = "") -> Iterator[ZooEntry]:
    """Every entry whose name or group matches one of the comma-separated patterns in `only`; all where it is empty."""
    patterns = [pattern.strip() for pattern in only.split(",") if pattern.strip()]
    for source in SOURCES:
        for name, group in importlib.import_module(source).names():
            if not patterns or any(fnmatch(name, p) or fnmatch(group, p) for p in patterns):
                yield ZooEntry(name=name, group=group, source=source)
