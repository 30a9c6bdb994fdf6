"""What a training stage of a flow will hold in memory, without training it.

Owns the way from a stage's parameters to the estimate of one rank. Knows nothing of how it is shown. The one decision:
ranks of a CPU stage share what this process may use of its machine, ranks of a GPU stage have a device each.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.data.arrays import ArrayDataset
from pipeline.data.dataset import open_dataset
from pipeline.stages.parameters import TrainFsdpParameters
from pipeline.stages.protocol import Resources
from pipeline.stages.starting_point import starting_point
from pipeline.stages.train_fsdp import config_of
from pipeline.training.device import num_cuda_devices
from pipeline.training.memory_limits import host_limits, least_of_each
from pipeline.training.parallel.memory_estimate import LIBRARIES_BYTES
from pipeline.training.session import TrainJob, make_task
from pipeline.training.tasks.memory_count import count_memory
from pipeline.training.tasks.memory_sizes import estimate_of
from pipeline.training.tasks.opening import opener_of
from pipeline.training.worker import WorkerContext


def estimate_stage(
    parameters: TrainFsdpParameters,
    *,
    resources: Resources,
    inputs: Mapping[str, tuple[Path, str]],
    project_root: Path,
    available_bytes: int | None,
) -> dict[str, Any]:
    """Bytes of one rank at its peak, by kind, and whether they are there; plain values.

    Args:
        parameters: of the stage.
        resources: of the stage.
        inputs: directory and digest of each input of the stage.
        project_root: what paths of the stage are relative to.
        available_bytes: of one rank; where it is None and ranks have no GPU, its share of what this process may use.

    Raises:
        ParameterError: the stage cannot be trained as it is.
    """
    opened = open_dataset(inputs["dataset"][0])
    start = starting_point(parameters, committed=inputs.get("initial"), project_root=project_root)
    config = config_of(parameters, opened, project_root=project_root, start=start)
    workers, on_gpu = resources.workers, _is_on_gpu(parameters, resources)
    opener = opener_of(inputs["dataset"][0], config)
    job = TrainJob(config=config, workspace="", open_dataset=opener, project_root=str(project_root))
    task, mesh, batch = make_task(job, world_size=workers)
    first = WorkerContext(rank=0, world_size=1, local_rank=0, device="cpu", device_reason="nothing is computed")
    size = count_memory(task, config, batch, worker=first)
    estimate = estimate_of(
        size, config, mesh=mesh, batch=batch, on_gloo=not on_gpu, keeps_snapshot=config.checkpoint_async
    )
    by_kind = dict(estimate.by_kind) | ({} if on_gpu else {"libraries": LIBRARIES_BYTES})
    if available_bytes is None and not on_gpu:
        available_bytes = least_of_each(host_limits(), num_ranks=workers)
    peak = sum(by_kind.values())
    return {
        "workers": workers,
        "device": "cuda" if on_gpu else "cpu",
        "tokens_a_step" if not isinstance(opened, ArrayDataset) else "examples_a_step": batch.units_per_step,
        "passes": batch.accumulation,
        "parameters": size.parameters,
        "trained": size.trained,
        "bytes": by_kind,
        "peak_bytes": peak,
        "available_bytes": available_bytes,
        "ok": available_bytes is None or peak <= available_bytes,
    }


def _is_on_gpu(parameters: TrainFsdpParameters, resources: Resources) -> bool:
    """True for ranks with a GPU each; where the flow leaves it open, by the devices of this machine."""
    if parameters.device == "cpu":
        return False
    if resources.gpus is None:
        return parameters.device == "cuda" or num_cuda_devices() > 0
    return resources.gpus > 0
