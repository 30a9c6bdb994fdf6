"""A mixture: proportions exact in every window, each dataset in its own epochs, one position for everything."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.dataset import open_dataset
from pipeline.data.document import Document
from pipeline.data.mixture import PARTS_DIRECTORY, MixtureDataset, write_mixture
from pipeline.data.mixture_order import PARTS, MixtureOrder, parts_of
from pipeline.data.packing import PackingPlan, write_dataset
from pipeline.data.split import Split
from pipeline.errors import ParameterError

MOST_OFF = 2
"""Rows by which a window's count may differ from its share; see `MixtureOrder`."""


@given(
    weights=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
    first=st.integers(0, 30_000),
    size=st.integers(1, 5000),
)
def test_every_window_has_the_asked_proportions(weights: list[float], seed: int, first: int, size: int) -> None:
    parts = parts_of(weights)
    sources = MixtureOrder(parts=parts, seed=seed).sources(np.arange(first, first + size))
    counts = np.bincount(sources, minlength=len(parts))
    shares = np.array(parts) / sum(parts)
    assert np.abs(counts - size * shares).max() < MOST_OFF
    assert np.abs(shares - np.array(weights) / sum(weights)).max() <= 1 / PARTS


@given(parts=st.lists(st.integers(1, 9), min_size=1, max_size=5), seed=st.integers(0, 99), first=st.integers(0, 500))
def test_a_dataset_of_a_mixture_sees_its_own_positions_one_by_one(parts: list[int], seed: int, first: int) -> None:
    order = MixtureOrder(parts=tuple(parts), seed=seed)
    positions = np.arange(first, first + 200)
    sources = order.sources(positions)
    for source in range(len(parts)):
        before = np.count_nonzero(order.sources(np.arange(first)) == source)
        own = order.own_positions(positions[sources == source], source=source)
        assert own.tolist() == list(range(before, before + len(own)))


@pytest.mark.parametrize("weights", [[], [1.0, 0.0], [1.0, -1.0], [float("inf"), 1.0], [1.0, 1e-6]])
def test_weights_that_make_no_proportion_are_refused(weights: list[float]) -> None:
    with pytest.raises(ParameterError, match="weights"):
        parts_of(weights)


@pytest.fixture
def make_part(tmp_path: Path) -> Callable[..., Path]:
    """`make_part(name, documents, vocabulary)` under the mixture of the test."""

    def make(name: str, *, documents: int, length: int = 8) -> Path:
        directory = tmp_path / "mixture" / PARTS_DIRECTORY / name
        directory.mkdir(parents=True)
        texts = [Document(name=str(n), text=f"value_{n} = {n}\n" * 6) for n in range(documents)]
        held_out = [Document(name=f"v{n}", text=f"held_{n} = {n}\n" * 6) for n in range(3)]
        plan = PackingPlan(vocabulary_size=300, sequence_length=length, shard_tokens=1024, seed=0)
        write_dataset(Split(train=texts, validation=held_out), directory, plan=plan, source={})
        return directory

    return make


def test_rows_come_from_each_dataset_once_an_epoch_of_its_own(tmp_path: Path, make_part: Callable[..., Path]) -> None:
    small = make_part("small", documents=3)
    large = make_part("large", documents=12)
    for name in ("tokenizer.json", "manifest.json"):  # one tokenizer, as `tokenizer` of `data.text` gives
        text = (large / name).read_text()
        if name == "tokenizer.json":
            (small / name).write_text(text)
    manifest = (small / "manifest.json").read_text()
    digests = [open_dataset(part, verify=False).manifest.tokenizer_sha256 for part in (small, large)]
    (small / "manifest.json").write_text(manifest.replace(*digests))
    write_mixture(tmp_path / "mixture", parts={"small": 3, "large": 1}, source={})
    mixture = open_dataset(tmp_path / "mixture")
    assert isinstance(mixture, MixtureDataset)

    rows_per_step, num_steps, seed = 8, 20, 5
    seen: Counter[tuple[int, int]] = Counter()
    for step in range(num_steps):
        whole = mixture.train_rows(step, rows_per_step=rows_per_step, rank=0, world_size=1, seed=seed)
        parts = [
            mixture.train_rows(step, rows_per_step=rows_per_step, rank=rank, world_size=2, seed=seed) for rank in (0, 1)
        ]
        assert np.array_equal(whole[0::2], parts[0])
        assert np.array_equal(whole[1::2], parts[1])
        sources, rows = mixture.row_at(np.arange(step * rows_per_step, (step + 1) * rows_per_step), seed=seed)
        seen.update(zip(sources.tolist(), rows.tolist(), strict=True))
        named = mixture.step_rows(step, rows_per_step=rows_per_step, seed=seed)
        assert [named["small"], named["large"]] == [rows[sources == number].tolist() for number in (0, 1)]
        for place, (source, row) in enumerate(zip(sources, rows, strict=True)):
            dataset = list(mixture.datasets.values())[source]
            assert np.array_equal(whole[place], dataset.rows("train", np.array([row]))[0])
    epochs = mixture.epochs(num_steps, rows_per_step=rows_per_step, seed=seed)
    for number, (name, dataset) in enumerate(mixture.datasets.items()):
        times = [seen[number, row] for row in range(dataset.num_rows("train"))]
        assert max(times) - min(times) <= 1  # each row once an epoch
        assert epochs[f"epoch_{name}"] == pytest.approx(sum(times) / len(times))
    assert seen.total() == rows_per_step * num_steps
    assert sum(count for (source, _), count in seen.items() if source == 0) == seen.total() * 3 // 4


def test_validation_keeps_the_proportions_and_no_row_comes_twice(
    tmp_path: Path, make_part: Callable[..., Path]
) -> None:
    one = make_part("one", documents=4)
    one.with_name("two").symlink_to(one)
    write_mixture(tmp_path / "mixture", parts={"one": 2, "two": 1}, source={})
    mixture = MixtureDataset.open(tmp_path / "mixture")
    dataset = mixture.datasets["one"]
    count = mixture.num_rows("validation")
    rows = mixture.rows("validation", np.arange(count))
    available = dataset.num_rows("validation")
    assert count == available * 3 // 2
    by_first = Counter(row.tobytes() for row in rows)
    assert max(by_first.values()) <= 2  # both parts are the same files here
    with pytest.raises(IndexError, match="asked"):
        mixture.rows("validation", np.array([count]))


def test_datasets_that_fit_no_single_model_are_listed(tmp_path: Path, make_part: Callable[..., Path]) -> None:
    make_part("short", documents=4)
    make_part("long", documents=4, length=16)
    write_mixture(tmp_path / "mixture", parts={"short": 1, "long": 1}, source={})
    with pytest.raises(ParameterError, match=r"short: sequence_length 8.*\n.*long: sequence_length 16"):
        MixtureDataset.open(tmp_path / "mixture")
