"""A training under torchrun, without Ray: the same commits as any other launcher makes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rank_functions import train_recorded

from converters.starting_weights import open_weights
from pipeline.artifacts.store import open_store
from pipeline.errors import ParameterError, StageError
from pipeline.training.checkpoints.commit import find_resumable
from pipeline.training.launch.launched import LineReporter, read_job, run_job

JOB = """\
dataset: {dataset}
workspace: workspace
model: tiny.json
steps: 6
global_batch_tokens: 128
micro_batch_sequences: 2
learning_rate: 1.0e-2
warmup_steps: 2
checkpoint_every_steps: 3
validate_every_steps: 3
validation_sequences: 7
log_every_steps: 1
"""
WORLD_TOLERANCE = 5e-5
"""Relative; float32 sums in another order. Measured: 4e-6 after 6 steps."""


@pytest.fixture
def job_file(token_rows: Path, tmp_path: Path, make_job) -> Path:
    (tmp_path / "tiny.json").write_text(json.dumps(make_job().config.model))
    file = tmp_path / "job.yaml"
    file.write_text(JOB.format(dataset=token_rows))
    return file


def lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_torchrun_trains_what_one_rank_trains(job_file: Path, make_job, one_rank) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*command, "-m", "pipeline.training", str(job_file)],
        capture_output=True,
        text=True,
        timeout=180,
        env=environment,
        cwd=job_file.parent,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = lines(done.stdout)
    assert said[0]["text"].startswith("rank 0 of 2 by torchrun, on cpu")
    losses = [line["values"]["loss"] for line in said if line["kind"] == "metrics" and "loss" in line["values"]]
    _, alone = train_recorded(one_rank, make_job(workspace=job_file.parent / "alone"))
    assert losses == pytest.approx(list(alone.series("loss").values()), rel=WORLD_TOLERANCE)
    found = find_resumable(open_store(str(job_file.parent / "workspace")))
    assert [commit.key.step for commit in found.commits] == [6, 3]
    assert {commit.world_size for commit in found.commits} == {2}


def test_no_launcher_is_one_rank_and_a_second_start_has_nothing_to_do(job_file: Path, capsys) -> None:
    first = run_job(job_file, environment={}, stream=sys.stdout, open_weights=open_weights)
    again = run_job(job_file, environment={}, stream=sys.stdout, open_weights=open_weights)
    assert (first.state.step, first.resumed_from_step, again.resumed_from_step) == (6, 0, 6)
    said = lines(capsys.readouterr().out)
    assert said[0]["text"].startswith("rank 0 of 1 by no launcher, on cpu")
    assert any("resumed from the checkpoint of step 6" in line.get("text", "") for line in said)


def test_every_problem_of_a_job_file_is_told_at_once(job_file: Path) -> None:
    job_file.write_text(
        "dataset: d\nmodel: tiny.json\nstep: 5\nlearning_rate: fast\nmicro_batch_sequences: 0\n"
        "keep_checkpoints: 0\ndevice: gpu\n"
    )
    with pytest.raises(ParameterError) as caught:
        read_job(job_file)
    told = str(caught.value)
    assert "step: unknown field; did you mean 'steps'?" in told
    assert "learning_rate: Input should be a valid number" in told
    assert "workspace: missing" in told
    assert "micro_batch_sequences: Input should be greater than or equal to 1" in told
    assert "keep_checkpoints: Input should be greater than or equal to 1" in told
    assert "device: Input should be 'auto', 'cpu' or 'cuda', found 'gpu'" in told
    assert "steps: missing" in told
    for text, found in (("- 1\n", "must be a mapping"), ("a: [", "cannot be read as YAML")):
        job_file.write_text(text)
        with pytest.raises(ParameterError, match=found):
            read_job(job_file)
    with pytest.raises(ParameterError, match="cannot be read"):
        read_job(job_file.parent / "none.yaml")


def test_what_a_rank_raises_names_the_rank_of_its_launcher(job_file: Path, monkeypatch) -> None:
    def fail(*given, **named):
        raise ValueError("a bug")

    monkeypatch.setattr("pipeline.training.launch.launched.train", fail)
    monkeypatch.setattr("pipeline.training.launch.launched.met", lambda worker, **named: (worker, "alone"))
    place = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    with pytest.raises(StageError, match="rank 1: ValueError: a bug"):
        run_job(job_file, environment=place, stream=sys.stdout, open_weights=open_weights)


def test_a_schedule_that_does_not_fit_is_refused(job_file: Path) -> None:
    job_file.write_text(job_file.read_text() + "decay_steps: 3\n")
    with pytest.raises(ParameterError, match="decay_steps: 3 is for schedule: wsd"):
        run_job(job_file, environment={}, stream=sys.stdout, open_weights=open_weights)


def test_a_report_is_a_line(capsys) -> None:
    reporter = LineReporter(sys.stdout)
    reporter.metrics({"loss": 1.5}, step=3)
    reporter.progress(1, total=2, unit="steps")
    reporter.note("hello")
    assert [line["kind"] for line in lines(capsys.readouterr().out)] == ["metrics", "progress", "note"]


def test_a_job_takes_weights_and_config_from_where_initial_says(job_file: Path) -> None:
    first = run_job(job_file, environment={}, stream=sys.stdout, open_weights=open_weights)
    further = job_file.read_text().replace("model: tiny.json", f"initial: workspace/{first.commit.key.prefix}")
    job_file.write_text(further.replace("workspace: workspace", "workspace: second"))
    second = run_job(job_file, environment={}, stream=sys.stdout, open_weights=open_weights)
    assert second.state.initial_validation_loss == pytest.approx(first.state.validation_loss, rel=WORLD_TOLERANCE)
    assert second.state.identity["initial"].startswith("sketch:")
    job_file.write_text(job_file.read_text() + "lora: {rank: 2}\n")
    with pytest.raises(ParameterError, match="a job file has none"):
        run_job(job_file, environment={}, stream=sys.stdout, open_weights=open_weights)
