"""Meshes that cut the model take the steps of one process, and their checkpoints go on at other axes."""

import functools
from pathlib import Path
from typing import Any

import pytest
from axis_ranks import Taken, take_steps, take_steps_and_resume
from conftest import TINY_MODEL
from rank_functions import StoppingRows, stored_tensors, train_recorded

from pipeline.training.config import MeshSizes, ParameterGroup
from pipeline.training.launch.spawn import spawn

TIMEOUT_SECONDS = 240.0
VALUE_TOLERANCE = 5e-6
"""Relative; float32 sums in another order. Measured over twelve meshes: losses and norms of three steps within 5.3e-7.
A mean taken for a sum, or a tied gradient that is missing, is off by a tenth or more."""
PARAMETER_TOLERANCE = 2e-4
"""Absolute, where three steps of AdamW move a parameter by up to 2e-2: measured 4.7e-5, of elements whose gradient is
near 0 and whose direction is therefore rounding."""
FOUR_BLOCKS = TINY_MODEL | {"num_hidden_layers": 4}
QWEN_UNTIED = FOUR_BLOCKS | {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": False}
FIELDS: dict[str, Any] = {"model": FOUR_BLOCKS, "global_batch_tokens": 16 * 16, "micro_batch_sequences": 2}


def assert_equal(taken: Taken, alone: Taken, *, name: str) -> None:
    assert taken.values == pytest.approx(alone.values, rel=VALUE_TOLERANCE), name
    for key, value in taken.parameters.items():
        assert (value - alone.parameters[key]).abs().max() <= PARAMETER_TOLERANCE, (name, key)


def test_two_ranks_on_every_axis_take_the_steps_of_one(make_job, one_rank, token_rows: Path, tmp_path: Path) -> None:
    meshes = {
        "tensor": MeshSizes(tensor=2),
        "context": MeshSizes(context=2),
        "1f1b": MeshSizes(pipeline=2),
        "interleaved": MeshSizes(pipeline=2, schedule="interleaved"),
    }
    jobs = [make_job(workspace=tmp_path / name, mesh=mesh, **FIELDS) for name, mesh in meshes.items()]
    stopping = functools.partial(StoppingRows, token_rows, stop_at=4)

    def move(first: MeshSizes, second: MeshSizes, name: str):
        workspace = tmp_path / name
        before = make_job(workspace=workspace, mesh=first, open_dataset=stopping, **FIELDS)
        return before, make_job(workspace=workspace, mesh=second, **FIELDS)

    moves = [
        move(MeshSizes(tensor=2), MeshSizes(), "tensor to zero3"),
        move(MeshSizes(), MeshSizes(pipeline=2), "zero3 to pipeline"),
        move(MeshSizes(pipeline=2, schedule="gpipe"), MeshSizes(tensor=2), "pipeline to tensor"),
    ]
    grouped = {"parameter_groups": (ParameterGroup(match="lm_head", learning_rate_ratio=0.1),)}
    jobs.append(make_job(workspace=tmp_path / "group", mesh=MeshSizes(pipeline=2), **FIELDS, **grouped))
    copied = [make_job(mesh=MeshSizes(tensor=2), **FIELDS), make_job(parallel="ddp", **FIELDS)]
    outcomes = spawn(take_steps_and_resume, jobs, moves, copied, world_size=2, timeout_seconds=TIMEOUT_SECONDS)
    references = [make_job(workspace=tmp_path / f"alone {len(more)}", **FIELDS, **more) for more in ({}, grouped)]
    alone, alone_grouped = take_steps(one_rank, references)
    names = set(alone.parameters)
    for rank, ((*taken, tied_in_a_group), *_) in enumerate(outcomes):
        assert_equal(tied_in_a_group, alone_grouped, name=f"a group of the tied head, rank {rank}")
        for name, each in zip(meshes, taken, strict=True):
            assert_equal(each, alone, name=f"{name}, rank {rank}")
    assert set(outcomes[0][0][2].parameters) | set(outcomes[1][0][2].parameters) == names

    straight, record = train_recorded(one_rank, make_job(workspace=tmp_path / "straight", **FIELDS))
    expected = {step: loss for step, loss in record.series("loss").items() if step > 3}
    tensors = stored_tensors(tmp_path / "straight", straight.commit)
    for (before, _), (result, moved_record) in zip(moves, outcomes[0][1], strict=True):
        assert result.resumed_from_step == 3
        assert moved_record.series("loss") == pytest.approx(expected, rel=VALUE_TOLERANCE)
        # The checkpoint does not say on which mesh it was written.
        stored = stored_tensors(before.workspace, result.commit)
        assert {name: value.shape for name, value in stored.items() if hasattr(value, "shape")} == {
            name: value.shape for name, value in tensors.items() if hasattr(value, "shape")
        }

    # A copy that differs in one bit is found, and named, before it is trained on or written.
    for said, num_copied in zip(outcomes[0][2], (9, 38), strict=True):
        assert f"1 of {num_copied} differ over ranks 0, 1 (model.layers.0.input_layernorm.weight)" in said

    # One process goes on from what two ranks with a cut model have committed.
    before, after = moves[0]
    committed = Path(before.workspace, outcomes[0][1][0][0].commit.key.prefix)
    (committed / "COMMIT.json").unlink()
    taken_up, record = train_recorded(one_rank, after)
    assert taken_up.resumed_from_step == 3
    assert record.series("loss") == pytest.approx(expected, rel=VALUE_TOLERANCE)


@pytest.mark.slow
def test_four_ranks_on_two_axes_take_the_steps_of_one(make_job, one_rank, tmp_path: Path) -> None:
    cases: dict[str, dict[str, Any]] = {
        "tensor and zero3": {"mesh": MeshSizes(tensor=2)},
        "tensor and pipeline": {"mesh": MeshSizes(tensor=2, pipeline=2)},
        "tensor and context": {"mesh": MeshSizes(tensor=2, context=2)},
        "context and ddp": {"mesh": MeshSizes(context=2), "parallel": "ddp"},
        "interleaved and ddp": {"mesh": MeshSizes(pipeline=2, schedule="interleaved"), "parallel": "ddp"},
        "four stages": {"mesh": MeshSizes(pipeline=4)},
    }
    untied = FIELDS | {"model": QWEN_UNTIED, "mesh": MeshSizes(tensor=2, pipeline=2, schedule="gpipe")}
    jobs = [make_job(workspace=tmp_path / name, **FIELDS, **fields) for name, fields in cases.items()]
    jobs.append(make_job(workspace=tmp_path / "untied", **untied))
    outcomes = spawn(take_steps, jobs, world_size=4, timeout_seconds=TIMEOUT_SECONDS)
    references = [
        make_job(workspace=tmp_path / "alone", **FIELDS),
        make_job(workspace=tmp_path / "untied alone", **untied | {"mesh": MeshSizes()}),
    ]
    alone, untied_alone = take_steps(one_rank, references)
    for rank, (*taken, last) in enumerate(outcomes):
        for name, each in zip(cases, taken, strict=True):
            assert_equal(each, alone, name=f"{name}, rank {rank}")
        assert_equal(last, untied_alone, name=f"untied, rank {rank}")
