"""`data.mixture`: several text datasets as one, in fixed proportions.

Owns the way of the datasets into the output. Knows nothing of which row comes when; that is `pipeline.data.mixture`.
The one decision: files are hard links where a file system has them, so a mixture costs no space and still is an
artifact of its own, whole without the ones it was made from.
"""

import os
import shutil
from pathlib import Path

from pipeline.data.mixture import PARTS_DIRECTORY, MixtureDataset, check_alike, write_mixture
from pipeline.data.mixture_order import parts_of
from pipeline.data.packed import PackedDataset
from pipeline.errors import ParameterError, nearest_name
from pipeline.stages.parameters import DataMixtureParameters
from pipeline.stages.protocol import StageContext, StageResult


def run(context: StageContext[DataMixtureParameters]) -> StageResult:
    """Check that the datasets fit each other, and put them together.

    Raises:
        ParameterError: weights and datasets have other names, a weight is too small, or tokenizers or row lengths
            differ.
        ArtifactError: a dataset holds no text, or is damaged.
    """
    given = context.parameters
    names = sorted(given.datasets)
    _check_names(given)
    parts = dict(zip(names, parts_of([given.weights[name] for name in names]), strict=True))
    sources = {name: context.input(f"datasets.{name}") for name in names}
    check_alike({name: PackedDataset.open(source.path) for name, source in sources.items()})
    output = context.output("dataset")
    for name, source in sources.items():
        _link_tree(source.path, output / PARTS_DIRECTORY / name)
    write_mixture(output, parts=parts, source={name: source.digest for name, source in sources.items()})
    mixture = MixtureDataset.open(output, verify=False)
    metrics = {
        "num_train_tokens": float(mixture.num_rows("train") * mixture.sequence_length),
        "num_validation_tokens": float(mixture.num_rows("validation") * mixture.sequence_length),
        "vocabulary_size": float(mixture.vocabulary_size),
    }
    total = sum(parts.values())
    shares = ", ".join(f"{name} {part / total:.2%}" for name, part in parts.items())
    context.reporter.note(f"mixture: {shares}")
    return StageResult(metrics=metrics, facts={"parts": parts})


def _check_names(given: DataMixtureParameters) -> None:
    complaints = [f"no weight for {name!r}" for name in given.datasets if name not in given.weights]
    for name in given.weights:
        if name not in given.datasets:
            near = nearest_name(name, list(given.datasets))
            complaints.append(f"no dataset {name!r}" + (f"; did you mean {near!r}?" if near else ""))
    if complaints:
        raise ParameterError(
            f"weights and datasets of a mixture: {'; '.join(complaints)}", hint="give each dataset a weight by its name"
        )


def _link_tree(source: Path, target: Path) -> None:
    for path in sorted(path for path in source.rglob("*") if path.is_file()):
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, place)
        except OSError:  # another file system, or one without hard links
            shutil.copyfile(path, place)
