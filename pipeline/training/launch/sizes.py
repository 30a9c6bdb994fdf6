"""Which numbers of ranks a training may have.

Owns the choice out of a range. Pure. The one decision: the global batch never follows the number of ranks; one that
does not divide it, or that the mesh cannot have, is left out with its reason, and where none is left the error is that
of the largest.
"""

from dataclasses import dataclass

from pipeline.errors import ParameterError
from pipeline.training.config import TrainConfig
from pipeline.training.parallel.axes import ModelShape, plan_axes


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Numbers of ranks, ascending, at least one."""

    allowed: tuple[int, ...]
    left_out: tuple[tuple[int, str], ...]
    """Numbers inside the range with the reason against each."""

    def __str__(self) -> str:
        text = f"{', '.join(map(str, self.allowed))} workers"
        return text + "".join(f"; not {size}: {reason}" for size, reason in self.left_out)


def choose_sizes(
    config: TrainConfig,
    *,
    sequence_length: int | None,
    shape: ModelShape | None,
    min_workers: int | None,
    max_workers: int,
) -> Sizes:
    """The numbers of ranks that can take the same steps.

    Args:
        config: the run.
        sequence_length: tokens in a row; None where a row is one example.
        shape: of a language model, else None.
        min_workers: fewest ranks; None where the number is fixed.
        max_workers: most ranks.

    Raises:
        ParameterError: no number can; the reason against the largest.
    """
    allowed, refused = [], {}
    for size in range(min_workers or max_workers, max_workers + 1):
        try:
            plan_axes(config, world_size=size, sequence_length=sequence_length, shape=shape)
        except ParameterError as error:
            refused[size] = error
        else:
            allowed.append(size)
    if not allowed:
        raise refused[max_workers]
    return Sizes(
        allowed=tuple(allowed), left_out=tuple((size, error.message.splitlines()[0]) for size, error in refused.items())
    )
