"""The record that the conversion of a Flax model would have left.

Owns the way back for a Flax model that no conversion made, one that was trained here or saved by others. Knows nothing
of files. The one decision: what cannot be known (digests, the dtypes before) is left empty or taken from the leaves,
and the record says that it was inferred.
"""

import math
from collections.abc import Mapping
from typing import Any

from converters.manifest import CONVERTER_VERSION, Conversion, ConversionManifest, SourceTensor, TargetLeaf
from converters.mapping import reverse_steps
from converters.roads import family_road
from converters.rules import render
from pipeline.models.parameter_writer import AnnouncedLeaf

REASON = "there is no conversion record; the leaves are those of the family"


def inferred_record(config: Mapping[str, Any], *, leaves: Mapping[str, AnnouncedLeaf]) -> ConversionManifest:
    """The record of a family's model, with torch's names as `save_pretrained` writes them.

    Args:
        config: of transformers.
        leaves: shape and dtype by path.

    Raises:
        ConversionError: there is no such family, or the leaves are not those of its model; lists every complaint.
        ParameterError: the config asks for something the Flax model does not have.
    """
    road = family_road(config, names=(), reason=REASON)
    found = {path: (leaf.shape, str(leaf.dtype)) for path, leaf in leaves.items()}
    conversions = []
    for rule, captures in reverse_steps(found, table=road.table, targets=road.targets):
        paths = [render(template, captures) for template in rule.sources]
        dtype = found[paths[0]][1]
        shapes = rule.shapes([found[path][0] for path in paths])
        names = [render(template, captures) for template in rule.targets]
        conversions.append(
            Conversion(
                sources=tuple(
                    SourceTensor(name=name, stored_name=name, shape=tuple(shape), dtype=dtype, sha256="")
                    for name, shape in zip(names, shapes, strict=True)
                ),
                targets=tuple(TargetLeaf(path=path, shape=found[path][0], dtype=found[path][1]) for path in paths),
                operations=tuple(map(str, rule.inverted().operations)),
                is_exact=True,
            )
        )
    return ConversionManifest(
        converter_version=CONVERTER_VERSION,
        road=road.name,
        road_reason=REASON,
        family=road.table.family,
        source_format="none",
        dtype_policy="keep",
        facts=dict(road.table.facts),
        tensors=tuple(conversions),
        tied={},
        ignored=(),
        carried=(),
        prefixes_removed=(),
        dequantized={},
        warnings=(),
        num_source_tensors=sum(len(conversion.sources) for conversion in conversions),
        num_target_leaves=len(leaves),
        num_parameters=sum(math.prod(leaf.shape) for leaf in leaves.values()),
        num_bytes=sum(leaf.nbytes for leaf in leaves.values()),
    )
