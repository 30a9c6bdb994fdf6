"""Arrays become a dataset that is checked, split by seed, and read back as it was."""

import json
from pathlib import Path

import numpy as np
import pytest

from pipeline.data.array_sources import read_arrays
from pipeline.data.array_writing import ArrayPlan, write_arrays
from pipeline.data.arrays import ArrayDataset
from pipeline.data.dataset import open_dataset
from pipeline.data.packed import PackedDataset
from pipeline.errors import ArtifactError, ParameterError

PLAN = ArrayPlan(target="labels", validation_fraction=0.25, max_examples=None, shard_examples=7, seed=3)


def sample(num: int = 40) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "pixels": rng.normal(size=(num, 1, 3, 4)),
        "flags": rng.integers(0, 2, size=(num, 5)).astype(bool),
        "index": np.arange(num, dtype=np.int32),
        "labels": rng.integers(0, 6, size=num).astype(np.int16),
    }


@pytest.fixture
def dataset(tmp_path: Path) -> ArrayDataset:
    write_arrays(sample(), tmp_path, plan=PLAN, source={"source": "sample"})
    return ArrayDataset.open(tmp_path)


def test_every_example_is_in_one_split_with_all_its_arrays(dataset: ArrayDataset) -> None:
    given = sample()
    found = {name: dataset.rows(name, np.arange(dataset.num_rows(name))) for name in ("train", "validation")}
    assert (dataset.num_rows("train"), dataset.num_rows("validation")) == (30, 10)
    index = np.concatenate([found["train"]["index"], found["validation"]["index"]])
    assert sorted(index) == list(range(40))
    for examples in found.values():
        np.testing.assert_array_equal(examples["pixels"], given["pixels"][examples["index"]].astype(np.float32))
        np.testing.assert_array_equal(examples["flags"], given["flags"][examples["index"]])
        np.testing.assert_array_equal(examples["labels"], given["labels"][examples["index"]])
    dtypes = {name: array.dtype.name for name, array in found["train"].items()}
    assert dtypes == {"pixels": "float32", "flags": "bool", "index": "int64", "labels": "int64"}


def test_it_says_what_it_holds(dataset: ArrayDataset) -> None:
    assert {name: spec.shape for name, spec in dataset.inputs.items()} == {
        "pixels": (1, 3, 4),
        "flags": (5,),
        "index": (),
    }
    assert (dataset.target, dataset.target_shape, dataset.num_classes) == ("labels", (), 6)
    assert isinstance(open_dataset(dataset.directory), ArrayDataset)


def test_floats_are_values_and_not_classes(tmp_path: Path) -> None:
    arrays = {"x": np.ones((4, 2)), "y": np.linspace(0, 1, 4)}
    plan = ArrayPlan(target="y", validation_fraction=0.25, max_examples=None, shard_examples=9, seed=0)
    manifest = write_arrays(arrays, tmp_path, plan=plan, source={})
    assert (manifest.target_kind, manifest.num_classes) == ("values", None)


def test_the_split_and_the_bytes_depend_on_the_seed_alone(tmp_path: Path) -> None:
    def bytes_of(name: str, seed: int) -> dict[str, bytes]:
        (tmp_path / name).mkdir()
        plan = ArrayPlan(target="labels", validation_fraction=0.25, max_examples=20, shard_examples=7, seed=seed)
        write_arrays(sample(), tmp_path / name, plan=plan, source={})
        return {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}

    assert bytes_of("a", 1) == bytes_of("b", 1)
    assert bytes_of("c", 2) != bytes_of("d", 1)
    kept = ArrayDataset.open(tmp_path / "a")
    assert kept.num_rows("train") + kept.num_rows("validation") == 20


def test_ranks_share_a_step_without_gaps(dataset: ArrayDataset) -> None:
    whole = dataset.train_rows(5, rows_per_step=8, rank=0, world_size=1, seed=1)["index"]
    parts = [dataset.train_rows(5, rows_per_step=8, rank=rank, world_size=2, seed=1)["index"] for rank in (0, 1)]
    assert sorted(np.concatenate(parts)) == sorted(whole)


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    arrays = {
        "pixels": np.array([[1.0], [np.nan], [2.0]]),
        "names": np.array(["a", "b", "c"]),
        "short": np.ones(2),
        "label": np.array([0, 1, 2]),
    }
    with pytest.raises(ParameterError) as caught:
        write_arrays(arrays, tmp_path, plan=PLAN, source={})
    message = str(caught.value)
    for words in ("did you mean 'label'", "not finite in float32, the first in example 1", "names: dtype", "short 2"):
        assert words in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"labels": np.arange(4)}, "only the target"),
        ({"x": np.ones((1, 2)), "labels": np.zeros(1, int)}, "at least two"),
        ({"x": np.ones((3, 2)), "labels": np.array([0, -1, 2])}, "counted from 0, found -1"),
        ({"not a name": np.ones(3), "labels": np.arange(3)}, "must be a Python name"),
        ({"x": np.float32(1), "labels": np.arange(3)}, "first axis must count examples"),
    ],
)
def test_arrays_that_make_no_dataset_are_refused(tmp_path: Path, arrays, words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        write_arrays(arrays, tmp_path, plan=PLAN, source={})


def test_damage_is_named(dataset: ArrayDataset) -> None:
    path = dataset.directory / "train-00001.pixels.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"train-00001\.pixels\.npy: altered"):
        ArrayDataset.open(dataset.directory)
    path.write_bytes(content[:-4])
    with pytest.raises(ArtifactError, match="the manifest says"):
        ArrayDataset.open(dataset.directory, verify=False)
    path.unlink()
    with pytest.raises(ArtifactError, match="missing"):
        open_dataset(dataset.directory)


@pytest.mark.parametrize("change", [{"target": "nothing"}, {"schema": 2}, {"arrays": 3}, {"splits": {"train": {}}}])
def test_a_damaged_manifest_is_an_artifact_error(dataset: ArrayDataset, change) -> None:
    path = dataset.directory / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ArtifactError, match=r"manifest\.json"):
        ArrayDataset.open(dataset.directory)


def test_rows_of_tokens_are_not_read_from_arrays(dataset: ArrayDataset) -> None:
    with pytest.raises(ArtifactError, match="a dataset of arrays, and rows of tokens are wanted"):
        PackedDataset.open(dataset.directory)


def test_the_digits_are_scaled_images(tmp_path: Path) -> None:
    arrays = read_arrays("builtin:digits", arguments={}, project_root=tmp_path)
    assert arrays["pixels"].shape == (1797, 1, 8, 8)
    assert (arrays["pixels"].min(), arrays["pixels"].max()) == (0.0, 1.0)
    assert set(arrays["labels"]) == set(range(10))


def test_npz_files_and_functions_are_sources(tmp_path: Path, monkeypatch) -> None:
    np.savez(tmp_path / "given.npz", x=np.ones(3), labels=np.arange(3))
    assert set(read_arrays("given.npz", arguments={}, project_root=tmp_path)) == {"x", "labels"}
    np.savez(tmp_path / "objects.npz", x=np.array([{}, 1], dtype=object))
    with pytest.raises(ParameterError, match=r"cannot be read as an \.npz file"):
        read_arrays("objects.npz", arguments={}, project_root=tmp_path)
    (tmp_path / "own_arrays.py").write_text(
        "def make(num):\n    return {'x': [[1.0]] * num, 'labels': [0] * num}\ndef wrong():\n    return 1 + ''\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert len(read_arrays("own_arrays:make", arguments={"num": 5}, project_root=tmp_path)["x"]) == 5
    for source, arguments, words in (
        ("own_arrays:make", {"num": 5, "nume": 5}, "unexpected keyword"),
        ("own_arrays:mak", {}, "cannot be imported"),
        ("no_such_module:make", {}, "cannot be imported"),
        ("math:pi", {}, "not a callable"),
    ):
        with pytest.raises(ParameterError, match=words):
            read_arrays(source, arguments=arguments, project_root=tmp_path)
    with pytest.raises(TypeError):  # a mistake of the function is not one of its arguments
        read_arrays("own_arrays:wrong", arguments={}, project_root=tmp_path)
