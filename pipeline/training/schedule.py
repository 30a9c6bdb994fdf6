"""The learning rate at a step.

Owns the schedule. Pure. The one decision: it is a function of the step alone, so resuming has no state to restore.
"""

import math


def cosine_with_warmup(step: int, *, peak: float, floor_ratio: float, warmup_steps: int, steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0 to `steps - 1`).

    Rises linearly to `peak` at step `warmup_steps - 1`, then follows half a cosine to `peak * floor_ratio` at the last
    step (Loshchilov and Hutter, "SGDR", 2017, without restarts).
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    decay_steps = max(1, steps - 1 - warmup_steps)
    progress = min(1.0, (step - warmup_steps) / decay_steps)
    return peak * (floor_ratio + (1.0 - floor_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress)))
