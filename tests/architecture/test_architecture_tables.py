"""The tables of the house are complete: layers, dotted strings, parameters, tests."""

import importlib
import re
import tomllib
from pathlib import Path

import pytest

import converters
from converters.readers import READERS
from pipeline.cli.bench import BENCH_LOG, BENCHES
from pipeline.cli.trackers import TRACKERS
from pipeline.cli.verbs import VERBS
from pipeline.execution.backend import BACKENDS
from pipeline.stages.registry import KINDS
from pipeline.training.__main__ import READER

PROJECT = Path(__file__).resolve().parents[2]
DOTTED = {
    *VERBS.values(),
    *TRACKERS.values(),
    *BACKENDS.values(),
    *BENCHES.values(),
    BENCH_LOG,
    READER,
    *converters.API.values(),
    *READERS,
    *(kind.run for kind in KINDS.values() if kind.run),
    *(kind.sources for kind in KINDS.values() if kind.sources),
    *(kind.verify for kind in KINDS.values() if kind.verify),
}


@pytest.mark.parametrize("dotted", sorted(DOTTED))
def test_every_dotted_string_leads_somewhere(dotted: str) -> None:
    module, _, name = dotted.partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_every_package_has_a_layer() -> None:
    contracts = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = " ".join(next(contract for contract in contracts if contract["type"] == "layers")["layers"])
    packages = {path.parent.name for path in PROJECT.glob("pipeline/*/__init__.py")}
    modules = {path.stem for path in PROJECT.glob("pipeline/*.py")} - {"__init__", "__main__"}
    assert {name for name in packages | modules if f"pipeline.{name}" not in layers} == set()


READ_BY_USERS = ("arguments",)
"""The plain values a user's own function reads."""
SOURCE = {
    path: path.read_text()
    for folder in ("pipeline", "converters")
    for path in (PROJECT / folder).rglob("*.py")
    if path.name not in ("parameters.py", "serve_parameters.py", "train_parameters.py")
}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_parameter_is_read_by_something(kind: str) -> None:
    unread = [
        name
        for name in KINDS[kind].parameters.model_fields
        if name not in READ_BY_USERS
        and not any(re.search(rf"\.{name}\b|[\"']{name}[\"']", text) for text in SOURCE.values())
    ]
    assert unread == []


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_parameter_is_described(kind: str) -> None:
    assert [name for name, field in KINDS[kind].parameters.model_fields.items() if not field.description] == []
