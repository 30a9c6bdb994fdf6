"""The reader of a checkpoint is found by names alone, and only what is asked is loaded."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import converters
from converters.readers import open_source
from pipeline.errors import CheckpointError

PROJECT = Path(__file__).resolve().parents[2]
OPEN = """
import sys
from pathlib import Path
from converters.readers import open_source
source = open_source(Path(sys.argv[1]))
source.read(next(iter(source.headers)))
print(source.format, [name for name in ("torch", "jax", "transformers", "gguf", "onnx") if name in sys.modules])
"""


def test_safetensors_are_opened_without_a_framework(tmp_path):
    save_file({"w": np.ones((2, 3), "f4")}, tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        done = subprocess.run(
            [sys.executable, "-c", OPEN, str(path)], capture_output=True, text=True, cwd=PROJECT, check=True
        )
        assert done.stdout.strip() == "safetensors []"


def test_names_alone_say_whether_a_reader_knows_it(tmp_path):
    (tmp_path / "notes.txt").touch()
    assert not converters.recognised(tmp_path)
    assert not converters.recognised(tmp_path / "notes.txt")
    (tmp_path / "model.safetensors").touch()
    assert converters.recognised(tmp_path)
    assert converters.recognised(tmp_path / "model.safetensors")


def test_what_no_reader_knows_is_named_with_what_would_be(tmp_path):
    for index in range(12):
        (tmp_path / f"file{index:02}").touch()
    with pytest.raises(CheckpointError) as caught:
        open_source(tmp_path)
    assert "found: file00, file01" in str(caught.value)
    assert "and 2 more" in str(caught.value)
    assert "*.safetensors with or without an index" in str(caught.value)
    with pytest.raises(CheckpointError, match="absent: no such"):
        open_source(tmp_path / "absent")
