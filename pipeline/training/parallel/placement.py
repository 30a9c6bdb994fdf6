"""Which rank stands where on the mesh, so that the ranks with the most traffic are on one node.

Owns the order. Knows nothing of processes; nodes are names. The one decision: `tensor` ranks exchange activations
several times in every block, so a group of them never spans two nodes, and nodes of unequal size are refused there
rather than filled unevenly.
"""

import socket
from collections import Counter
from collections.abc import Sequence

import torch.distributed as dist

from pipeline.errors import ParameterError
from pipeline.training.parallel.mesh import MeshPlan
from pipeline.training.worker import WorkerContext


def order_of_ranks(worker: WorkerContext, plan: MeshPlan) -> list[int] | None:
    """`place` of the nodes that the ranks are on, by their host names; None where no axis cuts the model.

    Launchers number the ranks of a node one after the other, and then nothing moves; where axes do not cut the model,
    an order that a launcher chose is kept. All ranks call this together.
    """
    if plan.data_ranks == worker.world_size:
        return None
    nodes: list[str] = [""] * worker.world_size
    dist.all_gather_object(nodes, socket.gethostname())
    return place(nodes, plan)


def place(nodes: Sequence[str], plan: MeshPlan) -> list[int]:
    """Ranks in the order of the mesh.

    Args:
        nodes: the node of each rank, by rank.
        plan: sizes of the axes; their product is the number of ranks.

    Returns:
        Position on the mesh (row-major, outermost axis first) -> rank. Ranks of one node are neighbours, in the order
        of their numbers; nodes come in the order of their first rank.

    Raises:
        ParameterError: with `tensor` above 1, nodes hold unequal numbers of ranks, or a number that `tensor` does not
            divide.
    """
    counts = Counter(nodes)
    if plan.tensor > 1:
        held = ", ".join(f"{node}: {count}" for node, count in sorted(counts.items()))
        if len(set(counts.values())) > 1:
            raise ParameterError(
                f"mesh: tensor {plan.tensor} needs nodes with equally many workers, found {held}",
                hint="give each node the same number of workers, or leave `mesh.tensor` out",
            )
        if next(iter(counts.values())) % plan.tensor:
            raise ParameterError(
                f"mesh: tensor {plan.tensor} does not divide the workers of a node, found {held}; a group would "
                "span two nodes",
                hint="make `mesh.tensor` a divisor of the workers of a node",
            )
    first = {node: rank for rank, node in reversed(list(enumerate(nodes)))}
    return sorted(range(len(nodes)), key=lambda rank: (first[nodes[rank]], rank))
