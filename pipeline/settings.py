"""The environment, read once.

Owns which environment variables the product reads. Nothing else looks into `os.environ` for settings. The one
decision: command-line options win over the environment, the environment over defaults.
"""

from collections.abc import Mapping
from dataclasses import dataclass


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
