"""How a rank opens what it trains on.

Owns which fields of a config say how data is read. Knows nothing of files. The one decision: a launcher hands on a
function and not a dataset, because threads and mapped files do not travel to another process.
"""

import functools
from collections.abc import Callable
from pathlib import Path

from pipeline.data.dataset import open_for_training
from pipeline.data.read_ahead import ReadAhead
from pipeline.training.config import TrainConfig


def opener_of(dataset: Path, config: TrainConfig) -> Callable[[], ReadAhead]:
    """A function that opens the directory `dataset` in a rank's own process; pickles."""
    return functools.partial(
        open_for_training,
        dataset,
        positions=config.document_masks,
        workers=config.loader_workers,
        cache_bytes=config.loader_cache_bytes,
    )
