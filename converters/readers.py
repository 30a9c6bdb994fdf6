"""Which reader opens a checkpoint.

Owns the order in which readers are asked. Knows nothing of their formats. The one decision: a format is recognised by
the files that are there, and what nothing recognises is refused with the list of what would be. A reader is a dotted
string that is loaded when a name looks like its format, because some need torch or transformers and most files do not.
"""

import importlib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from converters.float8 import DequantizedSource
from converters.source import CheckpointSource
from pipeline.errors import CheckpointError

READERS: Mapping[str, tuple[str, ...]] = {
    "converters.torch_dcp_reader:TorchDcpSource": ("dcp", ".metadata", "*.distcp"),
    "converters.safetensors_reader:SafetensorsSource": ("*.safetensors", "*.safetensors.index.json"),
    "converters.torch_file_reader:TorchFileSource": ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.bin.index.json"),
    "converters.gguf_reader:GgufSource": ("*.gguf",),
    "converters.onnx_reader:OnnxSource": ("*.onnx",),
}
"""Reader to the names, of the file or of something in the directory, for which it is asked; in the order of asking."""
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
    for reader in _asked(path):
        if reader.recognises(path):
            source: CheckpointSource = reader.open(path)
            return DequantizedSource(source) if DequantizedSource.is_needed(source.headers) else source
    raise CheckpointError(f"{path}: no checkpoint that a reader knows" + _found(path), hint=f"allowed: {ALLOWED}")


def recognised(path: str | Path) -> bool:
    """True where a reader knows what the file or directory holds; looks at names alone."""
    return any(reader.recognises(Path(path)) for reader in _asked(Path(path)))


def _asked(path: Path) -> Iterator[Any]:
    """The readers whose names are there, in order, each loaded when its turn comes."""
    try:
        names = [entry.name for entry in path.iterdir()] if path.is_dir() else [path.name]
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be listed: {error.strerror}") from error
    for dotted, patterns in READERS.items():
        if any(fnmatch(name, pattern) for name in names for pattern in patterns):
            module, _, reader = dotted.partition(":")
            yield getattr(importlib.import_module(module), reader)


def _found(path: Path) -> str:
    if path.is_file():
        return ""
    found = sorted(entry.name for entry in path.iterdir())
    more = f" and {len(found) - 10} more" if len(found) > 10 else ""
    return f"; found: {', '.join(found[:10]) or 'nothing'}{more}"
