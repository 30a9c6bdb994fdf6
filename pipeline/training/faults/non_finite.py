"""Steps whose gradients are not finite.

Owns how many were skipped, what comes after too many, and how far the data has moved on against the steps. Knows
nothing of gradients or checkpoints. The one decision: a skipped step changes no parameter, while schedule and data go
on; and after a rollback the rows since the commit are not met again, because the same rows at the same weights would
end the same way (Chowdhery et al., "PaLM", 2022, section 5.1, go back about 100 steps and leave out 200 to 500
batches).
"""

from dataclasses import dataclass
from typing import Any

from pipeline.training.fault_policy import NonFinitePolicy


@dataclass(kw_only=True)
class NonFiniteSteps:
    """Counts of one training; equal on every rank, and saved with every checkpoint (a `Stateful`)."""

    policy: NonFinitePolicy
    skipped: int = 0
    """Of the whole training."""
    in_a_row: int = 0
    rollbacks: int = 0
    rolled_back_to: int = -1
    """Step of the last rollback's commit; -1 where there was none."""
    data_offset: int = 0
    """Rows of step s are those of position s + offset in the data."""

    def may_skip(self) -> bool:
        """Count one more step that is not finite; True where training may go on behind it."""
        self.in_a_row += 1
        if self.in_a_row > self.policy.skip:
            return False
        self.skipped += 1
        return True

    def finite(self) -> None:
        """A step was finite."""
        self.in_a_row = 0

    def roll_back(self, before: "NonFiniteSteps", *, to: int, step: int) -> bool:
        """Go on at step `to` with the rows after those of `step`; False where this commit had its chance.

        Args:
            before: the counts as they were, for those here have come back from the commit.
            to: steps done in the commit.
            step: the last one (from 0) that was not finite.
        """
        if to == before.rolled_back_to:
            return False
        self.skipped, self.rollbacks = before.skipped, before.rollbacks + 1
        self.in_a_row, self.rolled_back_to = 0, to
        self.data_offset = before.data_offset + step + 1 - to
        return True

    def state_dict(self) -> dict[str, Any]:
        """The counts by name."""
        return {name: getattr(self, name) for name in _SAVED}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take counts up again."""
        for name in _SAVED:
            setattr(self, name, state[name])


_SAVED = ("skipped", "in_a_row", "rollbacks", "rolled_back_to", "data_offset")
