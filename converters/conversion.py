"""A torch checkpoint becomes a Flax model directory, and its tensors come back from the leaves.

Owns the order of a conversion: plan from headers, read and map one tensor at a time, write beside, rename. Knows
nothing of formats, families or stages. The one decision: the target directory appears complete or not at all; nothing
that a user has is ever deleted, overwritten or half written.
"""

import hashlib
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from converters.manifest import CONVERTER_VERSION, Conversion, ConversionManifest, SourceTensor, TargetLeaf
from converters.mapping import DtypePolicy, MappingPlan, Step, plan_mapping, reverse_mapping
from converters.operations import DTYPES, FLOAT_DTYPES, Array, Shape
from converters.readers import open_source
from converters.roads import Road, Via, choose_road, family_road
from converters.source import COMPANION_FILES, CONFIG_FILE, CheckpointSource
from pipeline.errors import ConversionError
from pipeline.models.checkpoint import PARAMETERS_DIRECTORY, save_parameters
from pipeline.models.config_file import read_config

CARRIED_FILE = "carried.safetensors"
"""Tensors of the checkpoint that the Flax model does not use and that go back unchanged."""
TOKENIZER_FILE = "tokenizer.json"

Progress = Callable[[int, int], None]
"""Called with tensors done and tensors in all."""


def convert(
    source: Path | str,
    *,
    to: Path | str,
    via: Via = "auto",
    dtype: DtypePolicy = "keep",
    progress: Progress | None = None,
) -> ConversionManifest:
    """Convert the checkpoint `source` to a Flax model directory.

    Args:
        source: anything that `open_source` reads.
        to: the new directory: `config.json` or `program.json`, tokenizer files, `params/` (Orbax),
            `carried.safetensors` where a tensor goes back unused, `conversion.json`. It must not exist or be empty.
        via: `family` takes the rule table of the checkpoint's family, `trace` interprets its torch module; `auto` takes
            the family where there is one that takes the config, and the manifest says why.
        dtype: `keep` takes each tensor's own dtype; the others cast every weight. Counters and masks are never cast.
        progress: told after each tensor.

    Raises:
        CheckpointError: the checkpoint is missing, truncated or altered.
        ArtifactError: `config.json` is missing or unreadable.
        ConversionError: the checkpoint does not fit the model, or `to` holds something; lists every complaint.
        ParameterError: the config asks for something the Flax model does not have.
    """
    source, to = Path(source), Path(to)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConversionError(
            f"{to}: exists and is not empty; nothing is ever overwritten", hint="name a new directory"
        )
    opened = open_source(source)
    road = choose_road(opened, via=via)
    plan = plan_mapping(
        opened.headers, table=road.table, targets=road.targets, dtype=dtype, target_dtypes=road.target_dtypes
    )
    leaves: dict[str, Array] = {}
    conversions: list[Conversion] = []
    for done, step in enumerate(plan.steps, start=1):
        made, conversion = _perform(step, source=opened, plan=plan)
        leaves.update(made)
        conversions.append(conversion)
        if progress is not None:
            progress(done, len(plan.steps))
    _check_ties(plan, source=opened, conversions=conversions)
    with _appearing(to) as directory:
        save_parameters(directory / PARAMETERS_DIRECTORY, leaves)
        road.write(directory)
        for name in (CONFIG_FILE, *COMPANION_FILES):
            if (opened.directory / name).is_file():
                shutil.copyfile(opened.directory / name, directory / name)
        carried = _carry(plan, source=opened, directory=directory)
        manifest = _record(road, plan=plan, source=opened, dtype=dtype, conversions=conversions, carried=carried)
        manifest.write(directory)
    return manifest


def _record(
    road: Road,
    *,
    plan: MappingPlan,
    source: CheckpointSource,
    dtype: DtypePolicy,
    conversions: list[Conversion],
    carried: tuple[SourceTensor, ...],
) -> ConversionManifest:
    leaves = [leaf for conversion in conversions for leaf in conversion.targets]
    return ConversionManifest(
        converter_version=CONVERTER_VERSION,
        road=road.name,
        road_reason=road.reason,
        family=road.table.family,
        source_format=source.format,
        dtype_policy=dtype,
        facts=road.table.facts,
        tensors=tuple(conversions),
        tied=plan.tied,
        ignored=plan.ignored,
        carried=carried,
        prefixes_removed=_removed_prefixes(plan.stored),
        dequantized={},
        warnings=_warnings(road, source=source, conversions=conversions),
        num_source_tensors=len(source.headers),
        num_target_leaves=len(leaves),
        num_parameters=sum(math.prod(leaf.shape) for leaf in leaves),
        num_bytes=sum(math.prod(leaf.shape) * DTYPES[leaf.dtype].itemsize for leaf in leaves),
    )


def _carry(plan: MappingPlan, *, source: CheckpointSource, directory: Path) -> tuple[SourceTensor, ...]:
    """Write the tensors that go back unchanged to `carried.safetensors`."""
    arrays = {name: source.read(plan.stored[name]) for name in plan.carried}
    if arrays:
        save_file(arrays, directory / CARRIED_FILE)
    return tuple(_source_tensor(name, array, plan=plan) for name, array in arrays.items())


def to_torch(
    leaves: Mapping[str, Array],
    config: Mapping[str, Any],
    *,
    dtypes: Mapping[str, str] | None = None,
    carried: Mapping[str, Array] | None = None,
) -> dict[str, Array]:
    """The torch tensors that the leaves of a Flax model came from, by their names in transformers.

    A tied head is left out, as `save_pretrained` does.

    Args:
        leaves: every leaf by dotted path.
        config: the transformers config of the model.
        dtypes: original dtype by torch name (`ConversionManifest.source_dtypes`); leaves keep theirs where absent. The
            names also tell how the file was laid out where a family has several ways.
        carried: what `carried.safetensors` holds; it goes back as it is.

    Returns:
        C-contiguous arrays, bit-identical to the source wherever no cast rounded.

    Raises:
        ConversionError: a leaf is missing, unknown or has another shape; lists every complaint.
        ParameterError: the config asks for something the Flax model does not have.
    """
    # The original names tell how the file was laid out.
    road = family_road(config, names=tuple(dtypes or ()), reason="")
    tensors = reverse_mapping(leaves, table=road.table, targets=road.targets, dtypes=dtypes or {})
    return {name: np.asarray(array, order="C") for name, array in {**tensors, **(carried or {})}.items()}


def target_shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Shape by leaf path of the Flax model that a transformers config describes."""
    return dict(family_road(config, names=(), reason="").targets)


def _perform(step: Step, *, source: CheckpointSource, plan: MappingPlan) -> tuple[dict[str, Array], Conversion]:
    """Read one step's tensors and make its leaves; the sources are let go before the next step reads."""
    arrays = [source.read(plan.stored[name]) for name in step.sources]
    try:
        made = [np.asarray(array, order="C") for array in step.apply(arrays)]
    except ValueError as error:
        raise ConversionError(f"{', '.join(step.sources)}: {error} (rule {step.rule})") from error
    conversion = Conversion(
        sources=tuple(_source_tensor(name, array, plan=plan) for name, array in zip(step.sources, arrays, strict=True)),
        targets=tuple(
            TargetLeaf(path=path, shape=array.shape, dtype=str(array.dtype))
            for path, array in zip(step.targets, made, strict=True)
        ),
        operations=tuple(map(str, step.operations)),
        is_exact=all(cast.is_exact for cast in step.casts),
    )
    return dict(zip(step.targets, made, strict=True)), conversion


def _source_tensor(name: str, array: Array, *, plan: MappingPlan) -> SourceTensor:
    return SourceTensor(
        name=name,
        stored_name=plan.stored[name],
        shape=array.shape,
        dtype=str(array.dtype),
        sha256=_sha256(array),
    )


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


def _warnings(road: Road, *, source: CheckpointSource, conversions: list[Conversion]) -> tuple[str, ...]:
    """What a person should know and what is no error."""
    texts = [f"traced, because {road.reason}"] if road.is_second_choice else []
    config = read_config(source.directory) if (source.directory / CONFIG_FILE).is_file() else {}
    declared = config.get("dtype") or config.get("torch_dtype")
    stored = sorted({tensor.dtype for conversion in conversions for tensor in conversion.sources} & FLOAT_DTYPES.keys())
    if declared and stored != [declared]:
        texts.append(f"config.json says dtype {declared}, the checkpoint holds {', '.join(stored)}")
    rounded = sum(not conversion.is_exact for conversion in conversions)
    if rounded:
        texts.append(f"{rounded} of {len(conversions)} tensors were rounded by the cast; the way back is not bit-exact")
    if config and not (source.directory / TOKENIZER_FILE).is_file():
        texts.append(
            f"no {TOKENIZER_FILE} beside the checkpoint; the model can be evaluated but not prompted with text"
        )
    return tuple(texts)


def _removed_prefixes(stored: Mapping[str, str]) -> tuple[str, ...]:
    """Components of stored names that the names they were given lack."""
    return tuple(
        sorted(
            {
                part
                for name, stored_name in stored.items()
                for part in set(stored_name.split(".")) - set(name.split("."))
            }
        )
    )


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
