"""`convert.flax`: a committed torch checkpoint becomes a Flax model artifact.

Owns nothing but the hand-over: checkpoint in, model directory out, counts as metrics, layout facts as facts. Knows
nothing of rules or formats. The one decision: the conversion record travels inside the artifact, so whoever loads the
model later can say where every leaf came from.
"""

from converters.conversion import convert
from pipeline.stages.parameters import ConvertFlaxParameters
from pipeline.stages.protocol import StageContext, StageResult


def run(context: StageContext[ConvertFlaxParameters]) -> StageResult:
    """Convert the input `checkpoint` into the output `model`.

    Raises:
        CheckpointError: the checkpoint is missing, truncated or altered.
        ArtifactError: its `config.json` is missing or unreadable.
        ConversionError: it does not fit the Flax model; lists every complaint.
        ParameterError: its config asks for something the Flax model does not have.
    """
    checkpoint = context.input("checkpoint")
    reporter = context.reporter
    manifest = convert(
        checkpoint.path,
        to=context.output("model"),
        via=context.parameters.via,
        dtype=context.parameters.dtype,
        project_root=context.project_root,
        progress=lambda done, total: reporter.progress(float(done), total=float(total), unit="tensors"),
    )
    for warning in manifest.warnings:
        reporter.note(warning)
    reporter.note(
        f"{manifest.num_source_tensors} {manifest.source_format} tensors became {manifest.num_target_leaves} leaves "
        f"({manifest.num_parameters:,} parameters, {manifest.num_bytes / 1e6:.1f} MB); "
        f"{len(manifest.tied)} tied, {len(manifest.ignored)} ignored by name, {len(manifest.carried)} carried along; "
        f"by {'its family' if manifest.road == 'family' else 'tracing'}: {manifest.road_reason}"
    )
    return StageResult(
        metrics={
            "num_source_tensors": float(manifest.num_source_tensors),
            "num_target_leaves": float(manifest.num_target_leaves),
            "num_parameters": float(manifest.num_parameters),
            "num_bytes": float(manifest.num_bytes),
        },
        facts={
            "road": manifest.road,
            "road_reason": manifest.road_reason,
            "family": manifest.family,
            "source_format": manifest.source_format,
            "dtypes": sorted({leaf.dtype for conversion in manifest.tensors for leaf in conversion.targets}),
            "layout": dict(manifest.facts),
            "tied": dict(manifest.tied),
            "ignored": list(manifest.ignored),
            "warnings": list(manifest.warnings),
        },
    )
