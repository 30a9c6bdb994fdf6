"""The loop on one rank: what it reports, what it refuses, and what it resumes from."""

import functools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SEQUENCE_LENGTH, TINY_MODEL
from rank_functions import Recorder, StoppedError, StoppingRows, stored_tensors, train_recorded
from torch._dynamo.utils import counters

from pipeline.artifacts.store import open_store
from pipeline.data.packed import PackedDataset
from pipeline.errors import CheckpointError, ParameterError, StageError
from pipeline.training.checkpoints.commit import find_resumable
from pipeline.training.loop import train
from pipeline.training.session import open_session
from pipeline.training.tasks.loss import loss_sum, to_device, validation_loss
from pipeline.training.tasks.model import build_model, model_config
from pipeline.training.worker import joined

FLOAT32_TOLERANCE = 2e-5
"""Relative; the order of float32 sums differs between cuts of a batch. Measured: up to 3e-6 after 6 steps."""
COMPILED_TOLERANCE = 1e-4
"""Relative; fused kernels round otherwise. Holds after 3 steps at a learning rate of 1e-2."""


def test_the_loss_falls_and_every_metric_has_its_step(make_job, one_rank) -> None:
    result, record = train_recorded(one_rank, make_job(steps=12))
    losses = record.series("loss")
    assert sorted(losses) == list(range(1, 13))
    assert losses[1] == pytest.approx(math.log(320), rel=0.05)  # untrained: uniform over the vocabulary
    assert losses[12] < losses[1] - 0.5
    assert sorted(record.series("validation_loss")) == [0, 3, 6, 9, 12]
    assert set(record.series("initial_validation_loss")) == {0}
    for name in ("learning_rate", "gradient_norm", "tokens_per_second"):
        assert sorted(record.series(name)) == list(range(1, 13))
    assert "mfu" not in record.values[-2][1]  # no peak is known for a CPU
    assert record.progressed[0][0] == 0
    assert record.progressed[-1][0] == 12
    assert "tokens/s" in record.progressed[-1][1]
    assert result.state.step == 12
    assert result.state.units == 12 * 8 * SEQUENCE_LENGTH
    assert result.state.validation_loss < result.state.initial_validation_loss
    assert result.resumed_from_step == 0
    assert result.units_per_second > 0


def test_a_checkpoint_holds_what_the_next_stages_read(make_job, one_rank, tmp_path: Path, token_rows: Path) -> None:
    result, _ = train_recorded(one_rank, make_job())
    directory = tmp_path / "workspace" / result.commit.key.prefix
    config = json.loads((directory / "config.json").read_text())
    state = json.loads((directory / "state.json").read_text())
    tensors = stored_tensors(tmp_path / "workspace", result.commit)
    assert config["model_type"] == "llama"
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (directory / "tokenizer.json").read_bytes() == (token_rows / "tokenizer.json").read_bytes()
    assert (state["step"], state["world_size"], state["seed"]) == (6, 1, 0)
    assert tensors["model/model.embed_tokens.weight"].shape == (320, 32)
    assert "model/lm_head.weight" not in tensors  # tied: one stored tensor
    assert any(name.startswith("optimizer/state/model.embed_tokens.weight") for name in tensors)
    committed = {entry.path for entry in result.commit.files}
    present = {item.relative_to(directory).as_posix() for item in directory.rglob("*") if item.is_file()}
    assert present - committed == {"COMMIT.json", "vote-0.json"}


def test_only_the_asked_number_of_checkpoints_is_kept(make_job, one_rank, tmp_path: Path) -> None:
    train_recorded(one_rank, make_job(steps=12, keep_checkpoints=2))
    found = find_resumable(open_store(str(tmp_path / "workspace")))
    assert [item.key.step for item in found.commits] == [12, 9]


def test_finished_training_is_not_repeated(make_job, one_rank) -> None:
    first, _ = train_recorded(one_rank, make_job())
    again, record = train_recorded(one_rank, make_job())
    assert again.resumed_from_step == 6
    assert again.commit == first.commit
    assert again.state == first.state
    assert record.series("loss") == {}


def test_accumulation_does_not_change_the_training(make_job, one_rank, tmp_path: Path) -> None:
    whole, whole_record = train_recorded(one_rank, make_job(micro_batch_sequences=8, workspace=tmp_path / "a"))
    parts, parts_record = train_recorded(one_rank, make_job(micro_batch_sequences=1, workspace=tmp_path / "b"))
    assert whole.state.validation_loss == pytest.approx(parts.state.validation_loss, rel=FLOAT32_TOLERANCE)
    assert list(whole_record.series("loss").values()) == pytest.approx(
        list(parts_record.series("loss").values()), rel=FLOAT32_TOLERANCE
    )


def test_recomputing_activations_does_not_change_the_training(make_job, one_rank, tmp_path: Path) -> None:
    model = TINY_MODEL | {"attention_dropout": 0.1}
    plain, _ = train_recorded(one_rank, make_job(model=model, workspace=tmp_path / "a"))
    recomputed, _ = train_recorded(
        one_rank, make_job(model=model, activation_checkpointing="full", workspace=tmp_path / "b")
    )
    ours, theirs = stored_tensors(tmp_path / "a", plain.commit), stored_tensors(tmp_path / "b", recomputed.commit)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours if name.startswith("model/"))


def test_the_validation_loss_is_the_mean_over_the_chosen_rows(make_job, one_rank, token_rows: Path) -> None:
    dataset = PackedDataset.open(token_rows)
    num_rows = dataset.num_rows("validation")
    chosen = np.linspace(0, num_rows - 1, 7).round().astype(np.int64)
    model = build_model(model_config(TINY_MODEL), seed=0)
    inputs, targets = to_device(dataset.rows("validation", chosen), one_rank)
    with torch.no_grad():
        expected = float(loss_sum(model, inputs, targets)) / targets.numel()
    with joined(one_rank):
        found = [validation_loss(model, dataset, one_rank, max_rows=7, micro_batch_rows=size) for size in (1, 4, 7, 9)]
    assert found == pytest.approx([expected] * 4, rel=FLOAT32_TOLERANCE)


def test_a_loss_that_is_not_finite_stops_and_names_the_step(make_job, one_rank, tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"step \d+ of 6: the gradient norm is (nan|inf)") as caught:
        train(one_rank, make_job(learning_rate=1e30, warmup_steps=0), reporter=Recorder())
    assert caught.value.exit_code == 1
    assert "learning_rate" in caught.value.hint


def interrupt(make_job, one_rank, token_rows: Path, *, step: int = 4, **fields) -> None:
    stopping = functools.partial(StoppingRows, token_rows, stop_at=step)
    with pytest.raises(StoppedError):
        train(one_rank, make_job(open_dataset=stopping, **fields), reporter=Recorder())


def test_interrupted_training_resumes_bit_for_bit(make_job, one_rank, token_rows: Path, tmp_path: Path) -> None:
    model = TINY_MODEL | {"attention_dropout": 0.1}
    straight, straight_record = train_recorded(one_rank, make_job(model=model, workspace=tmp_path / "straight"))
    interrupt(make_job, one_rank, token_rows, model=model)
    resumed, record = train_recorded(one_rank, make_job(model=model))
    assert resumed.resumed_from_step == 3
    assert "resumed from the checkpoint of step 3" in record.notes
    expected = {step: loss for step, loss in straight_record.series("loss").items() if step > 3}
    assert record.series("loss") == expected
    ours = stored_tensors(tmp_path / "workspace", resumed.commit)
    theirs = stored_tensors(tmp_path / "straight", straight.commit)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        same = torch.equal(value, theirs[name]) if isinstance(value, torch.Tensor) else value == theirs[name]
        assert same, name


def damage_newest(workspace: Path) -> str:
    newest = find_resumable(open_store(str(workspace))).commits[0]
    path = workspace / newest.key.prefix / "dcp" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return newest.key.prefix


def test_an_altered_checkpoint_is_passed_over_with_a_note(make_job, one_rank, token_rows: Path, tmp_path: Path) -> None:
    interrupt(make_job, one_rank, token_rows, step=10, steps=12)
    damaged = damage_newest(tmp_path / "workspace")
    assert "step-00000009" in damaged
    result, record = train_recorded(one_rank, make_job(steps=12))
    assert result.resumed_from_step == 6
    assert any(damaged in note and "was altered" in note for note in record.notes)
    assert result.state.step == 12


def test_training_never_starts_over_where_no_checkpoint_can_be_read(
    make_job, one_rank, token_rows: Path, tmp_path: Path
) -> None:
    interrupt(make_job, one_rank, token_rows)
    before = damage_newest(tmp_path / "workspace")
    with pytest.raises(CheckpointError, match="checkpoints exist but none can be loaded") as caught:
        train(one_rank, make_job(), reporter=Recorder())
    assert before in caught.value.message
    assert "does not silently start over" in caught.value.hint
    assert (tmp_path / "workspace" / before / "COMMIT.json").exists()


def test_a_schedule_is_not_continued_with_another_horizon(make_job, one_rank, token_rows: Path) -> None:
    interrupt(make_job, one_rank, token_rows)
    with pytest.raises(CheckpointError, match="steps: 6 then, 9 now"):
        train(one_rank, make_job(steps=9), reporter=Recorder())


class OtherRows(StoppingRows):
    """As if the files had changed."""

    digest = "ab" * 32


def test_training_does_not_go_on_with_another_dataset(make_job, one_rank, token_rows: Path) -> None:
    interrupt(make_job, one_rank, token_rows)
    other = functools.partial(OtherRows, token_rows, stop_at=99)
    with pytest.raises(
        CheckpointError, match=r"written by a run with other parameters: dataset: '\w+' then, '(ab){32}'"
    ):
        train(one_rank, make_job(open_dataset=other), reporter=Recorder())


def test_checkpoints_that_vanish_while_training_is_set_up_are_no_start_from_nothing(
    make_job, one_rank, token_rows: Path, tmp_path: Path
) -> None:
    interrupt(make_job, one_rank, token_rows)
    with joined(one_rank):
        session = open_session(one_rank, make_job())
        shutil.rmtree(tmp_path / "workspace" / "checkpoints")
        with pytest.raises(CheckpointError, match="that were there when training was set up are gone"):
            session.checkpointer.resume(Recorder(), identity=session.identity)


def test_checkpoints_live_on_remote_stores_too(make_job, one_rank, token_rows: Path, tmp_path: Path) -> None:
    workspace = f"memory://loop-test-{tmp_path.name}"
    interrupt(make_job, one_rank, token_rows, workspace=workspace)
    result, _ = train_recorded(one_rank, make_job(workspace=workspace))
    straight, _ = train_recorded(one_rank, make_job(workspace=tmp_path / "straight"))
    assert result.resumed_from_step == 3
    assert not list(open_store(workspace)._cache.glob("checkpoints/*/*"))  # a copy takes space until it is loaded
    assert result.state.train_loss == straight.state.train_loss
    assert result.state.validation_loss == straight.state.validation_loss


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"global_batch_tokens": 100}, "global_batch_tokens 100 is no multiple"),
        ({"precision": "bfloat16"}, "bfloat16 needs CUDA"),
        ({"model": TINY_MODEL | {"vocab_size": 200}}, "the model's vocab_size is 200"),
        ({"model": TINY_MODEL | {"max_position_embeddings": 8}}, "max_position_embeddings is 8"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    make_job, one_rank, tmp_path: Path, fields, found: str
) -> None:
    with joined(one_rank), pytest.raises(ParameterError, match=found):
        open_session(one_rank, make_job(**fields))
    assert not (tmp_path / "workspace").exists()


class CountingGraphs(Recorder):
    """Keeps how many graphs torch had compiled after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs: dict[int | None, int] = {}

    def metrics(self, values: Any, *, step: int | None = None) -> None:
        if step:
            self.graphs[step] = counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_compiled_and_recomputed_blocks_train_the_same(make_job, one_rank, tmp_path: Path) -> None:
    plain, _ = train_recorded(one_rank, make_job(steps=3, workspace=tmp_path / "a"))
    recorder = CountingGraphs()
    compiled = train(
        one_rank,
        make_job(steps=3, compile=True, activation_checkpointing="full", workspace=tmp_path / "b"),
        reporter=recorder,
    )
    assert recorder.graphs[1] > 0
    assert len(set(recorder.graphs.values())) == 1, recorder.graphs  # nothing is compiled after the first step
    assert compiled.state.validation_loss == pytest.approx(plain.state.validation_loss, rel=COMPILED_TOLERANCE)
