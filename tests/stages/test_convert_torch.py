"""`convert.torch` gives back the checkpoint; transformers computes the same with it."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from converters.conversion import convert
from converters.difference import diff
from converters.torch_model import load_torch_model
from pipeline.errors import ArtifactError
from pipeline.stages.convert_torch import run
from pipeline.stages.parameters import ConvertTorchParameters
from pipeline.stages.registry import KINDS

MODEL = "${stages.convert.outputs.model}"


@pytest.fixture
def flax_model(tiny_checkpoint, tmp_path):
    convert(tiny_checkpoint, to=tmp_path / "flax")
    return tmp_path / "flax"


def test_the_checkpoint_comes_back_and_transformers_computes_the_same(stage_context, tiny_checkpoint, flax_model):
    context = stage_context(ConvertTorchParameters(model=MODEL), {"model": flax_model})
    result = run(context)
    directory = context.output_root / "checkpoint"
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert diff(tiny_checkpoint, directory).same
    tokens = torch.from_numpy(np.arange(20).reshape(2, 10))
    with torch.no_grad():
        ours = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")(tokens).logits
        theirs = load_torch_model(tiny_checkpoint)(tokens).logits
    assert torch.equal(ours, theirs)
    assert set(result.metrics) == set(KINDS["convert.torch"].default_metrics)
    assert result.facts["dtypes"] == ["float32"]
    assert [report.kind for report in context.reporter.drain()].count("progress") == result.metrics["num_tensors"]


def test_damaged_model_is_refused_and_writes_nothing(stage_context, flax_model):
    (flax_model / "params" / "_METADATA").unlink()
    context = stage_context(ConvertTorchParameters(model=MODEL), {"model": flax_model})
    with pytest.raises(ArtifactError, match="cannot be read as an Orbax checkpoint"):
        run(context)
    assert [path for path in context.output_root.rglob("*") if path.is_file()] == []
