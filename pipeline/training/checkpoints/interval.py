"""How long training waits between two checkpoints where the flow gives seconds, or leaves it to `auto`.

Owns Young's formula and the moment the next save is due. Pure: times are passed in. The one decision: rank 0 alone asks
its clock; what it finds travels in the agreement word, so ranks never disagree about a save.
"""

import math
from dataclasses import dataclass
from typing import Literal

from pipeline.training.config import TrainConfig

FIRST_SAVE_SECONDS = 60.0
"""auto, before a stall was measured: soon, because the first save is what measures it."""


def young_interval(*, stall_seconds: float, mttf_seconds: float) -> float:
    """Seconds between checkpoints that lose the least time: sqrt(2 x cost of a save x mean time to failure).

    Source: J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17 (1974). The cost of an
    asynchronous save is its stall, not its writing.
    """
    return math.sqrt(2.0 * stall_seconds * mttf_seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveInterval:
    """What the flow says about the time between saves."""

    seconds: float | Literal["auto"]
    num_devices: int
    device_mttf_hours: float
    """Of one device with all that it hangs on. The config's default: 7.9 h were measured on trainings of 1024 GPUs
    (Kokolis et al., Revisiting Reliability in Large-Scale Machine Learning Research Clusters, 2024)."""

    @property
    def mttf_seconds(self) -> float:
        """Mean time to failure of all devices together."""
        return self.device_mttf_hours * 3600.0 / self.num_devices

    def next_seconds(self, *, stall_seconds: float | None, write_seconds: float) -> float:
        """Seconds from the begin of one save to the begin of the next.

        Args:
            stall_seconds: what the last save cost training; None where there was none.
            write_seconds: what the last save took in the background; the next one does not begin earlier.
        """
        if self.seconds != "auto":
            return max(self.seconds, write_seconds)
        if stall_seconds is None:
            return FIRST_SAVE_SECONDS
        return max(young_interval(stall_seconds=stall_seconds, mttf_seconds=self.mttf_seconds), write_seconds)


def save_interval(config: TrainConfig, *, num_devices: int) -> SaveInterval | None:
    """What the config says; None where it counts steps."""
    if config.checkpoint_interval_seconds is None:
        return None
    return SaveInterval(
        seconds=config.checkpoint_interval_seconds,
        num_devices=num_devices,
        device_mttf_hours=config.device_mttf_hours,
    )
