"""`convert.torch`: a Flax model artifact becomes a checkpoint that transformers loads.

Owns nothing but the hand-over: model in, safetensors directory out, counts as metrics. Knows nothing of rules or
formats. The one decision: what comes out is a checkpoint like any other, so a flow can convert it again, compare it and
train it further.
"""

from converters.exporting import export
from pipeline.stages.parameters import ConvertTorchParameters
from pipeline.stages.protocol import StageContext, StageResult


def run(context: StageContext[ConvertTorchParameters]) -> StageResult:
    """Convert the input `model` into the output `checkpoint`.

    Raises:
        ArtifactError: the Flax model is missing or damaged, or its record does not fit it.
        StoreError: the output cannot be written.
    """
    given = context.parameters
    reporter = context.reporter
    record = export(
        context.input("model").path,
        to=context.output("checkpoint"),
        format="safetensors",
        dtype=given.dtype,
        max_shard_bytes=given.max_shard_bytes,
        progress=lambda done, total: reporter.progress(float(done), total=float(total), unit="tensors"),
    )
    for warning in record.warnings:
        reporter.note(warning)
    reporter.note(f"{record.num_tensors} tensors in {len(record.files)} files, {record.num_bytes / 1e6:.1f} MB")
    return StageResult(
        metrics={"num_tensors": float(record.num_tensors), "num_bytes": float(record.num_bytes)},
        facts={**record.facts, "files": list(record.files), "warnings": list(record.warnings)},
    )
