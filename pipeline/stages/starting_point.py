"""The weights that a training stage starts from: `initial` of `train.fsdp`.

Owns the way from the parameter to a place that every rank can open, to the digest that is the weights' identity, and
the files that a fine-tuned model inherits. Knows nothing of training. The one decision: weights are read where they
lie; a copy in another format would cost their size in disk and time, and a rank reads only its shards.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converters.starting_weights import NamedWeights, open_weights
from pipeline.stages.checkpoint_identity import digest_of, local_place
from pipeline.stages.parameters import TrainFsdpParameters
from pipeline.training.checkpoints.checkpoint import TOKENIZER_NAME
from pipeline.training.tasks.model import model_config


@dataclass(frozen=True, kw_only=True, slots=True)
class StartingPoint:
    """Weights that exist."""

    place: str
    """A path or URL that every rank opens."""
    digest: str
    weights: NamedWeights

    def config(self) -> dict[str, Any]:
        """The transformers config of the weights.

        Raises:
            ArtifactError: there is none, or it is malformed.
            ParameterError: transformers refuses it.
        """
        raw = self.weights.config()
        model_config(raw, where=f"config of {self.place}")
        return raw


def starting_point(
    parameters: TrainFsdpParameters, *, committed: tuple[Path, str] | None, project_root: Path
) -> StartingPoint | None:
    """What `initial` names, opened; None where training starts from scratch.

    Args:
        parameters: of the stage.
        committed: directory and digest of the artifact, where `initial` is an output of a stage.
        project_root: where relative paths start.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
        ParameterError: nothing is there.
    """
    if parameters.initial is None:
        return None
    if isinstance(parameters.initial, str):
        place = local_place(parameters.initial, project_root)
        digest = digest_of(parameters.initial, project_root)
    else:
        assert committed is not None
        place, digest = str(committed[0]), committed[1]
    return StartingPoint(place=place, digest=digest, weights=open_weights(place))


def inherit(start: StartingPoint, directory: Path) -> tuple[str, ...]:
    """Add to a trained model what lies beside its starting weights: chat template, ends of a text, and the like.

    Nothing where it was trained with another tokenizer, for these files speak of tokens.

    Returns:
        Names of the files that were added.
    """
    offered = start.weights.companions()
    tokenizer = directory / TOKENIZER_NAME
    if TOKENIZER_NAME in offered and not _same(tokenizer, offered[TOKENIZER_NAME]):
        return ()
    added = [name for name in offered if not (directory / name).exists()]
    for name in added:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(offered[name])
    return tuple(added)


def _same(path: Path, content: bytes) -> bool:
    return path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content
