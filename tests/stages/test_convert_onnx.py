"""`convert.onnx` writes what onnxruntime runs like torch, from a checkpoint or a Flax model."""

import json

import numpy as np
import onnxruntime
import pytest
import torch

from converters.conversion import convert
from converters.torch_model import load_torch_model
from pipeline.stages.convert_onnx import run
from pipeline.stages.parameters import ConvertOnnxParameters
from pipeline.stages.registry import KINDS

MODEL = "${stages.convert.outputs.model}"
# float32 sums in another order, logits of size 6: seen 3e-6 at most.
TOLERANCE = 3e-5


@pytest.mark.slow
@pytest.mark.parametrize("side", ["torch", "flax"])
def test_onnxruntime_computes_what_torch_computes_at_another_size(stage_context, tiny_checkpoint, tmp_path, side):
    source = tiny_checkpoint
    if side == "flax":
        convert(tiny_checkpoint, to=tmp_path / "flax")
        source = tmp_path / "flax"
    context = stage_context(ConvertOnnxParameters(model=MODEL, int8=side == "flax"), {"model": source})
    result = run(context)
    directory = context.output_root / "model"
    record = json.loads((directory / "export.json").read_text())
    assert record["facts"]["inputs"]["input_ids"]["shape"] == ["batch", "sequence"]
    assert record["source_format"] == ("flax" if side == "flax" else "torch-dcp")
    session = onnxruntime.InferenceSession(str(directory / "model.onnx"))
    tokens = np.arange(4 * 17).reshape(4, 17) % 101
    (found,) = session.run(["logits"], {"input_ids": tokens, "attention_mask": np.ones_like(tokens)})
    with torch.no_grad():
        wanted = load_torch_model(tiny_checkpoint)(torch.from_numpy(tokens)).logits.numpy()
    assert np.abs(found - wanted).max() < TOLERANCE * np.abs(wanted).max()
    assert 0 < result.metrics["max_rel_difference"] < TOLERANCE
    assert set(result.metrics) <= set(KINDS["convert.onnx"].default_metrics)
    if side == "flax":
        assert (directory / "model.int8.onnx").stat().st_size < (directory / "model.onnx").stat().st_size
        assert TOLERANCE < result.metrics["int8_max_rel_difference"] < 0.5
