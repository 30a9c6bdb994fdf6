"""The data position through the loop itself: killed at three points, two in one epoch, each row comes once an epoch;
a mixture of a local and a streamed dataset is trained on like any other."""

import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest
from rank_functions import StoppedError, StoppingRows, train_recorded

from pipeline.data.dataset import open_dataset, open_for_training
from pipeline.data.document import Document
from pipeline.data.manifest import Manifest, Streaming
from pipeline.data.mixture import PARTS_DIRECTORY, write_mixture
from pipeline.data.packed import PackedDataset
from pipeline.data.packing import PackingPlan, write_dataset
from pipeline.data.split import Split
from pipeline.training.loop import train
from pipeline.training.reporter import SilentReporter
from pipeline.training.tasks.watched_rows import WatchedRows, digests_of, read_rows

ROWS_PER_STEP = 4


@pytest.fixture(scope="module")
def few_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An epoch of some steps that does not end with a step."""
    directory = tmp_path_factory.mktemp("few")
    texts = [Document(name=str(n), text=f"def f{n}(x): return x + {n}\n" * 3) for n in range(12)]
    plan = PackingPlan(vocabulary_size=300, sequence_length=16, shard_tokens=1024, seed=0)
    write_dataset(Split(train=texts[3:], validation=texts[:3]), directory, plan=plan, source={})
    return directory


class LoggedRows(StoppingRows):
    """Stops at a step; what is read goes through the log of the test."""

    def __init__(self, path: Path, *, log: Path, stop_at: int) -> None:
        super().__init__(path, stop_at=stop_at)
        opened = functools.partial(open_for_training, path, positions=False, workers=2, cache_bytes=1)
        self._rows = WatchedRows(opened, log_directory=log)


def test_each_row_comes_once_an_epoch_through_three_kills(make_job, one_rank, few_rows: Path, tmp_path: Path) -> None:
    dataset = PackedDataset.open(few_rows)
    num_rows = dataset.num_rows("train")
    num_epochs = 2
    steps = -(-num_epochs * num_rows // ROWS_PER_STEP)
    assert num_rows % ROWS_PER_STEP
    first_epoch = num_rows // ROWS_PER_STEP
    stops = (first_epoch // 3 + 1, 2 * first_epoch // 3 + 1, first_epoch + 2, 10**6)
    log = tmp_path / "log"
    given = {
        "steps": steps,
        "global_batch_tokens": ROWS_PER_STEP * 16,
        "checkpoint_every_steps": 2,
        "validate_every_steps": 100,
        "log_every_steps": 100,
    }
    for stop_at in stops:
        job = make_job(open_dataset=functools.partial(LoggedRows, few_rows, log=log, stop_at=stop_at), **given)
        try:
            train(one_rank, job, reporter=SilentReporter())
        except StoppedError:
            assert stop_at < steps
    seen = [digest for _, (digests,) in sorted(read_rows(log).items()) for digest in digests]
    rows = digests_of(dataset.rows("train", np.arange(num_rows)))
    assert len(set(rows)) == num_rows
    for epoch in range(num_epochs):
        assert sorted(seen[epoch * num_rows : (epoch + 1) * num_rows]) == sorted(rows)


@pytest.fixture
def mixture(few_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A local dataset, and one whose shards stay where they are, in proportions 3 to 1."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    directory = tmp_path / "mixture"
    local, streamed = directory / PARTS_DIRECTORY / "local", directory / PARTS_DIRECTORY / "streamed"
    local.parent.mkdir(parents=True)
    local.symlink_to(few_rows)
    streamed.mkdir()
    (streamed / "tokenizer.json").write_bytes((few_rows / "tokenizer.json").read_bytes())
    manifest = Manifest.read(few_rows)
    values = {name: getattr(manifest, name) for name in manifest.__dataclass_fields__}
    Manifest(**{**values, "streaming": Streaming(location=str(few_rows), shuffled_shards=1)}).write(streamed)
    write_mixture(directory, parts={"local": 3, "streamed": 1}, source={})
    return directory


def test_a_mixture_is_trained_on_and_tells_the_epochs_of_each_dataset(make_job, one_rank, mixture: Path) -> None:
    opened = functools.partial(open_for_training, mixture, positions=True, workers=2, cache_bytes=1 << 20)
    result, record = train_recorded(
        one_rank, make_job(open_dataset=opened, document_masks=True, steps=6, global_batch_tokens=64)
    )
    num_rows = open_dataset(mixture).datasets["local"].num_rows("train")
    assert result.state.step == 6
    assert record.series("epoch_local")[6] == pytest.approx(6 * ROWS_PER_STEP * 3 / 4 / num_rows)
    assert record.series("epoch_streamed")[6] == pytest.approx(6 * ROWS_PER_STEP / 4 / num_rows)
    assert result.state.validation["validation_loss"] < result.state.initial_validation_loss
