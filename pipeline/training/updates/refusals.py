"""What a config asks of updates and blocks, held against the model.

Owns the one call that refuses what cannot be, before a rank starts and again in each rank. Knows nothing of how updates
are computed. The one decision: it needs names and shapes alone, so a model without memory for its parameters will do.
"""

from collections.abc import Sequence

from torch import nn

from pipeline.errors import ParameterError
from pipeline.training.config import TrainConfig
from pipeline.training.updates.float8 import check_float8
from pipeline.training.updates.groups import check_patterns, hidden_matrices


def check_updates(model: nn.Module, blocks: Sequence[nn.Module], config: TrainConfig) -> frozenset[str]:
    """Refuse what cannot be updated or computed as asked.

    Args:
        model: whole, before anything is frozen; parameters may be on the meta device.
        blocks: of the model.
        config: the run.

    Returns:
        Names of the hidden matrices.

    Raises:
        ParameterError: a pattern matches nothing, a size is none of float8, or two parameters exclude each other.
    """
    if config.compile and config.activation_checkpointing == "selective":
        raise ParameterError(
            "compile: true with activation_checkpointing: selective: a compiled block is one operator to the policy "
            "and would be computed again as a whole",
            hint="set `activation_checkpointing: full`, or leave `compile` out",
        )
    matrices = hidden_matrices(model, blocks)
    check_patterns(model, config, matrices=matrices)
    if config.precision == "float8":
        check_float8(model, blocks)
    return matrices
