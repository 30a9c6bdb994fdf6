"""`data.arrays` as the runner calls it, and what its source's identity is."""

from pathlib import Path

import numpy as np
import pytest

from pipeline.data.arrays import ArrayDataset
from pipeline.errors import ParameterError
from pipeline.stages.array_source_identity import digests
from pipeline.stages.data_arrays import run
from pipeline.stages.parameters import DataArraysParameters
from pipeline.stages.registry import KINDS


def test_the_digits_become_a_dataset(stage_context) -> None:
    context = stage_context(DataArraysParameters(validation_fraction=0.2, shard_examples=500), {})
    result = run(context)
    dataset = ArrayDataset.open(context.output_root / "dataset")
    assert set(result.metrics) == set(KINDS["data.arrays"].default_metrics)
    assert result.metrics["num_train_examples"] == dataset.num_rows("train") == 1438
    assert result.metrics["num_validation_examples"] == 359
    assert result.metrics["num_classes"] == 10
    assert result.facts["arrays"] == {"pixels": "float32 [1, 8, 8]", "labels": "int64 []"}
    assert {report.kind for report in context.reporter.drain()} == {"progress", "dataset"}


def test_the_identity_of_a_source_is_its_content(tmp_path: Path) -> None:
    def digest(source: str) -> str:
        return digests(DataArraysParameters(source=source), tmp_path)["source"]

    assert digest("builtin:digits").startswith("builtin:digits scikit-learn ")
    np.savez(tmp_path / "a.npz", x=np.ones(3))
    (tmp_path / "b.npz").write_bytes((tmp_path / "a.npz").read_bytes())
    assert digest("a.npz") == digest("b.npz")
    (tmp_path / "own.py").write_text("def one(): ...\ndef two(): ...\n")
    before = digest("own:one")
    assert before != digest("own:two")
    (tmp_path / "own.py").write_text("def one(): return 1\ndef two(): ...\n")
    assert digest("own:one") != before


@pytest.mark.parametrize(
    ("source", "words"),
    [("missing.npz", "cannot be read"), ("nothing:make", "no module 'nothing'"), ("digits", "not a source of arrays")],
)
def test_a_source_that_is_not_there_is_refused_when_planned(tmp_path: Path, source: str, words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        digests(DataArraysParameters(source=source), tmp_path)
