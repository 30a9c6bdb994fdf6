"""Gemma 3 checkpoints that also see images: their language model.

Owns the rule table. Knows nothing of files. The one decision: the language model is converted, and what sees images is
carried along unchanged, so the checkpoint comes back whole.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from converters.families import llama
from converters.families.table import FamilyTable
from pipeline.models.decoders.readers import text_config

_IN_FILES = ("language_model.model.", "language_model.lm_head.weight")
_IN_MEMORY = ("model.language_model.", "lm_head.weight")
"""Prefix of the language model and name of its head: as `save_pretrained` writes them, and in a training checkpoint."""
_OTHERS = ("vision_tower", "multi_modal_projector")
_PARTS = "abcdefghij"
"""One letter for each component that a name may have inside a module."""


def table(config: Mapping[str, Any], names: Collection[str] = ()) -> FamilyTable:
    """The table for one checkpoint, from its transformers config.

    Raises:
        ParameterError: a size is missing or does not divide, or the config asks for what is not computed.
    """
    in_memory = any(name.startswith(_IN_MEMORY[0]) for name in names)
    prefix, head = _IN_MEMORY if in_memory else _IN_FILES
    plain = llama.table(text_config(config))

    def renamed(name: str) -> str:
        return head if name == llama.HEAD else prefix + name.removeprefix(llama.PREFIX)

    return replace(
        plain,
        facts={**plain.facts, "converted": "language model", "carried": list(_OTHERS)},
        rules=tuple(replace(rule, sources=tuple(map(renamed, rule.sources))) for rule in plain.rules),
        ignored=tuple(map(renamed, plain.ignored)),
        ties=tuple(replace(tie, tensor=renamed(tie.tensor), same_as=renamed(tie.same_as)) for tie in plain.ties),
        prefixes=(),
        carried=tuple(template for other in _OTHERS for template in _below(f"model.{other}" if in_memory else other)),
        blocks=tuple((_IN_MEMORY[0] + theirs.removeprefix(llama.PREFIX), ours) for theirs, ours in plain.blocks),
    )


def _below(module: str) -> list[str]:
    """Templates of every name inside a module."""
    parts = [f"{{{letter}:word}}" for letter in _PARTS]
    return [".".join([module, *parts[:depth]]) for depth in range(1, len(parts) + 1)]
