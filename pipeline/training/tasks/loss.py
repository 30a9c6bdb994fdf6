"""Cross entropy of next-token prediction, as sums.

Owns the loss and the held-out loss. Knows nothing of steps or reports. The one decision: losses are sums over tokens
that the caller divides once by the number of tokens of all ranks and micro-batches, so neither accumulation nor the
number of ranks changes the gradient.

Shapes: B rows, T tokens, S = T + 1, V vocabulary.
"""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from pipeline.training.tasks.rows import TokenRows
from pipeline.training.worker import WorkerContext

IGNORED = -100
"""A target that counts for nothing."""


def loss_sum(model: nn.Module, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    """Sum of the cross entropy over all targets that are not `IGNORED`, float32.

    Logits are upcast once where they are bfloat16; in float32 nothing beside them is materialised.
    """
    logits_BTV = model(input_ids=inputs_BT, use_cache=False).logits
    return nn.functional.cross_entropy(
        logits_BTV.flatten(0, 1).float(), targets_BT.reshape(-1), ignore_index=IGNORED, reduction="sum"
    )


def to_device(rows_BS: np.ndarray, worker: WorkerContext) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, int64 [B, T] each, of int32 rows [B, T + 1]."""
    tokens_BS = torch.from_numpy(rows_BS).to(worker.torch_device, dtype=torch.int64)
    return tokens_BS[:, :-1], tokens_BS[:, 1:]


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
    passes = -(-num_chosen // (worker.world_size * micro_batch_rows))
    mine = chosen[worker.rank :: worker.world_size]
    return np.resize(mine if len(mine) else chosen[:1], passes * micro_batch_rows), len(mine)


@torch.no_grad()
def validation_loss(
    model: nn.Module, dataset: TokenRows, worker: WorkerContext, *, max_rows: int, micro_batch_rows: int
) -> float:
    """Mean cross entropy a token over up to `max_rows` held-out rows, spread evenly; the same on every rank."""
    padded, num_mine = held_out_rows(
        dataset.num_rows("validation"), worker, max_rows=max_rows, micro_batch_rows=micro_batch_rows
    )
    total = torch.zeros(2, dtype=torch.float64, device=worker.torch_device)
    model.eval()
    for first in range(0, len(padded), micro_batch_rows):
        inputs_BT, targets_BT = to_device(dataset.rows("validation", padded[first : first + micro_batch_rows]), worker)
        targets_BT = targets_BT.clone()  # inputs and targets share memory
        targets_BT[max(0, num_mine - first) :] = IGNORED
        total[0] += loss_sum(model, inputs_BT, targets_BT)
        total[1] += (targets_BT != IGNORED).sum()
    model.train()
    dist.all_reduce(total)
    return float(total[0] / total[1])
