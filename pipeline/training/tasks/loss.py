"""Cross entropy of next-token prediction, as sums.

Owns the loss and the held-out loss. Knows nothing of steps or reports. The one decision: losses are sums over tokens
that the caller divides once by the number of tokens of all ranks and micro-batches, so neither accumulation nor the
number of ranks changes the gradient.

Shapes: B rows, T tokens, S = T + 1, V vocabulary.
"""

from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from pipeline.training.parallel.context import positions_of
from pipeline.training.parallel.pipeline import PipelineModel
from pipeline.training.tasks.rows import TokenRows
from pipeline.training.worker import WorkerContext

IGNORED = -100
"""A target that counts for nothing."""


def loss_sum(model: nn.Module, inputs: Mapping[str, torch.Tensor], targets_BT: torch.Tensor) -> torch.Tensor:
    """Sum of the cross entropy over all targets that are not `IGNORED`, float32 []."""
    if isinstance(model, PipelineModel):
        total: torch.Tensor = model(inputs, targets_BT)
        return total
    return cross_entropy_sum(model(**inputs, use_cache=False).logits, targets_BT)


def cross_entropy_sum(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    """The same of logits that are there; they may be cut over the vocabulary.

    Logits are upcast once where they are bfloat16; in float32 nothing beside them is materialised.
    """
    total = nn.functional.cross_entropy(
        logits_BTV.flatten(0, 1).float(), targets_BT.reshape(-1), ignore_index=IGNORED, reduction="sum"
    )
    return total.full_tensor() if isinstance(total, DTensor) else total


def to_device(
    rows_BS: np.ndarray, worker: WorkerContext, *, places_BS: np.ndarray | None = None
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The model's inputs by keyword, and targets, int64 [B, T] each, of int32 rows [B, T + 1].

    Where ranks share a row, this rank's part of it, with the positions of its tokens. With `places_BS`, the place of
    each token in its document, attention and targets stay inside documents: transformers builds a block diagonal mask
    where `position_ids` do not rise by one.
    """
    tokens_BS = torch.from_numpy(rows_BS).to(worker.torch_device, dtype=torch.int64)
    inputs_BT, targets_BT = tokens_BS[:, :-1], tokens_BS[:, 1:]
    if places_BS is not None:
        positions_BS = torch.from_numpy(places_BS).to(worker.torch_device, dtype=torch.int64)
        targets_BT = targets_BT.masked_fill(positions_BS[:, 1:] == 0, IGNORED)
        return {"input_ids": inputs_BT, "position_ids": positions_BS[:, :-1]}, targets_BT
    positions_T = positions_of(inputs_BT.shape[1], worker.share, device=worker.torch_device)
    if positions_T is None:
        return {"input_ids": inputs_BT}, targets_BT
    place_BT = positions_T.expand(len(inputs_BT), -1)
    return {"input_ids": inputs_BT[:, positions_T], "position_ids": place_BT}, targets_BT[:, positions_T]


def held_out_rows(
    num_rows: int, worker: WorkerContext, *, max_rows: int, micro_batch_rows: int
) -> tuple[np.ndarray, int]:
    """A rank's part of up to `max_rows` of the `num_rows` held-out rows, spread evenly.

    Ranks run equally many forward passes (FSDP gathers in each), so the last ones are filled with rows that count for
    nothing.

    Returns:
        int64 [passes * micro_batch_rows], and how many of them, from the first, count.
    """
    num_chosen = min(max_rows, num_rows)
    chosen = np.linspace(0, num_rows - 1, num_chosen).round().astype(np.int64)
    share = worker.share
    passes = -(-num_chosen // (share.num_ranks * micro_batch_rows))
    mine = chosen[share.rank :: share.num_ranks]
    return np.resize(mine if len(mine) else chosen[:1], passes * micro_batch_rows), len(mine)


@torch.no_grad()
def validation_loss(
    model: nn.Module,
    dataset: TokenRows,
    worker: WorkerContext,
    *,
    max_rows: int,
    micro_batch_rows: int,
    document_masks: bool = False,
) -> float:
    """Mean cross entropy a target over up to `max_rows` held-out rows, spread evenly; the same on every rank."""
    padded, num_mine = held_out_rows(
        dataset.num_rows("validation"), worker, max_rows=max_rows, micro_batch_rows=micro_batch_rows
    )
    total = torch.zeros(2, dtype=torch.float64, device=worker.torch_device)
    model.eval()
    for first in range(0, len(padded), micro_batch_rows):
        chosen = padded[first : first + micro_batch_rows]
        places_BS = dataset.positions("validation", chosen) if document_masks else None
        inputs, targets_BT = to_device(dataset.rows("validation", chosen), worker, places_BS=places_BS)
        targets_BT = targets_BT.clone()  # inputs and targets share memory
        targets_BT[max(0, num_mine - first) :] = IGNORED
        total[0] += loss_sum(model, inputs, targets_BT)
        total[1] += (targets_BT != IGNORED).sum()
    model.train()
    dist.all_reduce(total)
    return float(total[0] / total[1])
