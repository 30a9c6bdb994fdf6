"""How much a training has seen.

Owns the count of units over all steps. Knows nothing of what a unit is. The one decision: it is kept with a checkpoint,
because with document masks a step has as many tokens as its rows have, and no formula gives their sum.
"""

from typing import Any


class UnitCount:
    """Tokens or examples of all steps that are done; a `Stateful` of checkpoints."""

    def __init__(self) -> None:
        self.total = 0

    def add(self, units: int) -> None:
        """A step is done."""
        self.total += units

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it up again."""
        self.total = int(state["total"])
