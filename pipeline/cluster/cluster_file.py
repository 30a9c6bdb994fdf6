"""A cluster description (`configs/clusters/*.yaml`): where to run the same flow.

Owns its fields. The one decision: a cluster file says only *where*; nothing in it can change what a flow computes.
"""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from pipeline.cluster.capacity import Capacity
from pipeline.errors import UsageError


class ClusterFile(BaseModel):
    """An existing Ray cluster, or the local head when `address` is absent."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: str | None = Field(None, description="`host:port` of the cluster's GCS; the local head when absent.")
    cpus: float | None = Field(None, gt=0, description="CPUs of all nodes, for `plan` before anything is connected.")
    gpus: float = Field(0.0, ge=0, description="GPUs of all nodes.")
    memory_gib: float | None = Field(None, gt=0, description="Memory of all nodes in GiB.")
    store: str | None = Field(None, description="fsspec URL of the store; must be reachable from every node.")
    tracking_uri: str | None = Field(None, description="MLflow tracking server.")

    def capacity(self, fallback: Capacity) -> Capacity:
        """What the file promises; what it leaves out is taken from `fallback`."""
        if self.cpus is None:
            return fallback
        return Capacity(
            cpus=self.cpus,
            gpus=self.gpus,
            memory_bytes=int(self.memory_gib * 2**30) if self.memory_gib else fallback.memory_bytes,
            source=f"the cluster at {self.address or 'this machine'}, as its file says,",
        )


def load_cluster(path: Path) -> ClusterFile:
    """Read a cluster file.

    Raises:
        UsageError: the file is missing, no YAML, or holds unknown keys; all problems at once.
    """
    try:
        content = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
        return ClusterFile.model_validate(content or {})
    except FileNotFoundError as error:
        raise UsageError(f"cluster file {path} does not exist", hint="see configs/clusters/ for examples") from error
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        raise UsageError(f"cluster file {path} cannot be read: {error}") from error
    except ValidationError as error:
        lines = [f"  {path}: {'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
        allowed = ", ".join(ClusterFile.model_fields)
        raise UsageError("the cluster file is wrong:\n" + "\n".join(lines), hint=f"allowed keys: {allowed}") from error
