"""Where the loop says what happens.

Owns the part of a reporter that training needs, and the reporter of ranks that stay silent. Knows nothing of trackers
or of how reports travel. The one decision: rank 0 alone reports.
"""

from collections.abc import Mapping
from typing import Protocol


class Reporter(Protocol):
    """Every method returns at once and never raises."""

    def metrics(self, values: Mapping[str, float], *, step: int | None = None) -> None:
        """Record metric values at a step."""
        ...

    def progress(self, done: float, *, total: float | None, unit: str, note: str = "") -> None:
        """Say how far training is."""
        ...

    def note(self, text: str) -> None:
        """Record a line that a person should see."""
        ...


class SilentReporter:
    """Of ranks other than 0."""

    def metrics(self, values: Mapping[str, float], *, step: int | None = None) -> None:
        """Nothing."""

    def progress(self, done: float, *, total: float | None, unit: str, note: str = "") -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""
