"""`data.text`: real text to packed token shards.

Owns the order of the steps and what is reported. Knows nothing of how each is done; that is `pipeline.data`. The one
decision: the stage reads the whole source into memory, which is right for the corpora of one machine; streaming is a
property of the dataset, not of this stage.
"""

from pathlib import Path

from converters.location import locate
from pipeline.data.packing import PackingPlan, write_dataset
from pipeline.data.sources import STDLIB, digests, read_documents
from pipeline.data.split import choose, split
from pipeline.data.text_tokenizer import read_tokenizer
from pipeline.stages.chat_rendering import chat_renderer
from pipeline.stages.checkpoint_identity import local_place
from pipeline.stages.parameters import DataTextParameters
from pipeline.stages.protocol import StageContext, StageResult


def run(context: StageContext[DataTextParameters]) -> StageResult:
    """Read, split, train the tokenizer, pack.

    Raises:
        ParameterError: the source is missing, empty or unreadable, or too short; names file and line. Or there is no
            tokenizer where one is named.
        CheckpointError: the tokenizer's URL cannot be fetched.
    """
    parameters = context.parameters
    reporter = context.reporter
    reporter.progress(0, total=3, unit="parts", note=f"reading {parameters.source}")
    digest = digests(parameters, context.project_root)["source"]
    place = _tokenizer_place(context)
    given = None if place is None else read_tokenizer(place)
    documents = choose(
        read_documents(parameters, context.project_root, render=None if place is None else chat_renderer(place)),
        seed=parameters.seed,
        max_documents=parameters.max_documents,
        max_bytes=parameters.max_bytes,
    )
    parts = split(documents, seed=parameters.seed, validation_fraction=parameters.validation_fraction)

    done = 0

    def progress(note: str) -> None:
        nonlocal done
        reporter.progress(done, total=3, unit="parts", note=note)
        done += 1

    manifest = write_dataset(
        parts,
        context.output("dataset"),
        plan=PackingPlan(
            vocabulary_size=parameters.vocabulary_size,
            sequence_length=parameters.sequence_length,
            shard_tokens=parameters.shard_tokens,
            seed=parameters.seed,
        ),
        source={"source": parameters.source, "json_field": parameters.json_field, "digest": digest},
        tokenizer=given,
        progress=progress,
    )
    if given is None and manifest.vocabulary_size < parameters.vocabulary_size:
        reporter.note(
            f"the text has pairs for {manifest.vocabulary_size} tokens only; {parameters.vocabulary_size} were asked"
        )
    train, validation = manifest.splits["train"], manifest.splits["validation"]
    num_bytes = train.num_bytes + validation.num_bytes
    metrics = {
        "num_documents": float(train.num_documents + validation.num_documents),
        "num_bytes": float(num_bytes),
        "num_train_tokens": float(train.num_rows * manifest.sequence_length),
        "num_validation_tokens": float(validation.num_rows * manifest.sequence_length),
        "vocabulary_size": float(manifest.vocabulary_size),
        "bytes_per_token": num_bytes / (train.num_tokens + validation.num_tokens),
    }
    shown = "the standard library" if parameters.source == STDLIB else parameters.source
    reporter.dataset(context.stage, digest=digest, source=parameters.source, facts=metrics)
    reporter.progress(3, total=3, unit="parts", note=f"{int(metrics['num_train_tokens']):,} training tokens")
    return StageResult(metrics=metrics, facts={"source": shown, "source_digest": digest})


def _tokenizer_place(context: StageContext[DataTextParameters]) -> Path | None:
    """Where the tokenizer that `tokenizer` names lies; None where one is to be trained."""
    named = context.parameters.tokenizer
    if isinstance(named, str):
        return locate(local_place(named, context.project_root))
    return None if named is None else context.input("tokenizer").path
