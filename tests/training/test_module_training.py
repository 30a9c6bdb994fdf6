"""A module of the user's own trains on arrays, resumes bit for bit, and is refused where it cannot train."""

import functools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rank_functions import StoppingRows, module_ranks, stored_tensors, train_recorded
from torch import nn
from trained_modules import Network

from converters.starting_weights import open_weights
from pipeline.data.array_writing import ArrayPlan, write_arrays
from pipeline.data.arrays import ArrayDataset
from pipeline.errors import CheckpointError, ParameterError
from pipeline.models.module_file import InputSpec, ModuleFile
from pipeline.training.config import TrainConfig, plan_batch
from pipeline.training.failure import as_pipeline_error
from pipeline.training.launch.spawn import spawn
from pipeline.training.session import TrainJob
from pipeline.training.tasks.module_factory import check_module
from pipeline.training.tasks.module_task import module_blocks

HERE = str(Path(__file__).parent)
FLOAT32_TOLERANCE = 2e-5
"""Relative; sums over ranks and over micro-batches are taken in another order. Measured: 2e-6."""


def write(directory: Path, arrays, *, target: str = "labels") -> Path:
    plan = ArrayPlan(target=target, validation_fraction=0.25, max_examples=None, shard_examples=40, seed=0)
    write_arrays(arrays, directory, plan=plan, source={})
    return directory


@pytest.fixture(scope="session")
def images(tmp_path_factory) -> Path:
    """Three classes that a small network can tell apart: where the bright row is."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, size=120)
    pixels = rng.normal(size=(120, 1, 3, 4)).astype(np.float32)
    pixels[np.arange(120), 0, labels] += 2.0
    arrays = {"pixels": pixels, "weight": np.ones(120, np.float32), "labels": labels}
    return write(tmp_path_factory.mktemp("images"), arrays)


@pytest.fixture(scope="session")
def values(tmp_path_factory) -> Path:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(80, 3))
    return write(tmp_path_factory.mktemp("values"), {"x": x, "y": x[:, :2] * 2 + 1}, target="y")


@pytest.fixture
def make_job(images: Path, tmp_path: Path):
    def make(*, dataset: Path = images, workspace: Path | None = None, open_dataset=None, **fields) -> TrainJob:
        given = {
            "model": "trained_modules:make",
            "model_arguments": {"width": 5},
            "steps": 6,
            "global_batch_examples": 16,
            "micro_batch_sequences": 4,
            "learning_rate": 2e-2,
            "warmup_steps": 2,
            "checkpoint_every_steps": 3,
            "validate_every_steps": 3,
            "validation_sequences": 30,
            "log_every_steps": 1,
        }
        return TrainJob(
            config=TrainConfig(**(given | fields)),
            workspace=str(workspace or tmp_path / "workspace"),
            open_dataset=open_dataset or functools.partial(ArrayDataset.open, dataset),
            project_root=HERE,
        )

    return make


def test_a_classifier_learns_and_says_how_many_it_gets_right(make_job, one_rank, tmp_path: Path) -> None:
    result, record = train_recorded(one_rank, make_job(steps=30, validate_every_steps=10, checkpoint_every_steps=30))
    assert record.series("validation_loss")[0] == pytest.approx(math.log(3), rel=0.2)
    assert result.state.validation["validation_accuracy"] >= 0.9
    assert sorted(record.series("validation_accuracy")) == [0, 10, 20, 30]
    assert sorted(record.series("examples_per_second")) == list(range(1, 31))
    assert "examples/s" in record.progressed[-1][1]
    assert (result.unit, result.state.units) == ("example", 30 * 16)
    directory = tmp_path / "workspace" / result.commit.key.prefix
    assert {path.name for path in directory.iterdir()} >= {"module.json", "state.json", "dcp"}
    assert not (directory / "config.json").exists()
    assert ModuleFile.read(directory) == ModuleFile(
        factory="trained_modules:make",
        arguments={"width": 5},
        inputs={
            "pixels": InputSpec(shape=("batch", 1, 3, 4), dtype="float32"),
            "weight": InputSpec(shape=("batch",), dtype="float32"),
        },
    )


def test_what_is_saved_predicts_what_training_measured(make_job, one_rank, images: Path, tmp_path: Path) -> None:
    result, _ = train_recorded(one_rank, make_job())
    tensors = stored_tensors(tmp_path / "workspace", result.commit)
    model = Network(5).eval()
    model.load_state_dict({name.removeprefix("model/"): t for name, t in tensors.items() if name.startswith("model/")})
    rows = ArrayDataset.open(images).rows("validation", np.arange(30))
    with torch.no_grad():
        logits = model(torch.from_numpy(rows["pixels"]), torch.from_numpy(rows["weight"]))["logits"]
        loss = nn.functional.cross_entropy(logits, torch.from_numpy(rows["labels"]))
    assert result.state.validation_loss == pytest.approx(float(loss), rel=FLOAT32_TOLERANCE)
    right = (logits.argmax(1).numpy() == rows["labels"]).mean()
    assert result.state.validation["validation_accuracy"] == pytest.approx(right)
    # Running statistics moved away from where they start, and are in the checkpoint.
    assert tensors["model/blocks.0.1.running_mean"].abs().max() > 0
    assert int(tensors["model/blocks.0.1.num_batches_tracked"]) == 6 * 4


def test_values_are_fitted_by_squares(make_job, one_rank, values: Path) -> None:
    job = make_job(
        dataset=values,
        model="trained_modules:make_line",
        model_arguments={},
        loss="mean_squared_error",
        steps=150,
        learning_rate=5e-2,
        checkpoint_every_steps=150,
        validate_every_steps=150,
        log_every_steps=75,
    )
    result, record = train_recorded(one_rank, job)
    assert result.state.validation_loss < 0.2 * result.state.initial_validation_loss
    assert "validation_accuracy" not in result.state.validation
    assert record.series("loss")[150] < record.series("loss")[1]


def test_a_block_that_is_not_called_is_explained(make_job, one_rank, values: Path) -> None:
    job = make_job(dataset=values, model="trained_modules:make_reaching", model_arguments={}, loss="mean_squared_error")
    with pytest.raises(RuntimeError) as caught:
        train_recorded(one_rank, job)
    assert "without calling that child" in as_pipeline_error(caught.value, rank=0).hint


def test_accumulation_changes_nothing_where_rows_do_not_see_each_other(
    make_job, one_rank, values: Path, tmp_path: Path
) -> None:
    job = functools.partial(
        make_job, dataset=values, model="trained_modules:make_line", model_arguments={}, loss="mean_squared_error"
    )
    whole, _ = train_recorded(one_rank, job(micro_batch_sequences=16, workspace=tmp_path / "a"))
    parts, _ = train_recorded(one_rank, job(micro_batch_sequences=2, workspace=tmp_path / "b"))
    assert whole.state.validation_loss == pytest.approx(parts.state.validation_loss, rel=FLOAT32_TOLERANCE)


def test_two_ranks_resume_bit_for_bit_and_agree_on_buffers(make_job, images: Path, tmp_path: Path) -> None:
    stopping = functools.partial(StoppingRows, images, stop_at=4, opened=ArrayDataset)
    ranks = spawn(
        module_ranks,
        make_job(workspace=tmp_path / "straight"),
        make_job(workspace=tmp_path / "again", open_dataset=stopping),
        make_job(workspace=tmp_path / "again"),
        world_size=2,
        timeout_seconds=120,
    )
    straight, straight_record, resumed, record, _ = ranks[0][0]
    assert resumed.resumed_from_step == 3
    expected = {step: loss for step, loss in straight_record.series("loss").items() if step > 3}
    assert record.series("loss") == expected
    ours = stored_tensors(tmp_path / "again", resumed.commit)
    theirs = stored_tensors(tmp_path / "straight", straight.commit)
    assert ours.keys() == theirs.keys()
    assert "model/blocks.1.1.running_var" in ours
    for name, value in ours.items():
        same = torch.equal(value, theirs[name]) if isinstance(value, torch.Tensor) else value == theirs[name]
        assert same, name

    # Statistics are the mean of what the ranks saw; any other buffer is the first rank's.
    before, after = [rank[1] for rank in ranks], [rank[2] for rank in ranks]
    assert before[0]["blocks.0.1.running_mean"] != before[1]["blocks.0.1.running_mean"]
    assert after[0] == after[1]
    for name in ("blocks.0.1.running_mean", "blocks.1.1.running_var"):
        mean = (np.array(before[0][name]) + np.array(before[1][name])) / 2
        np.testing.assert_allclose(after[0][name], mean, rtol=FLOAT32_TOLERANCE)
    assert before[0]["seen"] != before[1]["seen"]
    assert after[0]["seen"] == before[0]["seen"]


def test_a_resumed_run_may_not_take_other_statistics(make_job) -> None:
    config = make_job().config
    assert config.identity() != replace(config, micro_batch_sequences=8).identity()
    text = replace(config, model={"model_type": "llama"})
    assert text.identity() == replace(text, micro_batch_sequences=8).identity()


def test_batches_are_given_in_the_datasets_unit(make_job) -> None:
    config = make_job().config
    assert plan_batch(config, sequence_length=None, world_size=2).accumulation == 2
    assert (
        plan_batch(replace(config, global_batch_examples=None), sequence_length=None, world_size=2).rows_per_step == 64
    )
    with pytest.raises(ParameterError, match=r"global_batch_examples 10 is no multiple of 2 workers x") as caught:
        plan_batch(replace(config, global_batch_examples=10), sequence_length=None, world_size=2)
    assert "8 or 16" in caught.value.hint
    with pytest.raises(ParameterError, match="global_batch_tokens 64 was given, but the dataset holds examples"):
        plan_batch(replace(config, global_batch_tokens=64), sequence_length=None, world_size=2)
    with pytest.raises(
        ParameterError, match="global_batch_examples 16 was given, but the dataset holds rows of tokens"
    ):
        plan_batch(config, sequence_length=16, world_size=2)


def check(factory: str, dataset: Path, *, loss: str = "mean_squared_error", **arguments) -> None:
    opened = ArrayDataset.open(dataset)
    check_module(factory, arguments=arguments, project_root=HERE, dataset=opened, loss=loss, seed=0)


def test_modules_that_fit_are_taken(images: Path, values: Path) -> None:
    check("trained_modules:make", images, loss="cross_entropy", width=4, classes=7)
    check("trained_modules:make_line", values)


@pytest.mark.parametrize(
    ("factory", "arguments", "found"),
    [
        ("no_such_module:make", {}, "cannot be imported: No module named"),
        ("trained_modules:mak_line", {}, "did you mean 'make_line'"),
        ("trained_modules:make_line", {"outpts": 2}, "unexpected keyword argument 'outpts'"),
        ("trained_modules:make_class", {}, "gave type; a torch.nn.Module is wanted"),
        ("trained_modules:make_random", {}, r"built twice from one seed it has other values in layers\.0\.weight"),
        ("trained_modules:make_double", {}, "parameters are float32"),
        ("trained_modules:make_frozen", {}, "no parameter to train"),
        ("trained_modules:make_scalar", {}, "scale is a single number"),
        ("trained_modules:make_tuple", {}, "forward returned tuple"),
        ("trained_modules:make_failing", {}, "no parameter to train"),
        (
            "trained_modules:make",
            {},
            "forward does not take the arrays of the dataset: missing a required argument: 'pixels'",
        ),
        ("trained_modules:make_narrow", {}, r"forward failed on x \[3, 3\] torch.float32: RuntimeError"),
        ("trained_modules:make_line", {"outputs": 3}, r"forward gave \[3, 3\]; wanted is \[batch, 2\]"),
    ],
)
def test_factories_that_cannot_be_trained_are_refused(values: Path, factory, arguments, found) -> None:
    with pytest.raises(ParameterError, match=found) as caught:
        check(factory, values, **arguments)
    assert caught.value.exit_code == 2


def test_losses_and_targets_must_fit(images: Path, values: Path) -> None:
    with pytest.raises(ParameterError, match=r"loss: cross_entropy, but the target 'y' of the dataset holds floats"):
        check("trained_modules:make_line", values, loss="cross_entropy")
    with pytest.raises(ParameterError, match=r"forward gave \[3, 2\]; wanted is .* at least 3 classes"):
        check("trained_modules:make", images, loss="cross_entropy", classes=2)


def test_blocks_are_the_outermost_lists_without_shared_parameters() -> None:
    shared = nn.Linear(2, 2)
    tied = nn.Linear(2, 2)
    tied.weight = shared.weight
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = nn.ModuleDict(
        {"layers": nn.ModuleList([inner, shared, nn.ReLU(), nn.ModuleList([nn.Conv2d(1, 1, 1)])]), "head": tied}
    )
    assert module_blocks(model) == [inner, model["layers"][3][0]]


def test_a_module_goes_on_from_the_parameters_and_statistics_of_another_training(
    make_job, one_rank, tmp_path: Path
) -> None:
    first, _ = train_recorded(one_rank, make_job(workspace=tmp_path / "first"))
    place = tmp_path / "first" / first.commit.key.prefix
    job = make_job(workspace=tmp_path / "second", initial="digest", seed=7)
    second, _ = train_recorded(one_rank, replace(job, open_initial=functools.partial(open_weights, str(place))))
    assert second.state.initial_validation_loss == pytest.approx(first.state.validation_loss, rel=FLOAT32_TOLERANCE)
    other = make_job(workspace=tmp_path / "third", initial="digest", model_arguments={"width": 6})
    with pytest.raises(CheckpointError, match="have another shape"):
        train_recorded(one_rank, replace(other, open_initial=functools.partial(open_weights, str(place))))
