"""`data.stream`: a text dataset whose shards stay where they are.

Owns what is taken from there, which is the manifest and the tokenizer. Knows nothing of how shards travel; that is
`pipeline.data.remote_shards`. The one decision: the output is a dataset like any other that says where its shards are,
so every stage that takes a dataset takes it.
"""

import dataclasses
import json

from pipeline.data.manifest import MANIFEST_NAME, TOKENIZER_NAME, Manifest, Streaming
from pipeline.data.packed import PackedDataset
from pipeline.errors import ArtifactError
from pipeline.stages.checkpoint_identity import local_place
from pipeline.stages.parameters import DataStreamParameters
from pipeline.stages.protocol import StageContext, StageResult
from pipeline.stages.stream_identity import digests, read_small


def run(context: StageContext[DataStreamParameters]) -> StageResult:
    """Take the manifest and the tokenizer.

    Raises:
        ParameterError: the source cannot be read.
        ArtifactError: it holds no text dataset of this version, or a damaged one.
    """
    parameters = context.parameters
    place = local_place(parameters.source, context.project_root)
    digest = digests(parameters, context.project_root)["source"]
    path = f"{place}/{MANIFEST_NAME}"
    try:
        raw = json.loads(read_small(place, MANIFEST_NAME))
    except ValueError as error:
        raise ArtifactError(f"{path}: not JSON ({error})", hint="write the dataset again with `data.text`") from error
    manifest = Manifest.parse(raw, path=path)
    if manifest.streaming is not None:
        raise ArtifactError(
            f"{path}: its shards are at {manifest.streaming.location}", hint="name that place as `source`"
        )
    output = context.output("dataset")
    (output / TOKENIZER_NAME).write_bytes(read_small(place, TOKENIZER_NAME))
    streaming = Streaming(location=place, shuffled_shards=parameters.shuffled_shards)
    dataclasses.replace(manifest, streaming=streaming).write(output)
    PackedDataset.open(output)
    train, validation = manifest.splits["train"], manifest.splits["validation"]
    metrics = {
        "num_documents": float(train.num_documents + validation.num_documents),
        "num_bytes": float(train.num_bytes + validation.num_bytes),
        "num_train_tokens": float(train.num_rows * manifest.sequence_length),
        "num_validation_tokens": float(validation.num_rows * manifest.sequence_length),
        "vocabulary_size": float(manifest.vocabulary_size),
    }
    context.reporter.dataset(context.stage, digest=digest, source=parameters.source, facts=metrics)
    context.reporter.note(f"{len(train.shards)} shards of training stay at {place}")
    return StageResult(metrics=metrics, facts={"source": parameters.source, "source_digest": digest})
