"""How a process that is about to end itself says why.

Owns the way out of a process that cannot raise any more, for its main thread is stuck. Knows no launcher: each sets the
channel its executor reads. The one decision: the words go out before the process ends, and at most once.
"""

import os
import sys
import threading
from collections.abc import Callable

from pipeline.errors import PipelineError

Channel = Callable[[PipelineError], None]
_PATIENCE_SECONDS = 2.0
"""A channel that hangs (storage away) does not keep the process alive."""


def _to_stderr(error: PipelineError) -> None:
    sys.stderr.write(f"error: {error}\n")
    sys.stderr.flush()


_channel: Channel = _to_stderr


def set_channel(channel: Channel) -> None:
    """Where last words of this process go; standard error until it is called."""
    global _channel
    _channel = channel


def end_process(error: PipelineError) -> None:
    """Say `error` and end this process at once, with the exit code of the error; does not return."""
    speaker = threading.Thread(target=_channel, args=(error,), name="last-words", daemon=True)
    speaker.start()
    speaker.join(_PATIENCE_SECONDS)
    os._exit(error.exit_code)
