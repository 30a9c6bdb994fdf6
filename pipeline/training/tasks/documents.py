"""Rows whose documents do not see each other.

Owns what cannot be combined with that, and the proof that a model does it. Knows nothing of steps. The one decision:
the mask is the one that transformers builds for packed rows, and because not every family does, the first step of a
process holds the model against it.

Shapes: B rows, T tokens, V vocabulary.
"""

from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from pipeline.errors import ParameterError
from pipeline.training.config import TrainConfig
from pipeline.training.worker import WorkerContext

TokensAndPlaces = Mapping[str, np.ndarray]
"""`tokens` and `places`, int32 [B, T + 1] each; a place counts from 0 where a document begins."""
LIMIT = 1e-6
"""Largest logit difference of tokens whose document is the same, over the largest logit. Measured with random weights:
exactly 0 for Llama, GPT-2, Qwen, Mistral, Gemma, Phi, Falcon, OLMo; 0.001 for BLOOM, 0.03 for OPT, 0.09 for MPT."""


def check_documents(config: TrainConfig) -> None:
    """Refuse what `document_masks` does not go with.

    Raises:
        ParameterError: the model is a module of the user's own, or the mesh cuts rows or blocks.
    """
    if not config.document_masks:
        return
    if isinstance(config.model, str):
        raise ParameterError(
            "document_masks: arrays hold no documents", hint="leave it out; it is for datasets of `data.text`"
        )
    if config.mesh.context > 1 or config.mesh.pipeline > 1:
        raise ParameterError(
            f"document_masks with mesh {config.mesh.in_words}: attention over parts of a row, and blocks on other "
            "ranks, know no documents",
            hint="leave out `context` and `pipeline`, or `document_masks`",
        )


@torch.no_grad()
def prove_documents(model: nn.Module, worker: WorkerContext, *, num_rows: int, length: int, vocabulary: int) -> None:
    """Change the first half of a row and see that a document in the second half does not notice.

    All ranks call this together; two forward passes of the shape of a micro-batch, in evaluation mode.

    Raises:
        ParameterError: the family of the model mixes documents.
    """
    half = length // 2
    tokens_T = torch.arange(length) % vocabulary
    other_T = torch.where(torch.arange(length) < half, (tokens_T + 1) % vocabulary, tokens_T)
    places_T = torch.arange(length) - half * (torch.arange(length) >= half)
    given = {"position_ids": places_T.expand(num_rows, -1).to(worker.torch_device), "use_cache": False}
    was_training = model.training
    model.eval()
    first, second = (
        _whole(model(input_ids=tokens.expand(num_rows, -1).to(worker.torch_device), **given).logits)[:, half:].float()
        for tokens in (tokens_T, other_T)
    )
    model.train(was_training)
    difference = ((first - second).abs().max() / first.abs().max().clamp_min(torch.finfo(torch.float32).tiny)).double()
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    found = float(difference)
    if not found <= LIMIT:
        raise ParameterError(
            f"document_masks: a document of this model sees the one before it (its logits differ by {found:.2g} of the "
            "largest)",
            hint="transformers builds no mask for packed rows of this family; leave `document_masks` out",
        )


def _whole(logits_BTV: torch.Tensor) -> torch.Tensor:
    return logits_BTV.full_tensor() if isinstance(logits_BTV, DTensor) else logits_BTV
