import json
from dataclasses import replace

import pytest

from pipeline.artifacts.commit import Commit, CommittedInput, commit_key
from pipeline.artifacts.store import open_store
from pipeline.errors import GateError, TrackingError
from pipeline.spec.gate import Gate
from pipeline.stages.parameters import RegisterModelParameters
from pipeline.stages.protocol import InputArtifact, Resources, StageContext
from pipeline.stages.register_model import run, why_not_registered
from pipeline.stages.reporting import BufferedReporter
from pipeline.tracking.memory_tracker import MemoryRegistry, NoRegistry

PARITY = {"max_abs_logit_difference": 1.2e-5, "greedy_match": 1.0}


def artifact(stage, output, tmp_path, *, metrics=None, gates=(), run_id="run-0"):
    metrics = metrics or {}
    return InputArtifact(
        stage=stage,
        output=output,
        path=tmp_path / stage / output,
        fingerprint=f"fingerprint-of-{stage}",
        digest=f"digest-of-{stage}",
        run_id=run_id,
        metrics=metrics,
        gates=tuple(Gate.parse(name, condition).judge(metrics) for name, condition in gates),
    )


@pytest.fixture
def registry():
    return MemoryRegistry()


@pytest.fixture
def context(tmp_path, registry):
    evidence = ["${stages.parity.outputs.report}", "${stages.quality.outputs.report}"]
    return StageContext(
        run_id="run-1",
        flow="llm",
        stage="register",
        attempt=1,
        fingerprint="fingerprint-of-register",
        parameters=RegisterModelParameters(
            model="${stages.flax.outputs.model}", evidence=evidence, name="stdlib-llama", alias="champion"
        ),
        inputs={
            "model": artifact("flax", "model", tmp_path),
            "evidence.0": artifact(
                "parity", "report", tmp_path, metrics=PARITY, gates=[("max_abs_logit_difference", "<= 1e-3")]
            ),
            "evidence.1": artifact(
                "quality", "report", tmp_path, metrics={"validation_loss": 3.2}, gates=[("validation_loss", "<= 5.5")]
            ),
        },
        output_root=tmp_path / "out",
        workspace=str(tmp_path / "work"),
        project_root=tmp_path,
        resources=Resources(),
        reporter=BufferedReporter(),
        deadline=None,
        registry=registry,
    )


def test_a_version_carries_runs_digests_gates_and_metrics(context, registry, tmp_path):
    result = run(context)
    (made,) = registry.versions
    assert made.source == str(tmp_path / "flax" / "model")
    expected = {
        "pipeline.run_id": "run-1",
        "pipeline.flow": "llm",
        "pipeline.fingerprint": "fingerprint-of-register",
        "model.digest": "digest-of-flax",
        "model.run_id": "run-0",
        "lineage.parity.report.digest": "digest-of-parity",
        "lineage.quality.run_id": "run-0",
        "gate.max_abs_logit_difference": "1.2e-05 <= 0.001 holds",
        "gate.validation_loss": "3.2 <= 5.5 holds",
        "metric.parity.greedy_match": "1",
    }
    assert {key: made.tags.get(key) for key in expected} == expected
    assert result.metrics == {"version": 1.0}
    assert result.facts == {
        "name": "stdlib-llama",
        "version": "1",
        "alias": "champion",
        "uri": "models:/stdlib-llama/1",
    }
    assert registry.aliases == {("stdlib-llama", "champion"): "1"}
    assert "validation_loss = 3.2 holds <= 5.5" in made.description


def test_the_registration_is_written_as_an_artifact(context, tmp_path):
    run(context)
    written = json.loads((tmp_path / "out" / "registration" / "registration.json").read_text())
    assert (written["name"], written["version"], written["alias"]) == ("stdlib-llama", "1", "champion")
    assert written["tags"]["model.digest"] == "digest-of-flax"


@pytest.mark.parametrize("metrics", [{"validation_loss": 9.0}, {"validation_loss": float("nan")}, {}])
def test_evidence_whose_gate_does_not_hold_registers_nothing(context, registry, tmp_path, metrics):
    bad = artifact("quality", "report", tmp_path, metrics=metrics, gates=[("validation_loss", "<= 5.5")])
    with pytest.raises(GateError, match="quality: validation_loss"):
        run(replace(context, inputs={**context.inputs, "evidence.1": bad}))
    assert registry.versions == []
    assert registry.aliases == {}


def test_every_failed_gate_is_listed(context, tmp_path):
    bad = [
        artifact(stage, "report", tmp_path, metrics={}, gates=[("validation_loss", "<= 1")]) for stage in ("one", "two")
    ]
    with pytest.raises(GateError, match=r"2 of the gates.*one:.*two:"):
        run(replace(context, inputs={**context.inputs, "evidence.0": bad[0], "evidence.1": bad[1]}))


def test_gates_on_the_same_metric_are_told_apart_by_stage(context, registry, tmp_path):
    same = artifact("parity", "report", tmp_path, metrics={"validation_loss": 3.0}, gates=[("validation_loss", "< 4")])
    run(replace(context, inputs={**context.inputs, "evidence.0": same}))
    (made,) = registry.versions
    assert made.tags["gate.parity.validation_loss"] == "3 < 4 holds"
    assert made.tags["gate.quality.validation_loss"] == "3.2 <= 5.5 holds"


def test_lineage_reaches_back_to_the_data_through_the_store(context, registry, tmp_path):
    url = str(tmp_path / "store")
    store = open_store(url)
    chain = {"flax": ("train", "checkpoint"), "train": ("data", "dataset"), "data": None}
    for stage, parent in chain.items():
        inputs = {}
        if parent:
            inputs["x"] = CommittedInput(
                stage=parent[0], output=parent[1], fingerprint=f"fingerprint-of-{parent[0]}", digest=f"d-{parent[0]}"
            )
        commit = Commit(
            fingerprint=f"fingerprint-of-{stage}",
            attempt_key=f"artifacts/fingerprint-of-{stage}/a",
            kind="k",
            stage=stage,
            flow="llm",
            run_id=f"run-of-{stage}",
            created_at=0.0,
            outputs={},
            inputs=inputs,
        )
        store.write(commit_key(commit.fingerprint), commit.to_json())
    run(replace(context, environment={"store": url}))
    (made,) = registry.versions
    assert made.tags["lineage.train.checkpoint.digest"] == "d-train"
    assert made.tags["lineage.data.dataset.digest"] == "d-data"
    assert made.tags["lineage.data.run_id"] == "run-of-data"


def test_a_repeated_attempt_makes_no_second_version(context, registry):
    run(context)
    run(replace(context, attempt=2))
    assert len(registry.versions) == 1


def test_the_second_model_moves_the_alias(context, registry):
    run(context)
    result = run(replace(context, fingerprint="another"))
    assert result.metrics == {"version": 2.0}
    assert [(move["from"], move["to"]) for move in registry.moves] == [(None, "1"), ("1", "2")]


@pytest.mark.parametrize("registry_given", [None, NoRegistry()])
def test_without_a_registry_the_stage_says_so(context, registry_given):
    with pytest.raises(TrackingError):
        run(replace(context, registry=registry_given))


def committed(name="llm", version="1"):
    return Commit(
        fingerprint="f",
        attempt_key="artifacts/f/run-1",
        kind="register.model",
        stage="register",
        flow="llm",
        run_id="run",
        created_at=0.0,
        outputs={},
        facts={"name": name, "version": version},
    )


def test_a_registration_holds_while_the_registry_has_the_version(registry):
    version = registry.register(name="llm", source="model", tags={}, alias=None, description="")
    assert why_not_registered(committed(version=version.version), {}, registry) is None
    assert why_not_registered(committed(version="7"), {}, registry) == "the registry has no version 7 of 'llm' any more"


@pytest.mark.parametrize("registry", [None, NoRegistry()])
def test_a_registry_that_cannot_be_asked_speaks_against_nothing(registry):
    assert why_not_registered(committed(), {}, registry) is None
