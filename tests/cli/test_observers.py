"""What a watcher sees: the same facts on a terminal, in a pipe and as JSON lines."""

import io
import json

import pytest
from rich.console import Console

from pipeline.cli.observers import JsonObserver, LiveObserver, PlainObserver, Progress, ending
from pipeline.spec.gate import Gate
from pipeline.stages.protocol import Report
from pipeline.tracking.view import AttemptView, RunStatus, RunView, StageStatus, StageView

NOW = 1_000.0


def stage(status: StageStatus = StageStatus.RUNNING, **changes: object) -> StageView:
    fields: dict[str, object] = {
        "name": "train",
        "kind": "train.fsdp",
        "status": status,
        "reason": "never run",
        "attempts": (AttemptView(attempt=2, started_at=NOW),),
        **changes,
    }
    return StageView(**fields)  # type: ignore[arg-type]


def run() -> RunView:
    return RunView(
        run_id="20260101-000000-abcd",
        flow="llm",
        flow_file="flow.yaml",
        status=RunStatus.RUNNING,
        started_at=NOW,
        ended_at=None,
        parameters={},
        stages=(),
    )


def progress(done: float, *, at: float, note: str = "loss 6.21, 2,310 tokens/s") -> Report:
    return Report(kind="progress", payload={"done": done, "total": 150, "unit": "steps", "note": note}, time=at)


def test_time_left_is_the_pace_of_what_was_reported() -> None:
    state = Progress(started_at=NOW)
    state.take(progress(10, at=NOW))
    assert state.seconds_left(now=NOW) is None
    state.take(progress(60, at=NOW + 100))
    assert state.seconds_left(now=NOW + 100) == pytest.approx(180)
    assert state.describe(now=NOW + 100) == "60/150 steps, loss 6.21, 2,310 tokens/s, 3 min 00 s left"


def test_a_pipe_gets_plain_lines_without_markup() -> None:
    out = io.StringIO()
    observer = PlainObserver(Console(file=out, width=200))
    observer.run_started(run())
    observer.stage_changed(stage())
    observer.reported("train", progress(45, at=NOW))
    observer.reported("train", Report(kind="note", payload={"text": "[bold] is not markup"}, time=NOW))
    observer.stage_changed(stage(StageStatus.FAILED, reason="out of memory"))
    observer.close()
    text = out.getvalue()
    assert "run 20260101-000000-abcd of flow llm" in text
    assert "train: RUNNING never run" in text
    assert "train: 45/150 steps, loss 6.21, 2,310 tokens/s" in text
    assert "train: [bold] is not markup" in text
    assert "train: FAILED out of memory" in text
    assert "\x1b" not in text


def test_a_stage_that_waits_says_so_once() -> None:
    out = io.StringIO()
    observer = PlainObserver(Console(file=out, width=200))
    observer.stage_changed(stage())
    for _ in range(50):
        observer.waiting("train", "waiting for 2 CPUs")
    assert out.getvalue().count("waiting for 2 CPUs") == 1


@pytest.mark.parametrize("width", [60, 80, 160])
def test_a_terminal_of_any_width_shows_stage_status_and_attempt(width: int) -> None:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True)
    observer = LiveObserver(console)
    observer.run_started(run())
    observer.stage_changed(stage())
    observer.reported("train", progress(45, at=NOW))
    observer.stage_changed(stage(StageStatus.DONE, metrics={"a_metric_with_a_very_long_name": 1.0} | {"b": 2.0}))
    observer.run_finished(run())
    last = out.getvalue().split("stage")[-1]
    assert "train" in last
    assert "DONE" in last
    assert "2" in last


def test_json_lines_are_json_each(capsys: pytest.CaptureFixture[str]) -> None:
    observer = JsonObserver()
    observer.run_started(run())
    observer.stage_changed(stage())
    observer.reported("train", progress(1, at=NOW))
    observer.waiting("train", "not news")
    observer.run_finished(run())
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event"] for event in events] == ["run-started", "stage", "report", "run-finished"]
    assert events[1]["status"] == "RUNNING"


def test_an_end_names_metrics_and_verdicts() -> None:
    verdict = Gate.parse("loss", "<= 6").judge({"loss": 5.5})
    text = ending(stage(StageStatus.DONE, metrics={"loss": 5.5}, gates=(verdict,)))
    assert text == "loss 5.5, loss = 5.5 holds <= 6"
