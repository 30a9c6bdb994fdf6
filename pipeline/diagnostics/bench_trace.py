"""`pipeline bench trace`: how much of what `torch.export` accepts also runs in JAX, and equals torch.

Owns the run over the zoo: a process a model with a limit on time and memory, results kept until all are there. Knows
nothing of how a model is built or traced. The one decision: what a model does to its process (hang, crash, too much
memory) is a result like any other.
"""

import hashlib
import importlib.metadata
import multiprocessing
import os
import resource
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from pipeline.diagnostics.bench_result import BenchResult, BenchRow, machine_facts
from pipeline.diagnostics.trace_page import details, write_page
from pipeline.diagnostics.trace_speed import speed_row
from pipeline.diagnostics.trace_trial import Ended, Trial, run_trial
from pipeline.diagnostics.trace_zoo import ZooEntry, zoo
from pipeline.errors import UsageError

BAR = 0.80
"""Share of the models that `torch.export` accepts whose outputs must equal torch's."""
LIMIT_SECONDS = 150.0
LIMIT_BYTES = 16 << 30
"""Of address space; XLA reserves far more than it touches."""
PAGE = Path(__file__).resolve().parents[2] / "docs" / "trace-coverage.md"
_SOURCES = ("pipeline/diagnostics", "pipeline/models/traced", "converters/trace")
_VERSIONS = ("torch", "transformers", "jax", "flax")
_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOADED = ("pipeline.diagnostics.trace_trial", "pipeline.diagnostics.zoo_transformers", "torch._dynamo")
"""Imported once by the process that all others are forked from: 7 s that no model pays again."""
_POLL_SECONDS = 0.5

Notice = Callable[[str], None]
Target = Callable[[ZooEntry, Path], None]


def run(
    *,
    work: Path,
    rounds: int = 5,
    only: str = "",
    jobs: int = 1,
    update_docs: bool = False,
    notice: Notice | None = None,
) -> BenchResult:
    """Take every model of the zoo through the trace road.

    Args:
        work: where results are kept; a run that was interrupted goes on from there.
        rounds: of the comparison with a family's forward pass.
        only: comma-separated patterns of names or groups; all models where it is empty.
        jobs: processes at a time.
        update_docs: write `docs/trace-coverage.md`; with `only`, the rows of all other models stay as last measured.
        notice: told of each result.

    Raises:
        UsageError: no model matches `only`.
    """
    entries = tuple(zoo(only=only))
    if not entries:
        raise UsageError(f"no model is called {only!r}", hint="docs/trace-coverage.md has all names")
    kept = work / f"run-{_digest(entries)}"
    kept.mkdir(parents=True, exist_ok=True)
    trials = run_all(entries, kept=kept, jobs=jobs, notice=notice or (lambda _: None))
    latest = work / "latest"
    latest.mkdir(exist_ok=True)
    for trial in trials:
        trial.write(latest / _file_name(trial.name))
    shutil.rmtree(kept)
    if update_docs:
        write_page(PAGE, _all_of(latest), bar=BAR, limit_seconds=LIMIT_SECONDS)
    accepted = sum(trial.exported for trial in trials)
    share = BenchRow(
        name=f"models equal to torch, of {len(trials)}",
        unit="models",
        ours=float(sum(trial.passed for trial in trials)),
        peer_name="accepted by torch.export",
        peer=float(accepted) if accepted else None,
        bar=BAR,
    )
    rows = (share,) if only else (share, speed_row(rounds=rounds))
    versions = {name: importlib.metadata.version(name) for name in _VERSIONS}
    return BenchResult(machine=machine_facts() | versions, rows=rows, details=details(trials))


def run_all(
    entries: Sequence[ZooEntry],
    *,
    kept: Path,
    jobs: int,
    notice: Notice,
    target: Target = run_trial,
    limit_seconds: float = LIMIT_SECONDS,
) -> list[Trial]:
    """One trial an entry, in the order of `entries`.

    Args:
        entries: what to try.
        kept: directory of the results; those that are there already are taken as they are.
        jobs: processes at a time.
        notice: told of each result.
        target: the trial, importable by name.
        limit_seconds: after which a process is ended.
    """
    _CONTEXT.set_forkserver_preload(list(_PRELOADED))
    waiting = [(number, entry) for number, entry in enumerate(entries) if not _is_known(_record(kept, number))]
    running: dict[BaseProcess, tuple[int, ZooEntry, float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                number, entry = waiting.pop(0)
                process = _CONTEXT.Process(target=_child, args=(target, entry, _record(kept, number)), daemon=True)
                process.start()
                running[process] = (number, entry, time.monotonic())
            wait([process.sentinel for process in running], timeout=_POLL_SECONDS)
            for ended in [process for process in running if _is_over(process, running[process][2], limit_seconds)]:
                number, entry, started = running.pop(ended)
                trial = _result(ended, entry, _record(kept, number), seconds=time.monotonic() - started)
                notice(f"[{len(entries) - len(waiting) - len(running)}/{len(entries)}] {_line(trial)}")
    finally:
        for left in running:
            left.kill()
            left.join()
    return [Trial.read(_record(kept, number)) for number in range(len(entries))]


def _child(target: Target, entry: ZooEntry, record: Path) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    target(entry, record)


def _is_over(process: BaseProcess, started: float, limit_seconds: float) -> bool:
    return not process.is_alive() or time.monotonic() - started > limit_seconds


def _result(process: BaseProcess, entry: ZooEntry, record: Path, *, seconds: float) -> Trial:
    """What the process wrote; where it did not finish, the step it was in and what became of it."""
    overdue = process.is_alive()
    if overdue:
        process.kill()
    process.join()
    if _is_known(record):
        return Trial.read(record)
    last = Trial.read(record) if record.is_file() else Trial(name=entry.name, group=entry.group, ended=Ended.NOT_BUILT)
    code = process.exitcode or 0
    end = f"signal {-code}" if code < 0 else f"exit code {code}"
    reason = f"took more than {seconds:.0f} s" if overdue else f"its process ended with {end}"
    trial = replace(last, reason=reason, seconds={"all": round(seconds, 2)}, finished=True)
    trial.write(record)
    return trial


def _record(kept: Path, number: int) -> Path:
    return kept / f"{number:04d}.json"


def _is_known(record: Path) -> bool:
    return record.is_file() and Trial.read(record).finished


def _file_name(name: str) -> str:
    return name.replace(":", "--") + ".json"


def _all_of(latest: Path) -> list[Trial]:
    """The latest result of every model."""
    return [
        Trial.read(path)
        if (path := latest / _file_name(entry.name)).is_file()
        else Trial(name=entry.name, group=entry.group, ended=Ended.NOT_MEASURED)
        for entry in zoo()
    ]


def _digest(entries: Sequence[ZooEntry]) -> str:
    """Of everything that results depend on: a run that goes on must not mix two states of the code."""
    root = Path(__file__).resolve().parents[2]
    versions = [importlib.metadata.version(name) for name in _VERSIONS]
    hashed = hashlib.sha256(repr((versions, entries)).encode())
    for path in sorted(path for source in _SOURCES for path in (root / source).rglob("*.py")):
        hashed.update(path.read_bytes())
    return hashed.hexdigest()[:12]


def _line(trial: Trial) -> str:
    figure = "" if trial.difference is None else f" {trial.difference:.1e}"
    return f"{trial.name}: {trial.ended}{figure} ({sum(trial.seconds.values()):.1f} s) {trial.reason}".rstrip()
