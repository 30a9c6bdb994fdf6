"""What a decoder block computes again in the backward pass.

Owns which operators a selective block keeps. Knows nothing of sharding. The one decision: a block draws the random
numbers of its first pass again when it is recomputed, so recomputing changes no gradient by a bit.

Kept for the backward pass of configs/models/llama-8m.json (H = 384, I = 1024), float32 values a token and block: none
7432, selective 4230, full 384, the block's input alone.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from pipeline.training.config import ActivationCheckpointing

_aten = torch.ops.aten
_KEPT = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten._scaled_mm.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    }
)
"""Operators with a cost of more than one pass over their inputs."""


def checkpoint_options(kind: ActivationCheckpointing) -> dict[str, Any]:
    """Keywords of `torch.utils.checkpoint.checkpoint` for `full` and `selective`."""
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}
    if kind == "selective":
        contexts: Callable[[], Any] = functools.partial(create_selective_checkpoint_contexts, _policy)
        options["context_fn"] = contexts
    return options


def _policy(context: Any, operator: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
    """Keep what `_KEPT` names."""
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
