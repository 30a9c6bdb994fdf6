"""`convert.onnx`: a model becomes an ONNX model for runtimes that know neither torch nor jax.

Owns nothing but the hand-over: model or checkpoint in, ONNX out, measured differences as metrics. Knows nothing of the
format. The one decision: the differences from torch are metrics of the stage, so a gate can hold them.
"""

from converters.exporting import export
from pipeline.stages.parameters import ConvertOnnxParameters
from pipeline.stages.protocol import StageContext, StageResult


def run(context: StageContext[ConvertOnnxParameters]) -> StageResult:
    """Export the input `model` into the output `model`.

    Raises:
        ArtifactError: the Flax model is missing or damaged.
        CheckpointError: the checkpoint is missing, truncated or altered.
        ConversionError: torch cannot export the model, or what was exported computes something else.
        StoreError: the output cannot be written.
    """
    given = context.parameters
    record = export(
        context.input("model").path,
        to=context.output("model"),
        format="onnx",
        opset=given.opset,
        int8=given.int8,
        project_root=context.project_root,
    )
    metrics = {**record.metrics, "num_bytes": float(record.num_bytes)}
    context.reporter.note(
        f"opset {record.facts['opset']['ai.onnx']}, {record.num_bytes / 1e6:.1f} MB; largest difference from torch "
        f"{record.metrics['max_abs_difference']:.2e} ({record.metrics['max_rel_difference']:.1e} of the largest output)"
    )
    return StageResult(metrics=metrics, facts={**record.facts, "files": list(record.files)})
