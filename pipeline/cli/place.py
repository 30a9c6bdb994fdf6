"""Where a command works: store, state directory, tracking server, cluster.

Owns how options, cluster file and environment are put together. The one decision: options win over the cluster file,
the file over the environment, the environment over defaults, and the result is one value that verbs pass on.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from pipeline.artifacts.store import Store, open_store
from pipeline.cluster.cluster_file import ClusterFile, load_cluster
from pipeline.settings import STORE_DIRECTORY, Settings, find_project_root


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Everything a verb needs to find things."""

    store_url: str
    state_directory: Path
    """`.pipeline/` of the project: notes of local processes, local even where the store is remote."""
    tracking_uri: str | None
    """None for SQLite in the state directory."""
    address: str | None
    cluster: ClusterFile

    def open_store(self) -> Store:
        """The store itself."""
        return open_store(self.store_url)


def find_place(
    *, start: Path, store: str | None = None, address: str | None = None, cluster: Path | None = None
) -> Place:
    """Put the settings together; `start` is the flow's directory, or the current one."""
    settings = Settings.read(os.environ)
    file = ClusterFile.model_validate({}) if cluster is None else load_cluster(cluster)
    default = find_project_root(start) / STORE_DIRECTORY
    url = store or file.store or settings.store or str(default)
    if "://" not in url:
        url = str(Path(url).expanduser().absolute())
    return Place(
        store_url=url,
        state_directory=default if "://" in url else Path(url),
        tracking_uri=file.tracking_uri or settings.tracking_uri,
        address=address or file.address or settings.ray_address,
        cluster=file,
    )
