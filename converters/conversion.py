"""A torch checkpoint becomes a Flax model directory, and its tensors come back from the leaves.

Owns the order of a conversion: plan from headers, read and map one tensor at a time, write beside, rename. Knows
nothing of formats, families or stages. The one decision: the target directory appears complete or not at all; nothing
that a user has is ever deleted, overwritten or half written.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from converters.families.registry import table_for
from converters.manifest import CONVERTER_VERSION, Conversion, ConversionManifest, SourceTensor, TargetLeaf
from converters.mapping import DtypePolicy, MappingPlan, Step, plan_mapping, reverse_mapping
from converters.operations import Array, Shape
from converters.readers import open_source
from converters.source import COMPANION_FILES, CONFIG_FILE, CheckpointSource
from pipeline.errors import ConversionError
from pipeline.models.checkpoint import (
    PARAMETERS_DIRECTORY,
    abstract_leaves,
    save_parameters,
)
from pipeline.models.config_file import read_config
from pipeline.models.registry import describe_config

TOKENIZER_FILE = "tokenizer.json"

Progress = Callable[[int, int], None]
"""Called with tensors done and tensors in all."""


def convert(
    source: Path, *, to: Path, dtype: DtypePolicy = "keep", progress: Progress | None = None
) -> ConversionManifest:
    """Convert the checkpoint in the directory `source` to a Flax model directory.

    Args:
        source: a checkpoint artifact, a plain DCP directory, or a directory with safetensors files.
        to: the new directory: `config.json`, tokenizer files, `params/` (Orbax), `conversion.json`. It must not
            exist or be empty.
        dtype: `keep` takes each tensor's own dtype; the others cast every tensor.
        progress: told after each tensor.

    Raises:
        CheckpointError: the checkpoint is missing, truncated or altered.
        ArtifactError: `config.json` is missing or unreadable.
        ConversionError: the checkpoint does not fit the model, or `to` holds something; lists every complaint.
        ParameterError: the config asks for something the Flax model does not have.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConversionError(
            f"{to}: exists and is not empty; nothing is ever overwritten", hint="name a new directory"
        )
    opened = open_source(source)
    config = read_config(opened.directory)
    table = table_for(config)
    plan = plan_mapping(opened.headers, table=table, targets=target_shapes(config), dtype=dtype)
    leaves: dict[str, Array] = {}
    conversions: list[Conversion] = []
    for done, step in enumerate(plan.steps, start=1):
        made, conversion = _perform(step, source=opened, plan=plan)
        leaves.update(made)
        conversions.append(conversion)
        if progress is not None:
            progress(done, len(plan.steps))
    _check_ties(plan, source=opened, conversions=conversions)
    manifest = ConversionManifest(
        converter_version=CONVERTER_VERSION,
        family=table.family,
        source_format=opened.format,
        dtype_policy=dtype,
        facts=table.facts,
        tensors=tuple(conversions),
        tied=plan.tied,
        ignored=plan.ignored,
        warnings=_warnings(config, source=opened, conversions=conversions),
        num_source_tensors=len(opened.headers),
        num_target_leaves=len(leaves),
        num_parameters=sum(leaf.size for leaf in leaves.values()),
        num_bytes=sum(leaf.nbytes for leaf in leaves.values()),
    )
    with _appearing(to) as directory:
        save_parameters(directory / PARAMETERS_DIRECTORY, leaves)
        for name in (CONFIG_FILE, *COMPANION_FILES):
            if (opened.directory / name).is_file():
                shutil.copyfile(opened.directory / name, directory / name)
        manifest.write(directory)
    return manifest


def to_torch(
    leaves: Mapping[str, Array], config: Mapping[str, Any], *, dtypes: Mapping[str, str] | None = None
) -> dict[str, Array]:
    """The torch tensors that the leaves of a Flax model came from, by their names in transformers.

    A tied head is left out, as `save_pretrained` does.

    Args:
        leaves: every leaf by dotted path.
        config: the transformers config of the model.
        dtypes: original dtype by torch name (`ConversionManifest.source_dtypes`); leaves keep theirs where absent.

    Returns:
        C-contiguous arrays, bit-identical to the source wherever no cast rounded.

    Raises:
        ConversionError: a leaf is missing, unknown or has another shape; lists every complaint.
        ParameterError: the config asks for something the Flax model does not have.
    """
    tensors = reverse_mapping(leaves, table=table_for(config), targets=target_shapes(config), dtypes=dtypes or {})
    return {name: np.ascontiguousarray(array) for name, array in tensors.items()}


def target_shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Shape by leaf path of the Flax model that a transformers config describes."""
    return {path: tuple(leaf.shape) for path, leaf in abstract_leaves(describe_config(config)).items()}


def _perform(step: Step, *, source: CheckpointSource, plan: MappingPlan) -> tuple[dict[str, Array], Conversion]:
    """Read one step's tensors and make its leaves; the sources are let go before the next step reads."""
    arrays = [source.read(plan.stored[name]) for name in step.sources]
    try:
        made = [np.ascontiguousarray(array) for array in step.apply(arrays)]
    except ValueError as error:
        raise ConversionError(f"{', '.join(step.sources)}: {error} (rule {step.rule})") from error
    conversion = Conversion(
        sources=tuple(
            SourceTensor(
                name=name,
                stored_name=plan.stored[name],
                shape=array.shape,
                dtype=str(array.dtype),
                sha256=_sha256(array),
            )
            for name, array in zip(step.sources, arrays, strict=True)
        ),
        targets=tuple(
            TargetLeaf(path=path, shape=array.shape, dtype=str(array.dtype))
            for path, array in zip(step.targets, made, strict=True)
        ),
        operations=tuple(map(str, step.operations)),
        is_exact=all(cast.is_exact for cast in step.casts),
    )
    return dict(zip(step.targets, made, strict=True)), conversion


def _check_ties(plan: MappingPlan, *, source: CheckpointSource, conversions: list[Conversion]) -> None:
    """Hold every present tied tensor against the one that was used.

    Raises:
        ConversionError: their bytes differ.
    """
    digests = {tensor.name: tensor.sha256 for conversion in conversions for tensor in conversion.sources}
    complaints = []
    for name, same_as in plan.tied.items():
        array = source.read(plan.stored[name])
        if _sha256(array) != digests[same_as]:
            num = int(np.count_nonzero(array != source.read(plan.stored[same_as])))
            complaints.append(f"  {name}: differs from {same_as} in {num} of {array.size} numbers")
    if complaints:
        raise ConversionError(
            "config.json ties these tensors, but the checkpoint holds different ones:\n" + "\n".join(complaints),
            hint="set tie_word_embeddings to false in config.json if both are meant",
        )


def _warnings(config: Mapping[str, Any], *, source: CheckpointSource, conversions: list[Conversion]) -> tuple[str, ...]:
    """What a person should know and what is no error."""
    texts = []
    declared = config.get("dtype") or config.get("torch_dtype")
    stored = sorted({tensor.dtype for conversion in conversions for tensor in conversion.sources})
    if declared and stored != [declared]:
        texts.append(f"config.json says dtype {declared}, the checkpoint holds {', '.join(stored)}")
    rounded = sum(not conversion.is_exact for conversion in conversions)
    if rounded:
        texts.append(f"{rounded} of {len(conversions)} tensors were rounded by the cast; the way back is not bit-exact")
    if not (source.directory / TOKENIZER_FILE).is_file():
        texts.append(
            f"no {TOKENIZER_FILE} beside the checkpoint; the model can be evaluated but not prompted with text"
        )
    return tuple(texts)


def _sha256(array: Array) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).hexdigest()


@contextmanager
def _appearing(to: Path) -> Iterator[Path]:
    """A directory beside `to` that becomes `to` when the block ends well, and vanishes when it does not."""
    to.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{to.name}.partial-", dir=to.parent))
    try:
        yield temporary
        temporary.chmod(0o755)  # mkdtemp makes it private
        for path in sorted(path for path in temporary.rglob("*") if path.is_file()):
            _flush(path)
        temporary.rename(to)  # takes the place of an empty directory, fails on any other
        _flush(to.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
