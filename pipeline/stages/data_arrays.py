"""`data.arrays`: named arrays to checked, split shards.

Owns the order of the steps and what is reported. Knows nothing of how each is done; that is `pipeline.data`.
"""

from pipeline.data.array_sources import read_arrays
from pipeline.data.array_writing import ArrayPlan, write_arrays
from pipeline.stages.array_source_identity import digests
from pipeline.stages.parameters import DataArraysParameters
from pipeline.stages.protocol import StageContext, StageResult


def run(context: StageContext[DataArraysParameters]) -> StageResult:
    """Read, check, split, write.

    Raises:
        ParameterError: the source cannot be read, or its arrays make no dataset; lists everything that is wrong.
    """
    parameters, reporter = context.parameters, context.reporter
    digest = digests(parameters, context.project_root)["source"]
    done = 0

    def progress(note: str) -> None:
        nonlocal done
        reporter.progress(done, total=4, unit="parts", note=note)
        done += 1

    progress(f"reading {parameters.source}")
    arrays = read_arrays(parameters.source, arguments=parameters.arguments, project_root=context.project_root)
    manifest = write_arrays(
        arrays,
        context.output("dataset"),
        plan=ArrayPlan(
            target=parameters.target,
            validation_fraction=parameters.validation_fraction,
            max_examples=parameters.max_examples,
            shard_examples=parameters.shard_examples,
            seed=parameters.seed,
        ),
        source={"source": parameters.source, "digest": digest},
        progress=progress,
    )
    splits = manifest.splits
    metrics = {
        "num_examples": float(sum(split.num_rows for split in splits.values())),
        "num_train_examples": float(splits["train"].num_rows),
        "num_validation_examples": float(splits["validation"].num_rows),
        "num_bytes": float(
            sum(shard.num_bytes for split in splits.values() for shards in split.shards.values() for shard in shards)
        ),
    }
    if manifest.num_classes is not None:
        metrics["num_classes"] = float(manifest.num_classes)
    reporter.dataset(context.stage, digest=digest, source=parameters.source, facts=metrics)
    shapes = {name: f"{spec.dtype} {list(spec.shape)}" for name, spec in manifest.arrays.items()}
    reporter.progress(4, total=4, unit="parts", note=f"{splits['train'].num_rows:,} training examples")
    return StageResult(
        metrics=metrics,
        facts={
            "source": parameters.source,
            "source_digest": digest,
            "target": manifest.target,
            "target_kind": manifest.target_kind,
            "arrays": shapes,
        },
    )
