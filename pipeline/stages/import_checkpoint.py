"""`import.checkpoint`: a checkpoint that no stage made becomes an artifact.

Owns the copy, and the check that a reader knows the format. Knows nothing of formats or models. The one decision: the
files are copied, not linked, for an artifact never changes and a user's files may. What a format holds inside and other
stages read as a file (the tokenizer of a GGUF file) is written beside it.
"""

import shutil
from pathlib import Path

from converters.location import locate
from converters.readers import open_source
from pipeline.data.sources import is_remote
from pipeline.errors import StageError
from pipeline.stages.checkpoint_identity import checkpoint_files, digests
from pipeline.stages.parameters import ImportCheckpointParameters
from pipeline.stages.protocol import StageContext, StageResult


def run(context: StageContext[ImportCheckpointParameters]) -> StageResult:
    """Copy `source` into the output `checkpoint`.

    Raises:
        ParameterError: there are no such files.
        CheckpointError: they are no checkpoint that can be read, or cannot be fetched.
        StageError: they cannot be copied.
    """
    given, reporter = context.parameters, context.reporter
    digest = digests(given, context.project_root)["source"]
    source = str(locate(given.source)) if is_remote(given.source) else given.source
    files = checkpoint_files(source, context.project_root)
    total = float(sum(file.path.stat().st_size for file in files))
    target, done = context.output("checkpoint"), 0.0
    for file in files:
        reporter.progress(done, total=total, unit="bytes", note=file.path.name)
        _copy(file.path, target / file.name)
        done += file.path.stat().st_size
    opened = open_source(target)
    for name, content in opened.companions().items():
        if not (target / name).exists():  # of a format that holds them inside, as GGUF does
            (target / name).write_bytes(content)
    num_tensors = len(opened.headers)
    reporter.note(f"{num_tensors} tensors in {opened.format}, {total / 1e6:.1f} MB, from {given.source}")
    return StageResult(
        metrics={"num_tensors": float(num_tensors), "num_bytes": total},
        facts={"source": given.source, "source_digest": digest, "source_format": opened.format},
    )


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copyfile(source, target)
    except OSError as error:
        raise StageError(f"{source}: cannot be copied to {target}: {error}") from error
