"""A small flow of python.call stages in a project of its own, run in this process."""

import secrets
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pipeline.execution.driver import RunOptions, RunResult, run_flow
from pipeline.plan.graph import Flow, open_flow
from pipeline.stages.protocol import Report
from pipeline.tracking.memory_tracker import MemoryTracker
from pipeline.tracking.view import RunView, StageView

STAGES = """
    import json, time
    from pipeline.stages.protocol import StageContext, StageResult
    from pipeline.errors import ClusterError

    def number(context):
        (context.output("value") / "n.json").write_text(json.dumps(context.parameters.arguments["n"]))
        context.reporter.note("numbered")
        context.reporter.metrics({"loss": 2.0}, step=1)
        return StageResult(metrics={"n": context.parameters.arguments["n"]}, facts={"why": "asked"})

    def double(context):
        n = json.loads((context.input("inputs.n").path / "n.json").read_text())
        (context.output("value") / "n.json").write_text(json.dumps(2 * n))
        return StageResult(metrics={"n": 2 * n})

    def raise_error(context):
        raise ValueError("no such luck")

    def flaky(context):
        marker = context.project_root / "tries"
        tries = int(marker.read_text()) + 1 if marker.exists() else 1
        marker.write_text(str(tries))
        if tries < context.parameters.arguments["succeed_on"]:
            raise ClusterError(f"lost node {tries}")
        (context.output("value") / "n.json").write_text("1")
        return StageResult(metrics={"tries": tries})

    def edited(context):
        if context.attempt == 1:
            with open(__file__, "a") as source:
                source.write("# edited meanwhile\\n")
            raise ClusterError("lost a node")
        (context.output("value") / "n.json").write_text("1")
        return StageResult(metrics={"tries": context.attempt})

    def slow(context):
        from pathlib import Path
        work = Path(context.workspace)
        (work / f"attempt-{context.attempt}").write_text("here")
        deadline = time.time() + 60
        while time.time() < deadline and not (context.project_root / "stop").exists():
            time.sleep(0.02)
        (context.output("value") / "n.json").write_text(str(len(list(work.iterdir()))))
        return StageResult()

    def wrong(context):
        (context.output("value") / "n.json").write_text("1")
        return {"n": 1}
"""


class RecordingObserver:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.stages: list[StageView] = []
        self.reports: list[tuple[str, Report]] = []
        self.waits: list[tuple[str, str]] = []
        self.finished: list[RunView] = []

    def run_started(self, run: RunView) -> None: ...

    def stage_changed(self, stage: StageView) -> None:
        self.stages.append(stage)

    def reported(self, stage: str, report: Report) -> None:
        self.reports.append((stage, report))

    def waiting(self, stage: str, reason: str) -> None:
        self.waits.append((stage, reason))

    def run_finished(self, run: RunView) -> None:
        self.finished.append(run)


@dataclass
class Bench:
    """One project with a flow file, and a way to run it."""

    root: Path
    module: str
    tracker: MemoryTracker = field(default_factory=MemoryTracker)
    observer: RecordingObserver = field(default_factory=RecordingObserver)

    @property
    def store(self) -> str:
        return str(self.root / ".pipeline")

    def write(self, flow: str) -> Path:
        path = self.root / "flow.yaml"
        path.write_text(textwrap.dedent(flow).replace("MODULE", self.module))
        return path

    def run(
        self,
        flow: str,
        *,
        overrides: tuple[str, ...] = (),
        force: frozenset[str] = frozenset(),
        is_interrupted: Callable[[], bool] = lambda: False,
        rerun_of: str | None = None,
        ephemeral: bool = False,
        change: Callable[[Flow], Flow] = lambda flow: flow,
    ) -> RunResult:
        self.observer = RecordingObserver()
        return run_flow(
            change(open_flow(self.write(flow), overrides=overrides)),
            options=RunOptions(
                store_url=self.store,
                state_directory=self.root / ".pipeline",
                force=force,
                backend="inline",
                rerun_of=rerun_of,
                ephemeral=ephemeral,
            ),
            make_tracker=lambda _: self.tracker,
            observer=self.observer,
            is_interrupted=is_interrupted,
        )


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    module = f"stages_{secrets.token_hex(4)}"
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / f"{module}.py").write_text(textwrap.dedent(STAGES))
    return Bench(root=tmp_path, module=module)
