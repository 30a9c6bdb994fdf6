"""When a failed attempt is tried again.

Pure. The one decision: only infrastructure failures are retried; code that raised once will raise again, and a gate
does not change its mind.
"""

from pipeline.errors import FailureClass

MAX_BACKOFF_SECONDS = 60.0


def next_delay(failure_class: FailureClass, *, attempt: int, max_attempts: int, backoff_seconds: float) -> float | None:
    """Seconds until the next attempt, doubling each time up to a minute; None where there is none."""
    if failure_class is not FailureClass.INFRA or attempt >= max_attempts:
        return None
    return float(min(backoff_seconds * 2 ** (attempt - 1), MAX_BACKOFF_SECONDS))
