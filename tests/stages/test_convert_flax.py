"""`convert.flax` hands a checkpoint over and says what became of it."""

import pytest

from pipeline.errors import CheckpointError
from pipeline.models.checkpoint import load_model
from pipeline.stages.convert_flax import run
from pipeline.stages.parameters import ConvertFlaxParameters
from pipeline.stages.registry import KINDS

CHECKPOINT = "${stages.train.outputs.checkpoint}"


def test_checkpoint_becomes_a_model_artifact(stage_context, tiny_checkpoint):
    context = stage_context(ConvertFlaxParameters(checkpoint=CHECKPOINT), {"checkpoint": tiny_checkpoint})
    result = run(context)
    directory = context.output_root / "model"
    assert sorted(path.name for path in directory.iterdir()) == [
        "config.json",
        "conversion.json",
        "params",
        "tokenizer.json",
    ]
    assert list(context.output_root.iterdir()) == [directory]
    load_model(directory, dtype="float32")
    assert set(result.metrics) == set(KINDS["convert.flax"].default_metrics)
    assert result.metrics["num_source_tensors"] == result.metrics["num_target_leaves"] + 1
    assert result.facts["tied"] == {"lm_head.weight": "model.embed_tokens.weight"}
    assert result.facts["dtypes"] == ["float32"]
    kinds = [report.kind for report in context.reporter.drain()]
    assert kinds.count("progress") == result.metrics["num_target_leaves"]
    assert "note" in kinds


def test_dtype_is_what_was_asked(stage_context, tiny_checkpoint):
    given = ConvertFlaxParameters(checkpoint=CHECKPOINT, dtype="bfloat16")
    result = run(stage_context(given, {"checkpoint": tiny_checkpoint}))
    assert result.facts["dtypes"] == ["bfloat16"]
    assert result.metrics["num_bytes"] == 2 * result.metrics["num_parameters"]
    assert any("rounded" in warning for warning in result.facts["warnings"])


def test_truncated_checkpoint_writes_no_model(stage_context, tiny_checkpoint):
    (shard,) = (tiny_checkpoint / "dcp").glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:-5000])
    context = stage_context(ConvertFlaxParameters(checkpoint=CHECKPOINT), {"checkpoint": tiny_checkpoint})
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: shard is truncated"):
        run(context)
    assert [path for path in context.output_root.rglob("*") if path.is_file()] == []
