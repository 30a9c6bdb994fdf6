"""`import.checkpoint` copies what a reader can open, and is identified by content."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from converters.readers import open_source
from pipeline.errors import CheckpointError, ParameterError
from pipeline.stages.checkpoint_identity import digests
from pipeline.stages.import_checkpoint import run
from pipeline.stages.parameters import ImportCheckpointParameters
from pipeline.stages.registry import KINDS


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    directory = tmp_path / "foreign"
    (directory / "1_Pooling").mkdir(parents=True)
    save_file({"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3)}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"model_type": "bert"}))
    (directory / "1_Pooling" / "config.json").write_text("{}")
    return directory


def test_the_checkpoint_is_copied_with_everything_beside_it(stage_context, foreign: Path) -> None:
    context = stage_context(ImportCheckpointParameters(source="foreign"), {})
    result = run(context)
    copied = context.output_root / "checkpoint"
    assert set(result.metrics) == set(KINDS["import.checkpoint"].default_metrics)
    assert result.metrics["num_tensors"] == 1
    assert result.facts["source_format"] == "safetensors"
    assert (copied / "1_Pooling" / "config.json").read_text() == "{}"
    (foreign / "model.safetensors").write_bytes(b"changed")
    np.testing.assert_array_equal(open_source(copied).read("a.weight"), np.arange(6).reshape(2, 3))


def test_one_file_is_a_checkpoint_too(stage_context, foreign: Path) -> None:
    context = stage_context(ImportCheckpointParameters(source="foreign/model.safetensors"), {})
    run(context)
    assert [path.name for path in (context.output_root / "checkpoint").iterdir()] == ["model.safetensors"]


def test_the_identity_is_names_and_contents(foreign: Path, tmp_path: Path) -> None:
    def digest() -> str:
        return digests(ImportCheckpointParameters(source="foreign"), tmp_path)["source"]

    before = digest()
    foreign.rename(tmp_path / "elsewhere")
    assert digests(ImportCheckpointParameters(source=str(tmp_path / "elsewhere")), tmp_path)["source"] == before
    (tmp_path / "elsewhere").rename(foreign)
    for name in ("config.json", ".metadata"):  # torch's DCP keeps its index in a hidden file
        before = digest()
        (foreign / name).write_text("{}")
        assert digest() != before


def test_what_is_no_checkpoint_is_refused(stage_context, foreign: Path, tmp_path: Path) -> None:
    (foreign / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(CheckpointError):
        run(stage_context(ImportCheckpointParameters(source="foreign"), {}))
    with pytest.raises(ParameterError, match="no such file or directory"):
        run(stage_context(ImportCheckpointParameters(source="missing"), {}))
