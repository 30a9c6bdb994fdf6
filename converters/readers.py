"""Which reader opens a checkpoint.

Owns the order in which readers are asked. Knows nothing of their formats. The one decision: a format is recognised by
the files that are there, and what nothing recognises is refused with the list of what would be.
"""

from pathlib import Path

from converters.safetensors_reader import SafetensorsSource
from converters.source import CheckpointSource
from converters.torch_dcp_reader import TorchDcpSource
from pipeline.errors import CheckpointError

READERS = (TorchDcpSource, SafetensorsSource)


def open_source(path: Path) -> CheckpointSource:
    """Open the checkpoint in the directory `path`; reads headers only.

    Raises:
        CheckpointError: there is no such directory, no reader recognises it, or it is damaged; names the files.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such directory")
    for reader in READERS:
        if reader.recognises(path):
            return reader.open(path)
    found = sorted(entry.name for entry in path.iterdir())
    raise CheckpointError(
        f"{path}: no checkpoint that a reader knows; found: {', '.join(found[:10]) or 'nothing'}"
        + (f" and {len(found) - 10} more" if len(found) > 10 else ""),
        hint="allowed: dcp/ or .metadata with *.distcp (torch.distributed.checkpoint), *.safetensors with or without "
        "an index",
    )
