"""Copies of parameters that have to stay equal.

Owns finding them and comparing them. Knows nothing of when. The one decision: what FSDP replicates, what `tensor` does
not cut and what two stages of a pipeline tie is never sent again after the start, so a copy that differs trains another
model and no loss shows it; the bits of all copies are added up and compared at every start and before every checkpoint.

A digest is the sum of a shard's values as integers, one number a parameter: two reductions of 8 bytes a parameter.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from pipeline.errors import ClusterError
from pipeline.training.parallel.mesh import TENSOR_AXIS, Mesh
from pipeline.training.parallel.pipeline import PipelineModel

_SHOWN = 3
_INTEGERS: Mapping[int, torch.dtype] = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_replicas(model: nn.Module, mesh: Mesh) -> None:
    """Compare the copies of every parameter, to the bit; called by all ranks together.

    Args:
        model: sharded, at rest.
        mesh: of all ranks.

    Raises:
        ClusterError: copies differ; names the parameters. All ranks raise it.
    """
    copies = _copies(model, mesh)
    if mesh.plan.data_ranks == mesh.root.size() and not copies:
        return
    problems = [text for group, copied in copies if (text := _different(group, copied))]
    some = torch.tensor(float(bool(problems)), device=mesh.root.device_type)
    dist.all_reduce(some, op=dist.ReduceOp.MAX)
    if some:
        raise ClusterError(
            "copies of parameters are not equal: " + ("; ".join(problems) or "those of other ranks"),
            hint="no checkpoint was written of them; a rank's memory or its build of torch is not that of the others",
        )


def _different(group: dist.ProcessGroup, copied: Mapping[str, torch.Tensor]) -> str:
    digests = torch.stack([_digest(parameter) for parameter in copied.values()])
    smallest, largest = digests.clone(), digests.clone()
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    names = [name for name, is_equal in zip(copied, smallest == largest, strict=True) if not is_equal]
    if not names:
        return ""
    more = ", ..." if len(names) > _SHOWN else ""
    ranks = ", ".join(map(str, dist.get_process_group_ranks(group)))
    return f"{len(names)} of {len(copied)} differ over ranks {ranks} ({', '.join(names[:_SHOWN])}{more})"


def _copies(model: nn.Module, mesh: Mesh) -> list[tuple[dist.ProcessGroup, dict[str, torch.Tensor]]]:
    """Groups of ranks, and the parameters of which each rank of a group has a copy."""
    named = dict(model.named_parameters())
    found = []
    names: tuple[str, ...] = mesh.fsdp.mesh_dim_names or ()
    if len(names) == 2 and mesh.fsdp.size(0) > 1:
        found.append((mesh.fsdp[names[0]].get_group(), named))
    tensor = mesh.axis(TENSOR_AXIS)
    if tensor is not None:
        whole = {
            name: item
            for name, item in named.items()
            if isinstance(item, DTensor) and isinstance(item.placements[-1], Replicate)
        }
        found.append((tensor.get_group(), whole))
    if isinstance(model, PipelineModel) and model.tied_copy is not None:
        found.append((model.ends, {"model.embed_tokens.weight": model.tied_copy}))
    return [(group, copied) for group, copied in found if copied]


def _digest(parameter: torch.Tensor) -> torch.Tensor:
    local = parameter.detach().to_local() if isinstance(parameter, DTensor) else parameter.detach()
    return local.contiguous().view(_INTEGERS[local.element_size()]).sum(dtype=torch.int64)
