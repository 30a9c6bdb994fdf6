"""Rows that several ranks hold together.

Owns which tokens of a row a rank has, and attention over all of them. Knows nothing of models' weights. The one
decision: a rank gathers the keys and values of the whole row and attends from its own queries (Grattafiori et al., "The
Llama 3 Herd of Models", 2024, section 3.3.2). torch's ring (`torch.distributed.tensor.experimental.context_parallel`)
exists for CUDA's three fused kernels alone: none of the CPU's operators has one, and so nothing of it could be tried
without several GPUs. With grouped heads keys and values are the small part.

A row is cut into 2 N parts for N ranks, and rank r has parts r and 2 N - 1 - r: under a causal mask every rank then has
equally many pairs of query and key.

Shapes: B rows, T tokens of this rank, S = N T tokens of the row, H heads, K heads of keys, D head size.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_single_autograd
from transformers import AttentionInterface

from pipeline.training.worker import DataShare

ATTENTION = "pipeline_context"
"""Name under which transformers finds the attention. It has no mask of its own, so none is made."""


def positions_of(num_tokens: int, share: DataShare, *, device: torch.device) -> torch.Tensor | None:
    """Positions in the row of the tokens that a rank has, int64 [T]; None where it has the whole row.

    Args:
        num_tokens: S, a multiple of twice the ranks that share a row.
        share: this rank's.
        device: of the result.
    """
    if share.num_context_ranks == 1:
        return None
    return _positions(num_tokens, share.context_rank, share.num_context_ranks, device=device)


def _positions(num_tokens: int, rank: int, num_ranks: int, *, device: torch.device) -> torch.Tensor:
    parts = torch.arange(num_tokens, device=device).chunk(2 * num_ranks)
    return torch.cat([parts[rank], parts[2 * num_ranks - 1 - rank]])


def attend_across(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Let the model's attention see the tokens of all ranks of `group`, the ranks that share a row."""
    AttentionInterface.register(ATTENTION, _RowAttention(group))
    model.set_attn_implementation(ATTENTION)


class _RowAttention:
    """Causal attention from this rank's queries to the whole row."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(
        self,
        module: nn.Module,
        query_BHTD: torch.Tensor,
        key_BKTD: torch.Tensor,
        value_BKTD: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """What transformers asks of an attention: [B, T, H, D], and no weights."""
        ranks, rank = self._group.size(), self._group.rank()
        row = key_BKTD.shape[2] * ranks
        order_S = torch.cat([_positions(row, each, ranks, device=key_BKTD.device) for each in range(ranks)])
        mine_T = _positions(row, rank, ranks, device=key_BKTD.device)
        mixed_BHTD = nn.functional.scaled_dot_product_attention(
            query_BHTD,
            self._gathered(key_BKTD),
            self._gathered(value_BKTD),
            attn_mask=mine_T[:, None] >= order_S[None, :],
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=query_BHTD.shape[1] != key_BKTD.shape[1],
        )
        return mixed_BHTD.transpose(1, 2).contiguous(), None

    def _gathered(self, mine_BKTD: torch.Tensor) -> torch.Tensor:
        """[B, K, S, D], rank after rank; its gradient is summed over the ranks' queries."""
        return all_gather_single_autograd(mine_BKTD.contiguous(), 2, self._group)
