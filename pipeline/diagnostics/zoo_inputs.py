"""Example inputs of a transformers model, from the signature of its `forward`.

Owns which keywords of a `forward` are filled, and how many image or sound tokens a text must hold. Knows no single
architecture; what a keyword is filled with stands in `zoo_values`. The one decision: the fullest set of inputs that the
model's own forward pass takes is the one it is measured with, and what it complains about decides what to try next.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from pipeline.diagnostics.zoo_values import BATCH, MAKERS, TOKENS, Facts

Inputs = dict[str, Any]

BESIDE: Mapping[str, tuple[str, ...]] = {
    "input_ids": ("attention_mask", "bbox", "mm_token_type_ids"),
    "pixel_values": ("image_grid_thw", "grid_thw", "image_grid_hws", "spatial_shapes", "pixel_attention_mask"),
    "pixel_values_videos": ("video_grid_thw",),
    "input_features": ("feature_lens", "input_features_mask", "feature_attention_mask"),
}
"""Keyword -> keywords that are filled too where `forward` has them."""
DECODER = ("decoder_input_ids",)
MODALITIES = ("input_ids", "pixel_values", "input_features", "input_values")
NEEDED: Mapping[str, tuple[str, ...]] = {
    "decision_transformer": ("actions", "rewards", "returns_to_go", "timesteps"),
    "llava_next": ("pixel_values", "image_sizes"),
    "llava_next_video": ("pixel_values", "image_sizes"),
    "llava_onevision": ("pixel_values", "image_sizes"),
    "mistral3": ("pixel_values", "image_sizes"),
    "lxmert": ("visual_feats", "visual_pos"),
    "kosmos-2": ("pixel_values", "image_embeds_position_mask"),
    "visual_bert": ("visual_embeds",),
}
"""Model type -> keywords that have a default and are needed all the same."""
_MAX_FORMS = 40
_MISMATCH = re.compile(r"tokens:? (\d+).*?features:?,? (\d+)", re.S)
_TOKEN_FIELDS = {
    "image": ("image_token_id", "image_token_index"),
    "video": ("video_token_id", "video_token_index"),
    "audio": ("audio_token_id", "audio_token_index"),
}


def candidates(model: PreTrainedModel) -> Iterator[Inputs]:
    """Inputs to try, the fullest first.

    Raises:
        LookupError: a keyword without a default is one that no value is known for.
    """
    facts = Facts(model, seed=0)
    sets = list(_keyword_sets(model, facts))
    if not sets:
        missing = ", ".join(name for name in _core(model, facts) if name not in MAKERS)
        raise LookupError(f"no example is known for its input {missing}")
    for names in sets:
        # Every keyword may have values of several forms; those in which most have their first form come first.
        forms = itertools.product(*(range(len(MAKERS[name])) for name in names))
        orders = sorted(forms, key=lambda chosen: (sum(1 for form in chosen if form), chosen))
        for order in orders[:_MAX_FORMS]:
            facts = Facts(model, seed=0)
            yield {name: MAKERS[name][form](facts) for name, form in zip(names, order, strict=True)}


def _core(model: PreTrainedModel, facts: Facts) -> list[str]:
    """What `forward` has no default for, and the main input."""
    required = [
        name
        for name, parameter in facts.parameters.items()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    main = model.main_input_name
    if main not in facts.parameters:
        main = required[0] if required else next(iter(facts.parameters))
    required += [name for name in NEEDED.get(model.config.model_type, ()) if name not in required]
    decoder = DECODER if getattr(model.config, "is_encoder_decoder", False) else ()
    return list(dict.fromkeys([*required, main, *(name for name in decoder if name in facts.parameters)]))


def _keyword_sets(model: PreTrainedModel, facts: Facts) -> Iterator[list[str]]:
    """Sets of keywords in the order of the signature, the largest first."""
    core = _core(model, facts)
    modalities = [name for name in MODALITIES if name in facts.parameters]
    fuller = ([*core, *modalities], [*core, *modalities[:2]], core)
    seen: list[set[str]] = []
    for wanted in (*map(_with_those_beside, fuller), core):
        chosen = {name for name in wanted if name in facts.parameters}
        if chosen not in seen and all(name in MAKERS for name in chosen):
            seen.append(chosen)
            yield [name for name in facts.parameters if name in chosen]


def _with_those_beside(names: Sequence[str]) -> list[str]:
    return [*names, *(beside for name in names for beside in BESIDE.get(name, ()))]


def place_tokens(inputs: Inputs, *, model: PreTrainedModel, complaint: str) -> Inputs | None:
    """The inputs with as many image, video or sound tokens as the model has features for; None where it does not say.

    Args:
        inputs: what the model complained about.
        model: the model.
        complaint: its words.
    """
    match = _MISMATCH.search(complaint)
    if match is None or "input_ids" not in inputs:
        return None
    tokens_found, features = int(match.group(1)), int(match.group(2))
    kind = next((kind for kind in ("audio", "video") if kind in complaint.lower()), "image")
    facts = Facts(model, seed=1)
    token = facts.find(*_TOKEN_FIELDS[kind], default=None)
    if tokens_found == features:
        features //= facts.width  # some count numbers, not features
    if token is None or features % BATCH or features == 0 or tokens_found == features:
        return None
    text = facts.tokens(TOKENS)
    special = torch.full((BATCH, features // BATCH), int(token))
    tokens = torch.cat([text[:, :4], special, text[:, 4:]], dim=1)
    placed: Inputs = {**inputs, "input_ids": tokens}
    if "attention_mask" in inputs:
        placed["attention_mask"] = torch.ones_like(tokens)
    if "mm_token_type_ids" in inputs:
        placed["mm_token_type_ids"] = (tokens == int(token)).to(torch.int64)
    return placed
