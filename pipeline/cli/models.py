"""Models that a command names, and what is refused before anything of them is read.

Owns the words of those refusals. Loads no framework. The one decision: what is wrong with a command ends with exit code
2 and says what would be right, before a second is spent on reading.
"""

from collections.abc import Sequence
from pathlib import Path

import converters
from pipeline.cli.place import find_place
from pipeline.cli.trackers import registered_source
from pipeline.errors import UsageError, nearest_name

PARAMETERS = "params"
DESCRIPTIONS = ("config.json", "program.json")
HINT = (
    "allowed: a Flax model directory (params/ with config.json or program.json), or a checkpoint: dcp/ or .metadata "
    "with *.distcp, *.safetensors, *.bin or *.pt, *.gguf, *.onnx"
)
MAX_NAMED = 10


def choose(option: str, value: str, allowed: Sequence[str]) -> None:
    """Refuse a value that an option does not have.

    Raises:
        UsageError: names the allowed ones and the nearest.
    """
    if value not in allowed:
        nearest = nearest_name(value, allowed)
        raise UsageError(
            f"{option} {value!r}; allowed: {', '.join(allowed)}", hint=f"did you mean {nearest!r}?" if nearest else ""
        )


def find_model(text: str) -> Path:
    """The local file or directory of a path, an fsspec URL or an MLflow model version.

    Raises:
        UsageError: there is no such file or directory, or it holds no model.
        CheckpointError: a URL cannot be fetched.
        ParameterError: a URL cannot be opened.
        TrackingError: the model registry is away or knows no such version.
    """
    if text.startswith("models:/"):
        text = registered_source(find_place(start=Path.cwd()), text)
    path = Path(converters.locate(text)) if "://" in text else Path(text).expanduser()
    if path.exists():
        if is_flax(path) or converters.recognised(path):
            return path
        raise UsageError(_unknown(path), hint=HINT)
    parent = path.parent
    names = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
    nearest = nearest_name(path.name, names)
    raise UsageError(f"{text}: no such file or directory", hint=f"did you mean {parent / nearest}?" if nearest else "")


def is_flax(path: Path) -> bool:
    """True for a Flax model directory: parameters with a description beside them."""
    return (path / PARAMETERS).is_dir() and any((path / name).is_file() for name in DESCRIPTIONS)


def find_flax(text: str) -> Path:
    """As `find_model`, of a Flax model directory.

    Raises:
        UsageError: it is none.
    """
    path = find_model(text)
    if not is_flax(path):
        raise UsageError(
            f"{text}: not a Flax model directory; one has {PARAMETERS}/ and {' or '.join(DESCRIPTIONS)}",
            hint=f"make one with: pipeline convert {text} --to DIR",
        )
    return path


def writable_directory(path: Path) -> None:
    """Make the directory where it is missing.

    Raises:
        UsageError: it is a file, or cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{path}: cannot be a directory: {error.strerror}", hint="name another directory") from error


def new_directory(path: Path) -> None:
    """Refuse a target that holds something.

    Raises:
        UsageError: it is a file, or not empty.
    """
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path}: is a file; a converted model is a directory", hint="name a new directory")
    if path.is_dir() and any(path.iterdir()):
        raise UsageError(f"{path}: exists and is not empty; nothing is ever overwritten", hint="name a new directory")


def _unknown(path: Path) -> str:
    if not path.is_dir():
        return f"{path}: not a file that a reader knows"
    found = sorted(entry.name for entry in path.iterdir())
    more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    return f"{path}: holds no model that a reader knows; found: {', '.join(found[:MAX_NAMED]) or 'nothing'}{more}"
