"""The learning rate at a step.

Owns the schedules. Pure. The one decision: each is a function of the step alone, so resuming has no state to restore.
"""

import math

from pipeline.errors import ParameterError
from pipeline.training.config import TrainConfig


def learning_rate(step: int, config: TrainConfig) -> float:
    """Learning rate of optimizer step `step` (from 0 to `config.steps - 1`).

    Every schedule rises linearly to the peak at step `warmup_steps - 1`. Then, down to `peak x floor_ratio` at the last
    step: `cosine` follows half a cosine (Loshchilov and Hutter, "SGDR", 2017, without restarts); `linear` a line; `wsd`
    stays at the peak and falls by a line over the last `decay_steps` (warm-up, stable, decay: Hu et al., "MiniCPM",
    2024). `constant` stays at the peak to the end.
    """
    peak = config.learning_rate
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return peak
    first = config.warmup_steps
    if config.schedule == "wsd":
        first = max(first, config.steps - 1 - config.decay_steps_or_default)
    progress = min(1.0, max(0, step - first) / max(1, config.steps - 1 - first))
    above_floor = 0.5 * (1.0 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1.0 - progress
    floor = config.minimum_learning_rate_ratio
    return peak * (floor + (1.0 - floor) * above_floor)


def check_schedule(config: TrainConfig) -> None:
    """Refuse phases that the schedule does not have or that do not fit into the steps.

    Raises:
        ParameterError: `decay_steps` without wsd, or warm-up and decay longer than the run.
    """
    if config.decay_steps is None:
        return
    if config.schedule != "wsd":
        raise ParameterError(
            f"decay_steps: {config.decay_steps} is for schedule: wsd, found schedule: {config.schedule}",
            hint="leave `decay_steps` out, or set `schedule: wsd`",
        )
    if config.warmup_steps + config.decay_steps > config.steps:
        raise ParameterError(
            f"warmup_steps {config.warmup_steps} + decay_steps {config.decay_steps} are more than steps {config.steps}",
            hint=f"set `decay_steps` to at most {max(1, config.steps - config.warmup_steps)}",
        )
