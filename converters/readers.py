"""Which reader opens a checkpoint.

Owns the order in which readers are asked. Knows nothing of their formats. The one decision: a format is recognised by
the files that are there, and what nothing recognises is refused with the list of what would be.
"""

from pathlib import Path

from converters.float8 import DequantizedSource
from converters.gguf_reader import GgufSource
from converters.onnx_reader import OnnxSource
from converters.safetensors_reader import SafetensorsSource
from converters.source import CheckpointSource
from converters.torch_dcp_reader import TorchDcpSource
from converters.torch_file_reader import TorchFileSource
from pipeline.errors import CheckpointError

READERS = (TorchDcpSource, SafetensorsSource, TorchFileSource, GgufSource, OnnxSource)
ALLOWED = (
    "dcp/ or .metadata with *.distcp (torch.distributed.checkpoint); *.safetensors with or without an index; *.bin, "
    "*.pt, *.pth (torch.save); *.gguf (llama.cpp); *.onnx with config.json"
)


def open_source(path: Path) -> CheckpointSource:
    """Open the checkpoint in the directory `path`, or the checkpoint that the file `path` is; reads headers only.

    Raises:
        CheckpointError: there is no such file, no reader recognises it, or it is damaged; names the files.
    """
    if not path.is_dir() and not path.is_file():
        raise CheckpointError(f"{path}: " + ("no file and no directory" if path.exists() else "no such directory"))
    for reader in READERS:
        if reader.recognises(path):
            source: CheckpointSource = reader.open(path)
            return DequantizedSource(source) if DequantizedSource.is_needed(source.headers) else source
    raise CheckpointError(f"{path}: no checkpoint that a reader knows" + _found(path), hint=f"allowed: {ALLOWED}")


def _found(path: Path) -> str:
    if path.is_file():
        return ""
    found = sorted(entry.name for entry in path.iterdir())
    more = f" and {len(found) - 10} more" if len(found) > 10 else ""
    return f"; found: {', '.join(found[:10]) or 'nothing'}{more}"
