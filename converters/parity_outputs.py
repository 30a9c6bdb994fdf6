"""The third level of parity: what both models give, by name, and how both continue.

Owns how outputs are compared and how a model without a cache of its own continues a prompt. Numpy only; a model is a
function from arrays to arrays. The one decision: a continuation re-reads a text of fixed length, so a compiled model
compiles once, and what lies to the right of a token cannot change it.

Shape suffixes: B rows, T positions, V vocabulary, N continued tokens.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from converters.parity_blocks import as_torch_lays_out, relative_errors
from converters.parity_report import ContinuedPrompt, OutputAgreement
from pipeline.errors import ConversionError
from pipeline.evaluation.metrics import compare_logits, matched_prefix, topk_overlap
from pipeline.models.description import Arrays, ModelKind

Forward = Callable[[Mapping[str, NDArray[Any]]], Arrays]
"""Inputs by name to float32 outputs by name."""

LOGITS = "logits"
"""Outputs of this name, or that begin with it, are distributions over their last axis."""
TOP_K = 10
TOKEN_INPUTS: Mapping[ModelKind, str] = {
    ModelKind.CAUSAL_LM: "input_ids",
    ModelKind.SEQ2SEQ_LM: "decoder_input_ids",
    ModelKind.SPEECH_TO_TEXT: "decoder_input_ids",
}
"""The input that grows while a model of this kind generates."""
_MASKS = {"input_ids": "attention_mask", "decoder_input_ids": "decoder_attention_mask"}


def compare_outputs(reference: Arrays, candidate: Arrays) -> tuple[tuple[OutputAgreement, ...], tuple[str, ...]]:
    """Compare every output of the Flax model with torch's of the same name.

    Returns:
        The agreements in the order of `candidate`, and the names that only torch gives.

    Raises:
        ConversionError: the Flax model gives a name that torch does not, or another shape; lists all.
    """
    complaints, found = [], []
    for name, ours in candidate.items():
        theirs = reference.get(name)
        if theirs is None:
            complaints.append(f"  {name}: torch gives {', '.join(reference) or 'nothing'}")
        elif (aligned := as_torch_lays_out(ours, shape=theirs.shape)) is None:
            complaints.append(f"  {name}: Flax gives the shape {ours.shape}, torch {theirs.shape}")
        else:
            found.append(_agreement(name, theirs, aligned))
    if complaints:
        raise ConversionError("the outputs of both models cannot be compared:\n" + "\n".join(complaints))
    return tuple(found), tuple(name for name in reference if name not in candidate)


def continue_by_forward(
    forward: Forward, *, inputs: Mapping[str, NDArray[Any]], tokens: str, prompt_tokens: int, num_tokens: int
) -> NDArray[np.int32]:
    """int32 [B, N]: the most likely token, appended `num_tokens` times, without a cache.

    Args:
        forward: gives `logits` [B, T, V].
        inputs: all inputs; those of `tokens` are the prompt.
        tokens: the input that grows; its first `prompt_tokens` positions are kept.
        prompt_tokens: of each row.
        num_tokens: how many follow.
    """
    prompts_BT = np.asarray(inputs[tokens])[:, :prompt_tokens]
    text_BT = np.pad(prompts_BT, ((0, 0), (0, num_tokens))).astype(np.int32)
    given = {**inputs, tokens: text_BT}
    mask = _MASKS[tokens]
    if mask in inputs:
        given[mask] = np.ones_like(text_BT)
    for position in range(prompt_tokens, prompt_tokens + num_tokens):
        text_BT[:, position] = forward(given)[LOGITS][:, position - 1].argmax(axis=-1)
    return text_BT[:, prompt_tokens:]


def continued(reference_BN: NDArray[Any], candidate_BN: NDArray[Any]) -> tuple[ContinuedPrompt, ...]:
    """Both continuations of every prompt, with how far they agree."""
    matched = matched_prefix(reference_BN, candidate_BN)
    return tuple(
        ContinuedPrompt(reference=tuple(map(int, theirs)), candidate=tuple(map(int, ours)), matched=int(count))
        for theirs, ours, count in zip(reference_BN, candidate_BN, matched, strict=True)
    )


def _agreement(name: str, reference: NDArray[Any], candidate: NDArray[Any]) -> OutputAgreement:
    max_relative, _ = relative_errors(reference, candidate)
    is_finite = bool(np.isfinite(max_relative))
    max_abs = float(np.abs(reference - candidate).max(initial=0.0)) if is_finite else float("inf")
    shape = tuple(reference.shape)
    if not name.startswith(LOGITS) or reference.ndim < 2 or not is_finite:
        return OutputAgreement(name=name, shape=shape, max_abs=max_abs, max_relative=max_relative)
    rows = (1, -1, shape[-1])
    found = compare_logits(reference.reshape(rows), candidate.reshape(rows))
    return OutputAgreement(
        name=name,
        shape=shape,
        max_abs=max_abs,
        max_relative=max_relative,
        mean_kl=float(found.kl_BT.mean()),
        max_kl=float(found.kl_BT.max()),
        top1_agreement=float(found.same_top1_BT.mean()),
        topk_overlap=float(topk_overlap(reference, candidate, k=min(TOP_K, shape[-1])).mean()),
    )
