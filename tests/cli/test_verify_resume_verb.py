"""What `pipeline verify-resume` refuses, and how it shows a verdict; the experiment has tests of its own."""

from pathlib import Path

import pytest

from pipeline.cli import verify_resume
from pipeline.errors import UsageError
from pipeline.plan.graph import ancestors, open_flow

PROJECT = Path(__file__).resolve().parents[2]
REPORT = {
    "steps": 10,
    "world_size": 2,
    "checkpoint_every_steps": 3,
    "draws": False,
    "tolerance": 1e-3,
    "ok": False,
    "cases": [
        {
            "killed_at": 4,
            "world_size": 2,
            "resumed_from": 3,
            "loss_error": 0.0,
            "state_error": 0.0,
            "problems": (),
            "ok": True,
        },
        {
            "killed_at": 4,
            "world_size": 1,
            "resumed_from": 3,
            "loss_error": 1e-6,
            "state_error": 1e-5,
            "problems": (),
            "ok": True,
        },
        {
            "killed_at": 7,
            "world_size": 2,
            "resumed_from": 6,
            "loss_error": 0.5,
            "state_error": 0.0,
            "problems": ("rng: x",),
            "ok": False,
        },
    ],
}


def call(flow: str = "vision", **changed) -> int:
    given = {
        "stage": "",
        "steps": 10,
        "checkpoint_every": 3,
        "kill_at": [],
        "every": False,
        "other_workers": None,
        "overrides": [],
        "store": None,
        "as_json": False,
    } | changed
    return verify_resume.run(flow_path=PROJECT / f"flows/{flow}.yaml", **given)


def test_the_only_training_stage_is_chosen_and_its_inputs_are_those_before_it() -> None:
    flow = open_flow(PROJECT / "flows/vision.yaml")
    assert verify_resume.choose_stage(flow, "").name == "train"
    assert ancestors(flow.stages, "train") == ("data",)
    assert ancestors(flow.stages, "data") == ()
    assert set(ancestors(flow.stages, flow.stages[-1].name)) <= {stage.name for stage in flow.stages}


def test_a_stage_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(UsageError, match=r"no train\.fsdp stage 'trian'; there are: train"):
        call(stage="trian")
    with pytest.raises(UsageError, match=r"no stage of this flow is a train\.fsdp"):
        call("embeddings", overrides=["source=somewhere"])
    with pytest.raises(UsageError, match="--kill-at and --every exclude each other"):
        call(kill_at=[3], every=True)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_difference_is_shown_and_is_the_exit_code(monkeypatch, capsys, as_json: bool) -> None:
    told = {}

    def experiment(parameters, **options):
        told.update(options)
        return REPORT

    monkeypatch.setattr(verify_resume, "stage_inputs", lambda *args, **kwargs: {"dataset": (Path("data"), "digest")})
    monkeypatch.setattr(verify_resume, "_load", lambda dotted: experiment)
    assert call(as_json=as_json) == 1
    assert told["resources"].workers == 2
    out = capsys.readouterr().out
    if as_json:
        assert '"killed_at": 7' in out
        return
    assert "bit-equal" in out
    assert "same rows, losses and state within 0.001" in out
    assert "rng: x" in out
