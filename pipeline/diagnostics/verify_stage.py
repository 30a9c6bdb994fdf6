"""From a training stage of a flow to the experiment of `verify_resume`.

Owns what of the stage's parameters the experiment changes. The one decision: only the length of the run and what is
observed change; model, data, batch, optimizer and seed are the user's own.
"""

import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from converters.starting_weights import open_weights
from pipeline.data.arrays import ArrayDataset
from pipeline.data.dataset import TokenDataset, open_dataset
from pipeline.diagnostics.verify_resume import (
    OTHER_WORLD_TOLERANCE,
    Experiment,
    config_at,
    default_kills,
    verify_resume,
)
from pipeline.errors import ParameterError
from pipeline.stages.parameters import TrainFsdpParameters
from pipeline.stages.protocol import Resources
from pipeline.stages.starting_point import starting_point
from pipeline.stages.train_fsdp import config_of
from pipeline.training.config import TrainConfig
from pipeline.training.device import choose_device, num_cuda_devices
from pipeline.training.tasks.model import plan_run
from pipeline.training.tasks.opening import opener_of


def verify_stage(
    parameters: TrainFsdpParameters,
    *,
    resources: Resources,
    inputs: Mapping[str, tuple[Path, str]],
    project_root: Path,
    steps: int,
    checkpoint_every: int,
    kill_at: Sequence[int],
    every: bool,
    other_workers: int | None,
    notice: Callable[[str], None],
) -> dict[str, Any]:
    """Run the experiment on a stage with ranks of this machine; the report as plain values, and `tolerance`.

    Args:
        parameters: of the stage.
        resources: of the stage; its `workers` are killed and resume.
        inputs: directory and digest of each input of the stage.
        project_root: what paths of the stage are relative to.
        steps: optimizer steps of the experiment.
        checkpoint_every: steps between its checkpoints.
        kill_at: steps (from 0) to kill at; three of them where it is empty.
        every: kill once at every step.
        other_workers: ranks that go on too; half where it is None, 0 for none.
        notice: told what begins.

    Raises:
        ParameterError: a step to kill at is not one of the run's, or the stage cannot train here.
    """
    device = choose_device(
        parameters.device, gpus_per_worker=resources.gpus or 0.0, available_gpus=float(num_cuda_devices())
    )
    opened = open_dataset(inputs["dataset"][0])
    start = starting_point(parameters, committed=inputs.get("initial"), project_root=project_root)
    config = _shortened(
        config_of(parameters, opened, project_root=project_root, start=start),
        steps=steps,
        checkpoint_every=checkpoint_every,
    )
    half = resources.workers // 2 if resources.workers > 1 else 2
    other = half if other_workers is None else other_workers
    _check(config, opened, ranks=(resources.workers, other), device=device.device)
    with tempfile.TemporaryDirectory(prefix="pipeline-verify-resume-") as work:
        experiment = Experiment(
            config=config,
            open_dataset=opener_of(inputs["dataset"][0], config),
            open_initial=None if start is None else functools.partial(open_weights, start.place),
            project_root=str(project_root),
            work=Path(work),
            device=device.device,
        )
        report = verify_resume(
            experiment,
            world_size=resources.workers,
            other_world_size=other or None,
            kills=kill_at or (tuple(range(steps)) if every else default_kills(steps)),
            notice=notice,
        )
    return {**report.to_json(), "tolerance": OTHER_WORLD_TOLERANCE}


def _shortened(config: TrainConfig, *, steps: int, checkpoint_every: int) -> TrainConfig:
    return replace(
        config,
        steps=steps,
        checkpoint_every_steps=checkpoint_every,
        checkpoint_interval_seconds=None,
        checkpoint_async=False,  # so that a kill finds the checkpoint before it, and not by chance
        validate_every_steps=steps,
        log_every_steps=1,
        decay_steps=None,  # of a longer run
        warmup_steps=min(config.warmup_steps, steps),
    )


def _check(config: TrainConfig, dataset: TokenDataset | ArrayDataset, *, ranks: Sequence[int], device: str) -> None:
    """Refuse before time is spent on ranks that are killed; 0 ranks are none.

    Raises:
        ParameterError: so many ranks cannot train this.
    """
    length = None if isinstance(dataset, ArrayDataset) else dataset.sequence_length
    plan_run(config, sequence_length=length, world_size=ranks[0])
    for world_size in filter(None, ranks):
        plan_run(config_at(config, world_size=world_size), sequence_length=length, world_size=world_size)
        if device == "cuda" and world_size > num_cuda_devices():
            raise ParameterError(f"{world_size} ranks need as many GPUs on this machine", hint="see --other-workers")
