"""What a flow's deployments take of a cluster together."""

import json

import pytest

from pipeline.cli.main import main
from pipeline.cluster.capacity import Capacity
from pipeline.execution.demand import serving_plan, why_impossible
from pipeline.plan.graph import open_flow_text

ONE_GPU = Capacity(cpus=8, gpus=1, memory_bytes=2**36, source="this machine")
HEAD = """
flow: sharing
stages:
  weights:
    uses: import.checkpoint
    with: {source: weights}
  flax:
    uses: convert.flax
    with: {checkpoint: "${stages.weights.outputs.checkpoint}"}
"""
DEPLOYMENT = """
  NAME:
    uses: deploy.serve
    with: {model: "${stages.flax.outputs.model}", name: NAME, SETTINGS}
    resources: {RESOURCES}
"""


def flow_text(*deployments):
    text = HEAD
    for name, settings, resources in deployments:
        text += DEPLOYMENT.replace("NAME", name).replace("SETTINGS", settings).replace("RESOURCES", resources)
    return text


def stages_of(tmp_path, *deployments):
    return open_flow_text(flow_text(*deployments), file=tmp_path / "flow.yaml").stages


def test_deployments_that_leave_everything_open_share_the_one_gpu(tmp_path):
    stages = stages_of(tmp_path, ("a", "slots: 2", "cpus: 1"), ("b", "slots: 2", "cpus: 1"))
    (process,) = serving_plan(stages, ONE_GPU).processes
    assert process.deployments == ("a", "b") and process.share == 0.5
    assert why_impossible(stages, ONE_GPU) == []


def test_a_mesh_and_autoscaling_mean_a_process_of_their_own(tmp_path):
    for setting in ("mesh: {data: 2}", "autoscaling: {max_replicas: 2}"):
        stages = stages_of(tmp_path, ("a", setting, "gpus: 0.25"), ("b", "slots: 2", "cpus: 1"))
        assert [process.deployments for process in serving_plan(stages, ONE_GPU).processes] == [("a",), ("b",)]


def test_processes_that_oversubscribe_the_gpu_are_refused_together(tmp_path):
    apart = [(name, "isolation: process", "gpus: 0.5") for name in ("a", "b", "c")]
    assert why_impossible(stages_of(tmp_path, *apart[:2]), ONE_GPU) == []
    assert why_impossible(stages_of(tmp_path, *apart), ONE_GPU) == [
        "GPUs are oversubscribed: 'a' 0.5 + 'b' 0.5 + 'c' 0.5: 1.5 together; this machine has 1 GPU"
    ]


def test_what_no_cluster_can_give_is_refused_where_a_flow_is_validated(
    tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text("{}")
    flow = tmp_path / "flow.yaml"

    def validate(*deployments):
        flow.write_text(flow_text(*deployments))
        monkeypatch.setattr("sys.argv", ["pipeline", "validate", str(flow)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, capsys.readouterr().err

    assert validate(("a", "isolation: shared", "gpus: 0.5"), ("b", "slots: 2", "gpus: 2"))[0] == 0
    code, said = validate(("a", "isolation: shared", "gpus: 2"), ("b", "slots: 2", "gpus: 1.5"))
    assert code == 2
    assert "flow.yaml:19:" in said and "gpus: 1.5 is neither a part of one device" in said
    assert "'a': isolation: shared does not go with gpus: 2" in said


def test_a_stage_too_large_by_itself_is_told_once(tmp_path):
    (line,) = why_impossible(stages_of(tmp_path, ("a", "slots: 2", "gpus: 2")), ONE_GPU)
    assert line == "stage 'a' asks for 2 GPUs at once; this machine has 1"


def test_the_plan_shows_who_shares_and_ends_with_2_where_that_cannot_be(
    tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text("{}")
    flow = tmp_path / "flow.yaml"

    def plan(*deployments):
        flow.write_text(flow_text(*deployments))
        monkeypatch.setattr("sys.argv", ["pipeline", "plan", str(flow), "--store", str(tmp_path / "store"), "--json"])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, json.loads(capsys.readouterr().out)

    code, shown = plan(("a", "slots: 2", "cpus: 1"), ("b", "slots: 2", "cpus: 1"))
    assert code == 0
    assert [(one["deployments"], one["gpus"]) for one in shown["serving"]] == [(["a", "b"], 0.5)]
    code, shown = plan(("a", "isolation: process", "gpus: 0.7"), ("b", "isolation: process", "gpus: 0.7"))
    assert code == 2
    assert "1.4 together; this machine has 1 GPU" in shown["problems"][0]
