"""A torch checkpoint becomes a Flax model directory.

Owns the order of a conversion: plan from headers; read, map and write one tensor at a time; record. Knows nothing of
formats, families or stages. The one decision: everything that can be refused is refused from headers, before a byte of
weights is read or written.
"""

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from converters.appearing import appearing, check_free
from converters.leaf_work import Progress, pieces, sha256, source_tensor
from converters.manifest import CONVERTER_VERSION, Conversion, ConversionManifest, SourceTensor
from converters.mapping import DtypePolicy, MappingPlan, plan_mapping
from converters.operations import DTYPES, FLOAT_DTYPES, Array
from converters.readers import open_source
from converters.roads import Road, Via, choose_road
from converters.safetensors_writer import write_file
from converters.source import CONFIG_FILE, CheckpointSource
from pipeline.errors import ConversionError
from pipeline.models.checkpoint import PARAMETERS_DIRECTORY
from pipeline.models.config_file import read_config
from pipeline.models.module_file import MODULE_FILE
from pipeline.models.parameter_writer import AnnouncedLeaf, write_parameters

CARRIED_FILE = "carried.safetensors"
"""Tensors of the checkpoint that the Flax model does not use and that go back unchanged."""
TOKENIZER_FILE = "tokenizer.json"


def convert(
    source: Path | str,
    *,
    to: Path | str,
    via: Via = "auto",
    dtype: DtypePolicy = "keep",
    progress: Progress | None = None,
    project_root: Path | None = None,
) -> ConversionManifest:
    """Convert the checkpoint `source` to a Flax model directory.

    Args:
        source: anything that `open_source` reads.
        to: the new directory: `config.json` or `program.json`, tokenizer files, `params/` (Orbax),
            `carried.safetensors` where a tensor goes back unused, `conversion.json`. It must not exist or be empty.
        via: `family` takes the rule table of the checkpoint's family, `trace` interprets its torch module; `auto` takes
            the family where there is one that takes the config, and the manifest says why.
        dtype: `keep` takes each tensor's own dtype; the others cast every weight. Counters and masks are never cast.
        progress: told after each tensor; in another thread.
        project_root: where the factory of a `module.json` is looked for first; the working directory when None.

    Raises:
        CheckpointError: the checkpoint is missing, truncated or altered.
        ArtifactError: `config.json` is missing or unreadable.
        ConversionError: the checkpoint does not fit the model, or `to` holds something; lists every complaint.
        StoreError: `to` cannot be written.
        ParameterError: the config asks for something the Flax model does not have.
    """
    source, to = Path(source), Path(to)
    check_free(to)
    opened = open_source(source)
    road = choose_road(opened, via=via, dtype=dtype, project_root=project_root)
    plan = plan_mapping(
        opened.headers, table=road.table, targets=road.targets, dtype=dtype, target_dtypes=road.target_dtypes
    )
    conversions: list[Conversion] = []
    with appearing(to) as directory:
        write_parameters(
            directory / PARAMETERS_DIRECTORY,
            announced={
                path: AnnouncedLeaf(tuple(road.targets[path]), DTYPES[cast.after])
                for step in plan.steps
                for path, cast in zip(step.targets, step.casts, strict=True)
            },
            pieces=pieces(plan, source=opened, conversions=conversions, progress=progress),
        )
        _check_ties(plan, source=opened, conversions=conversions)
        road.write(directory)
        _write_companions(opened, directory=directory)
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
        facts=json.loads(json.dumps(dict(road.table.facts))),  # as they will be read back
        tensors=tuple(conversions),
        tied=plan.tied,
        ignored=plan.ignored,
        carried=carried,
        prefixes_removed=_removed_prefixes(plan.stored),
        dequantized={name: source.dequantized[key] for name, key in plan.stored.items() if key in source.dequantized},
        warnings=_warnings(road, source=source, conversions=conversions),
        num_source_tensors=len(source.headers),
        num_target_leaves=len(leaves),
        num_parameters=sum(math.prod(leaf.shape) for leaf in leaves),
        num_bytes=sum(math.prod(leaf.shape) * DTYPES[leaf.dtype].itemsize for leaf in leaves),
    )


def _carry(plan: MappingPlan, *, source: CheckpointSource, directory: Path) -> tuple[SourceTensor, ...]:
    """Write the tensors that go back unchanged to `carried.safetensors`."""
    headers = {name: replace(source.headers[plan.stored[name]], name=name) for name in plan.carried}
    tensors: dict[str, SourceTensor] = {}

    def read(name: str) -> Array:
        array = source.read(plan.stored[name])
        tensors[name] = source_tensor(name, array, plan=plan)
        return array

    if headers:
        write_file(directory / CARRIED_FILE, headers=headers, read=read)
    return tuple(tensors[name] for name in plan.carried)


def _write_companions(source: CheckpointSource, *, directory: Path) -> None:
    """Copy what belongs to the model and holds no weights."""
    if (source.directory / MODULE_FILE).is_file():
        shutil.copyfile(source.directory / MODULE_FILE, directory / MODULE_FILE)
    elif (source.directory / CONFIG_FILE).is_file() and read_config(source.directory) == source.config():
        shutil.copyfile(source.directory / CONFIG_FILE, directory / CONFIG_FILE)
    else:
        text = json.dumps(source.config(), indent=2)
        (directory / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
    for name, content in source.companions().items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)


def _check_ties(plan: MappingPlan, *, source: CheckpointSource, conversions: list[Conversion]) -> None:
    """Hold every present tied tensor against the one that was used.

    Raises:
        ConversionError: their bytes differ.
    """
    digests = {tensor.name: tensor.sha256 for conversion in conversions for tensor in conversion.sources}
    complaints = []
    for name, same_as in plan.tied.items():
        array = source.read(plan.stored[name])
        if sha256(array) != digests[same_as]:
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
    texts += road.warnings
    config = {} if (source.directory / MODULE_FILE).is_file() else source.config()
    declared = config.get("dtype") or config.get("torch_dtype")
    stored = sorted({tensor.dtype for conversion in conversions for tensor in conversion.sources} & FLOAT_DTYPES.keys())
    if declared and stored != [declared]:
        texts.append(f"config.json says dtype {declared}, the checkpoint holds {', '.join(stored)}")
    rounded = sum(not conversion.is_exact for conversion in conversions)
    if rounded:
        texts.append(f"{rounded} of {len(conversions)} tensors were rounded by the cast; the way back is not bit-exact")
    if config and TOKENIZER_FILE not in source.companions():
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
