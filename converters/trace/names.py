"""The names that tensors of a checkpoint have in the torch module.

Owns the use of transformers' own renamings. Knows nothing of programs. The one decision: transformers says what its
checkpoints are called, never this converter; where it also changes layouts between file and module, that is refused by
name, because a traced program keeps the module's layouts.
"""

import re
from collections.abc import Iterable, Mapping

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from pipeline.errors import ConversionError

_MAX_COMPLAINTS = 10


def module_names(module: torch.nn.Module, names: Iterable[str]) -> dict[str, str]:
    """The module's name by the checkpoint's; those of a module that is not of transformers are the same.

    Raises:
        ConversionError: transformers keeps tensors in the checkpoint that the module holds in another layout.
    """
    if not isinstance(module, PreTrainedModel):
        return {name: name for name in names}
    mapping = get_model_conversion_mapping(module)
    renamings = [transform for transform in mapping if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in mapping if isinstance(transform, WeightConverter)]
    state = module.state_dict()
    found: dict[str, str] = {}
    remade: list[str] = []
    for name in names:
        renamed, pattern = rename_source_key(name, renamings, converters, module.base_model_prefix, state)
        if pattern is not None and name not in state:
            remade.append(f"  {name}: is part of {renamed} in the module")
        found[name] = name if name in state else renamed
    if remade:
        shown = remade[:_MAX_COMPLAINTS]
        more = f"\n  ... and {len(remade) - len(shown)} more" if len(remade) > len(shown) else ""
        raise ConversionError(
            f"{type(module).__name__}: transformers keeps {len(remade)} tensors in another layout than the module:\n"
            + "\n".join(shown)
            + more,
            hint="save the checkpoint with `save_pretrained(..., save_original_format=False)`, or write a family",
        )
    return found


def ignored_names(module: torch.nn.Module, names: Mapping[str, str]) -> tuple[str, ...]:
    """Tensors of the checkpoint that transformers itself leaves out for this module."""
    patterns = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    state = module.state_dict()
    return tuple(
        stored
        for stored, name in names.items()
        if name not in state and any(re.search(pattern, name) for pattern in patterns)
    )
