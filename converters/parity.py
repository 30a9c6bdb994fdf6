"""Is the Flax model the torch model? Three levels of evidence for every kind of model and both roads.

Owns the order of the levels and which inputs they are given. Knows no formula, no format and no family. The one
decision: all three levels always run, on random inputs that break symmetries, because the worst faults of a conversion
have the right shape and wrong values: tensors alone do not show a wrong formula, outputs alone do not show where.

Shape suffixes: B rows, P prompt tokens, N continued tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from converters.families.registry import table_for
from converters.flax_activations import FlaxRunner
from converters.model_pair import ModelPair, load_pair
from converters.parity_blocks import compare_blocks, judge_precisely, pair_blocks
from converters.parity_outputs import (
    TOKEN_INPUTS,
    compare_outputs,
    continue_by_forward,
    continued,
)
from converters.parity_report import (
    BlockAgreement,
    ContinuedPrompt,
    OutputAgreement,
    ParityLimits,
    ParityReport,
    TensorAgreement,
)
from converters.parity_tensors import compare_tensors
from converters.torch_activations import precise_activations, torch_outputs, watching
from pipeline.evaluation.torch_predictor import TorchPredictor
from pipeline.models.description import Arrays, ModelKind

PROMPT_TOKENS = 8
CONTINUED_TOKENS = 16

Progress = Callable[[int, int, str], None]
"""Called with steps done, steps in all, and what was done."""
_NUM_STEPS = 4


def check_parity(
    source: str | Path,
    model: str | Path,
    *,
    limits: ParityLimits | None = None,
    seed: int = 0,
    continued_tokens: int = CONTINUED_TOKENS,
    project_root: str | Path | None = None,
    progress: Progress | None = None,
) -> ParityReport:
    """Compare the torch checkpoint `source` with the Flax model directory `model` that was made from it.

    Both run in float32 on the CPU. Levels: every tensor, mapped back, bit for bit; the output of every block; every
    named output, and for models that generate a greedy continuation.

    Args:
        source: the checkpoint.
        model: the Flax model directory.
        limits: what the levels are held against.
        seed: of the random inputs.
        continued_tokens: continued greedily by models that generate.
        project_root: where the factory of a module of the user's own is looked for; the working directory by default.
        progress: told after each level.

    Raises:
        CheckpointError: the checkpoint is missing, truncated or altered.
        ArtifactError: the Flax model or its conversion record is missing or unreadable.
        ParameterError: the factory of a module of the user's own cannot be imported.
        ConversionError: the two are not of one config, or cannot be compared; lists every complaint.
    """
    told = progress or (lambda done, total, what: None)
    checkpoint, directory = Path(source), Path(model)
    tensors = compare_tensors(checkpoint, model=directory)
    told(1, _NUM_STEPS, "tensors compared")
    pair = load_pair(checkpoint, model=directory, project_root=None if project_root is None else Path(project_root))
    told(2, _NUM_STEPS, "both models loaded")
    return compare_pair(
        pair, tensors=tensors, limits=limits, seed=seed, continued_tokens=continued_tokens, progress=progress
    )


def compare_pair(
    pair: ModelPair,
    *,
    tensors: TensorAgreement,
    limits: ParityLimits | None = None,
    seed: int = 0,
    continued_tokens: int = CONTINUED_TOKENS,
    progress: Progress | None = None,
) -> ParityReport:
    """The rest of `check_parity`, of two models that are loaded and whose tensors were compared.

    Raises:
        ConversionError: blocks or outputs cannot be compared; lists every complaint.
    """
    told = progress or (lambda done, total, what: None)
    inputs = pair.description.example_inputs(seed=seed)
    runner = FlaxRunner(pair.description, pair.candidate)
    limits = limits or ParityLimits()
    blocks, outputs, not_compared = _compare_inside(pair, runner=runner, inputs=inputs, limits=limits)
    told(3, _NUM_STEPS, "blocks and outputs compared")
    continuations = _continue(pair, runner=runner, inputs=inputs, num_tokens=continued_tokens)
    told(4, _NUM_STEPS, "continuations compared")
    return ParityReport(
        source=str(pair.checkpoint),
        model=str(pair.model),
        name=pair.description.name,
        kind=pair.description.kind.value,
        road=pair.manifest.road,
        inputs={name: f"{array.dtype} {list(array.shape)}" for name, array in inputs.items()},
        limits=limits,
        tensors=tensors,
        blocks=blocks,
        outputs=outputs,
        not_compared=not_compared,
        continuations=continuations,
    )


def _compare_inside(
    pair: ModelPair, *, runner: FlaxRunner, inputs: Arrays, limits: ParityLimits
) -> tuple[tuple[BlockAgreement, ...], tuple[OutputAgreement, ...], tuple[str, ...]]:
    """Both models on `inputs`: every block, every output, and the outputs that only torch gives.

    Blocks are decided in float64 where two float32 sides differ by more than the limit.

    Raises:
        ConversionError: blocks or outputs cannot be compared; lists every complaint.
    """
    ours, taps = runner.outputs_and_taps(inputs)
    pairs = pair_blocks(tuple(taps), blocks=_block_templates(pair, taps=tuple(taps)))
    with watching(pair.reference, pairs.values()) as activations:
        theirs = torch_outputs(pair.reference, inputs)
    outputs, not_compared = compare_outputs(theirs, ours)
    blocks = compare_blocks(pairs, taps=taps, activations=activations)
    if any(not block.max_relative <= limits.block_relative_error for block in blocks):
        precise = precise_activations(pair.reference, inputs, pairs.values())
        if precise is not None:
            blocks = judge_precisely(blocks, taps=taps, activations=activations, precise=precise)
    return blocks, outputs, not_compared


def _block_templates(pair: ModelPair, *, taps: Sequence[str]) -> Sequence[tuple[str, str]]:
    """A family declares them; a traced module has torch's own paths."""
    if pair.manifest.road == "trace":
        return [(path, path) for path in taps]
    return table_for(pair.config, names=tuple(pair.manifest.source_dtypes)).blocks


def _continue(
    pair: ModelPair, *, runner: FlaxRunner, inputs: Mapping[str, NDArray[np.generic]], num_tokens: int
) -> tuple[ContinuedPrompt, ...]:
    """Both continue the rows of `inputs`; nothing for a model that does not generate.

    A decoder of transformers goes through its own key-value cache, the way torch users run it, while Flax reads the
    whole text again: agreement then speaks for both ways of decoding.
    """
    tokens = TOKEN_INPUTS.get(pair.description.kind)
    if tokens is None or tokens not in inputs or num_tokens < 1:
        return ()
    prompt_tokens = min(PROMPT_TOKENS, inputs[tokens].shape[1])
    by_forward = partial(
        continue_by_forward, inputs=inputs, tokens=tokens, prompt_tokens=prompt_tokens, num_tokens=num_tokens
    )
    if pair.description.kind is ModelKind.CAUSAL_LM and hasattr(pair.reference, "generate"):
        prompts_BP = inputs[tokens][:, :prompt_tokens]
        theirs_BN = TorchPredictor(pair.reference).continue_greedily(prompts_BP, num_tokens=num_tokens)
    else:
        theirs_BN = by_forward(lambda given: torch_outputs(pair.reference, given))
    return continued(theirs_BN, by_forward(runner.outputs))
