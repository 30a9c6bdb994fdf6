"""One model of the zoo through the trace road, and what came of it.

Owns the order of a trial (build, export, convert, run, compare) and its record. Knows nothing of processes or tables.
The one decision: a trial never raises; where it ended and in whose words is its result. Because a step is on record
before it begins, that also holds for a trial whose process dies.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from flax import nnx
from torch.export import ExportedProgram

from converters.trace.export import export_module, lower, unsupported_operations
from converters.trace.graph import program_of
from pipeline.diagnostics.trace_zoo import ZooEntry, ZooModel
from pipeline.errors import ConversionError
from pipeline.models.module_file import BATCH
from pipeline.models.traced.description import TracedModel

TOLERANCE = 1e-4
"""Relative: the largest difference of an output over the largest value of torch's."""
_MAX_REASON = 200


class Ended(StrEnum):
    """How far a model came."""

    NOT_MEASURED = "not measured"
    """Its row on the page waits for a run."""
    NOT_BUILT = "not built"
    NOT_EXPORTED = "not exported"
    UNSUPPORTED = "unsupported operations"
    NOT_CONVERTED = "not converted"
    NOT_RUN = "not run"
    DIFFERENT = "different"
    EQUAL = "equal"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What came of one model."""

    name: str
    group: str
    ended: Ended
    reason: str = ""
    """In the words of whoever refused."""
    num_parameters: int = 0
    open_batch: bool = False
    """The exported graph serves any number of rows."""
    unsupported: Mapping[str, int] = field(default_factory=dict)
    """Operations that JAX has no counterpart for here, with how often they occur."""
    difference: float | None = None
    """The largest relative difference of an output; None where nothing was compared."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """By step: build, export, convert, run."""
    finished: bool = True
    """False on a record of a trial that is still at the step where it would have ended."""

    @property
    def built(self) -> bool:
        """Its own forward pass runs here."""
        return self.ended not in (Ended.NOT_MEASURED, Ended.NOT_BUILT)

    @property
    def exported(self) -> bool:
        """`torch.export` took it."""
        return self.built and self.ended is not Ended.NOT_EXPORTED

    @property
    def converted(self) -> bool:
        """It became a Flax module."""
        return self.ended in (Ended.NOT_RUN, Ended.DIFFERENT, Ended.EQUAL)

    @property
    def passed(self) -> bool:
        """Its outputs equal torch's."""
        return self.ended is Ended.EQUAL

    def write(self, path: Path) -> None:
        """Write the record; it appears whole or not at all."""
        beside = path.with_suffix(".partial")
        beside.write_text(json.dumps(asdict(self)), encoding="utf-8")
        beside.replace(path)

    @classmethod
    def read(cls, path: Path) -> "Trial":
        """Read a record."""
        raw = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**raw, "ended": Ended(raw["ended"])})


class _Stopped(Exception):  # noqa: N818 - an end, not an error
    """A step ended the trial."""

    def __init__(self, ended: Ended, reason: str, unsupported: Mapping[str, int] | None = None) -> None:
        super().__init__(reason)
        self.ended, self.reason, self.unsupported = ended, reason, unsupported or {}


def run_trial(entry: ZooEntry, record: Path) -> None:
    """Take one model as far as it goes, and write what came of it."""
    trial = _Progress(entry, record)
    try:
        with trial.step("build", Ended.NOT_BUILT):
            model = entry.build()
        trial.facts["num_parameters"] = sum(parameter.numel() for parameter in model.module.parameters())
        with trial.step("export", Ended.NOT_EXPORTED):
            exported, trial.facts["open_batch"] = export(model, again=entry.build)
        with trial.step("convert", Ended.NOT_CONVERTED):
            traced = convert(model, exported)
        with trial.step("run", Ended.NOT_RUN):
            found = compare(model, traced, fewer_rows=trial.facts["open_batch"])
    except _Stopped as stopped:
        trial.write(ended=stopped.ended, reason=stopped.reason, unsupported=stopped.unsupported)
    else:
        trial.write(ended=Ended.EQUAL if found <= TOLERANCE else Ended.DIFFERENT, difference=found)


class _Progress:
    """What is known of a trial that is under way."""

    def __init__(self, entry: ZooEntry, record: Path) -> None:
        self.facts: dict[str, Any] = {"name": entry.name, "group": entry.group}
        self._seconds: dict[str, float] = {}
        self._record = record

    def write(self, **facts: Any) -> None:
        """Write the record with these facts besides those that are known."""
        seconds = {name: round(value, 2) for name, value in self._seconds.items()}
        Trial(**self.facts, **facts, seconds=seconds).write(self._record)

    @contextmanager
    def step(self, name: str, ended: Ended) -> Iterator[None]:
        """A step that ends the trial with `ended` where it raises."""
        self.write(ended=ended, finished=False)
        started = time.perf_counter()
        try:
            yield
        except _Stopped:
            raise
        except Exception as error:
            raise _Stopped(ended, in_few_words(error)) from error
        finally:
            self._seconds[name] = time.perf_counter() - started


def in_few_words(error: BaseException) -> str:
    """The first lines of an error, on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join([f"{type(error).__name__}:", *lines[:3]])
    return text if len(text) <= _MAX_REASON else text[: _MAX_REASON - 3] + "..."


def export(model: ZooModel, *, again: Callable[[], ZooModel]) -> tuple[ExportedProgram, bool]:
    """The exported graph, with an open number of rows where torch takes that; and whether it is open.

    Args:
        model: the torch module and its inputs.
        again: makes the same once more; a module may keep what it saw when an export failed half way.

    Raises:
        ConversionError: `torch.export` refuses the model even with fixed sizes.
    """
    try:
        exported = export_module(model.module, args=(), kwargs=model.inputs, dynamic=_open_rows(model.inputs))
    except ConversionError:
        fresh = again()
        return export_module(fresh.module, args=(), kwargs=fresh.inputs, dynamic={}), False
    return exported, _has_open_rows(exported)


def _has_open_rows(exported: ExportedProgram) -> bool:
    """Whether every input may have another number of rows; a module may fix that of some."""
    names = set(exported.graph_signature.user_inputs)
    values = [node.meta["val"] for node in exported.graph.nodes if node.op == "placeholder" and node.name in names]
    rows = [value.shape[0] for value in values if isinstance(value, torch.Tensor)]
    return bool(rows) and all(isinstance(size, torch.SymInt) and _varies(size, exported) for size in rows)


def _varies(size: torch.SymInt, exported: ExportedProgram) -> bool:
    limits = exported.range_constraints.get(size.node.expr)
    return limits is not None and limits.lower != limits.upper


def convert(model: ZooModel, exported: ExportedProgram) -> nnx.Module:
    """The traced model with the torch module's weights.

    Raises:
        ConversionError: the graph cannot be made a program.
    """
    lowered = lower(exported)
    unsupported = {name: found.total() for name, found in unsupported_operations(lowered).items()}
    if unsupported:
        shown = ", ".join(sorted(unsupported, key=lambda name: (-unsupported[name], name)))
        raise _Stopped(Ended.UNSUPPORTED, shown, unsupported)
    dynamic = _open_rows(model.inputs)
    program, constants = program_of(lowered, module=model.module, dynamic=dynamic, names=frozenset())
    described = TracedModel(program=program, constants=constants)
    state = model.module.state_dict()
    return described.module({name: state[name].detach().numpy() for name in program.leaves})


def compare(model: ZooModel, traced: nnx.Module, *, fewer_rows: bool) -> float:
    """The largest relative difference of an output; infinite where the outputs are not of the same kind.

    Args:
        model: the torch module and its inputs.
        traced: what was made of it.
        fewer_rows: compare at one row less than the model was exported with.
    """
    opened = _open_rows(model.inputs) if fewer_rows else {}
    inputs = {name: value[:-1] if name in opened else value for name, value in model.inputs.items()}
    with torch.no_grad():
        reference = dict(leaves(model.module(**inputs)))
    graph, state = nnx.split(traced)

    def forward(state: Any, arrays: Any) -> Any:
        return nnx.merge(graph, state)(**arrays)

    arrays = {name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    found = dict(leaves(jax.jit(forward)(state, arrays)))
    if found.keys() != reference.keys():
        raise ConversionError(f"outputs {sorted(found)} where torch has {sorted(reference)}")
    return max((difference(found[path], value) for path, value in reference.items()), default=float("inf"))


def difference(found: Any, reference: torch.Tensor) -> float:
    """Of one output: the largest absolute difference over the largest absolute value of torch's; exact for integers."""
    wanted, given = reference.detach().numpy(), np.asarray(found)
    if wanted.shape != given.shape:
        raise ConversionError(f"shape {given.shape} where torch has {wanted.shape}")
    if not np.issubdtype(wanted.dtype, np.inexact):
        return 0.0 if np.array_equal(wanted, given) else float("inf")
    same = (wanted == given) | (np.isnan(wanted) & np.isnan(given))  # infinities and what both have no number for
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.where(same, 0.0, np.abs(given.astype(np.complex128) - wanted))
    if not np.isfinite(apart).all():
        return float("inf")
    largest = np.abs(wanted[np.isfinite(wanted)]).max(initial=0.0)
    return float(apart.max(initial=0.0) / (largest or 1.0))


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every tensor of an output by its path."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from leaves(item, f"{path}.{number}")
    elif isinstance(value, torch.Tensor | jax.Array):
        yield path, value


def _open_rows(inputs: Mapping[str, Any]) -> dict[str, dict[int, str]]:
    """The sizes that export shall leave open: the rows, where all inputs have equally many."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    sizes = {value.shape[0] if value.ndim else 0 for value in tensors.values()}
    return {name: {0: BATCH} for name in tensors} if len(sizes) == 1 and sizes != {0} else {}
