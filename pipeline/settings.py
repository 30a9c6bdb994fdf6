"""The environment and the project's place, read once.

Owns which environment variables the product reads, and what marks a project's directory. Nothing else looks into
`os.environ` for settings. The one decision: command-line options win over the environment, the environment over
defaults; paths in a flow and the default store start from the project, wherever the command is typed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

STORE_DIRECTORY = ".pipeline"
CACHE_NAME = "torch-jax-pipeline"
PROJECT_MARKERS = ("pyproject.toml", ".git", STORE_DIRECTORY)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What the environment says."""

    store: str | None
    """`PIPELINE_STORE`: fsspec URL or path of the store; `.pipeline/` in the project when absent."""
    tracking_uri: str | None
    """`MLFLOW_TRACKING_URI`: a tracking server; SQLite in the store when absent."""
    ray_address: str | None
    """`PIPELINE_RAY_ADDRESS`: an existing Ray cluster; a local head when absent."""

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> "Settings":
        """Take settings from a mapping such as `os.environ`; empty values count as absent."""
        return cls(
            store=environment.get("PIPELINE_STORE") or None,
            tracking_uri=environment.get("MLFLOW_TRACKING_URI") or None,
            ray_address=environment.get("PIPELINE_RAY_ADDRESS") or None,
        )


def cache_directory(environment: Mapping[str, str]) -> Path:
    """Where a user's programs keep what can be made again: `XDG_CACHE_HOME`, else `~/.cache`."""
    home = environment.get("XDG_CACHE_HOME") or ""
    return (Path(home) if Path(home).is_absolute() else Path.home() / ".cache") / CACHE_NAME


def find_project_root(start: Path) -> Path:
    """The nearest directory at or above `start` that looks like a project, else `start` itself (a directory)."""
    directory = start.resolve()
    if not directory.is_dir():
        directory = directory.parent
    for candidate in (directory, *directory.parents):
        if any((candidate / marker).exists() for marker in PROJECT_MARKERS):
            return candidate
    return directory
