"""A training without Ray: the job of one rank, from a YAML file, under torchrun, `srun`, MPI or Kubernetes.

Owns the job file and the lines that rank 0 writes. The one decision: the loop is
the one that Ray's workers run, and the workspace is the same; a run can go from one launcher to the other.
"""

import functools
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal, TextIO, get_type_hints

from pydantic import TypeAdapter, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from pipeline.errors import ParameterError, nearest_name
from pipeline.training.config import TrainConfig
from pipeline.training.device import choose_device, num_cuda_devices
from pipeline.training.failure import as_pipeline_error
from pipeline.training.launch.preflight import met
from pipeline.training.loop import TrainResult, train
from pipeline.training.rank_sources import ENVIRONMENT_STORE, derive_place
from pipeline.training.reporter import SilentReporter
from pipeline.training.session import TrainJob
from pipeline.training.start.weights import StartingWeights
from pipeline.training.tasks.model import read_model_config
from pipeline.training.tasks.opening import opener_of
from pipeline.training.worker import WorkerContext


class LineReporter:
    """Writes each report as a line of JSON."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def _write(self, kind: str, **values: Any) -> None:
        self._stream.write(json.dumps({"time": round(time.time(), 3), "kind": kind, **values}) + "\n")
        self._stream.flush()

    def metrics(self, values: Mapping[str, float], *, step: int | None = None) -> None:
        """One line."""
        self._write("metrics", step=step, values=dict(values))

    def progress(self, done: float, *, total: float | None, unit: str, note: str = "") -> None:
        """One line."""
        self._write("progress", done=done, total=total, unit=unit, note=note)

    def note(self, text: str) -> None:
        """One line."""
        self._write("note", text=text)


def run_job(
    file: Path, *, environment: Mapping[str, str], stream: TextIO, open_weights: Callable[[str], StartingWeights]
) -> TrainResult:
    """Train the job of a file as the rank that the environment says.

    Args:
        file: the job.
        environment: of this process; launchers say in it which rank this is.
        stream: takes rank 0's lines.
        open_weights: opens what `initial` names, a path or URL; must pickle.

    Raises:
        ParameterError: the file is wrong, the launchers disagree, or a device is not there.
        PipelineError: as `train`.
    """
    fields_of_job = read_job(file)
    place = derive_place(environment)
    device = choose_device(
        fields_of_job.pop("device", "auto"),
        gpus_per_worker=1.0 if num_cuda_devices() else 0.0,
        available_gpus=float(num_cuda_devices()),
    )
    worker = WorkerContext(
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        device=device.device,
        device_reason=device.reason,
        store_address=_free_address(place.store_address),
        num_threads=max(1, (os.cpu_count() or 1) // _ranks_here(environment, place.world_size)),
    )
    dataset, workspace = fields_of_job.pop("dataset"), fields_of_job.pop("workspace")
    open_initial = _initial(fields_of_job, file=file, open_weights=open_weights)
    config = TrainConfig(**fields_of_job)
    job = TrainJob(
        config=config,
        workspace=workspace,
        open_dataset=opener_of(Path(dataset), config),
        open_initial=open_initial,
        project_root=str(file.parent.resolve()),
    )
    reporter = LineReporter(stream) if worker.is_first else SilentReporter()
    reporter.note(f"rank {place.rank} of {place.world_size} by {place.source}, on {device.device}: {device.reason}")
    try:
        worker, found = met(worker, workspace=workspace)
        reporter.note(str(found))
        return train(worker, job, reporter=reporter)
    except Exception as error:  # a rank's boundary: its error says what it is and whose
        raise as_pipeline_error(error, rank=worker.rank) from error


def _initial(
    fields_of_job: dict[str, Any], *, file: Path, open_weights: Callable[[str], StartingWeights]
) -> Callable[[], StartingWeights] | None:
    """The way to the weights that `initial` names; puts their identity, and their config where none is given, in place.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
        ParameterError: adapters are asked for.
    """
    if fields_of_job.get("lora") is not None:
        raise ParameterError(
            f"{file}: lora: adapters are merged by the stage `train.fsdp`, and a job file has none",
            hint="train them by a flow, as flows/finetune.yaml does; or leave `lora` out",
        )
    initial = fields_of_job.get("initial")
    if initial is None:
        return None
    place = initial if "://" in initial else str(file.parent.resolve() / initial)
    weights = open_weights(place)
    fields_of_job["initial"] = weights.sketch()
    fields_of_job.setdefault("model", weights.config())
    return functools.partial(open_weights, place)


def read_job(file: Path) -> dict[str, Any]:
    """The fields of a job file: `dataset`, `workspace`, `device`, and those of `TrainConfig`.

    Raises:
        ParameterError: the file cannot be read, a field is unknown, missing or of another type; all at once.
    """
    try:
        found = YAML(typ="safe", pure=True).load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        raise ParameterError(f"{file}: cannot be read as YAML: {error}") from error
    if not isinstance(found, dict):
        raise ParameterError(f"{file}: must be a mapping of fields, found {type(found).__name__}")
    values, problems = _typed(found)
    if problems:
        raise ParameterError(f"{file}: " + "; ".join(problems), hint="the fields are those of `train.fsdp`")
    for name in ("dataset", "workspace"):
        if "://" not in values[name]:
            values[name] = str(file.parent.resolve() / values[name])
    if isinstance(values.get("model"), str) and ":" not in values["model"]:
        values["model"] = read_model_config(file.parent / values["model"])
    return values


def _typed(found: Mapping[Any, Any]) -> tuple[dict[str, Any], list[str]]:
    """The values that are right, and what is wrong with the others."""
    known = {one.name: one for one in fields(TrainConfig)}
    hints: dict[str, Any] = get_type_hints(TrainConfig, include_extras=True)
    hints |= {"dataset": str, "workspace": str, "device": Literal["auto", "cpu", "cuda"]}
    values: dict[str, Any] = {}
    problems = []
    for name, value in found.items():
        if name not in hints:
            guess = nearest_name(str(name), list(hints))
            problems.append(f"{name}: unknown field" + (f"; did you mean {guess!r}?" if guess else ""))
            continue
        try:
            values[name] = TypeAdapter(hints[name]).validate_python(value)
        except ValidationError as error:
            problems.append(f"{name}: {error.errors()[0]['msg']}, found {value!r}")
    required = {name for name, one in known.items() if one.default is MISSING and one.default_factory is MISSING}
    if "initial" in found:
        required.discard("model")  # the weights bring their config
    problems += [f"{name}: missing" for name in ("dataset", "workspace", *sorted(required)) if name not in found]
    return values, problems


def _free_address(address: str) -> str:
    """A port of the system's choice where one rank alone has none to agree on."""
    host, _, port = address.rpartition(":")
    if address == ENVIRONMENT_STORE or port != "0":
        return address
    with socket.socket() as listener:
        listener.bind((host, 0))
        return f"{host}:{listener.getsockname()[1]}"


def _ranks_here(environment: Mapping[str, str], world_size: int) -> int:
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_TASKS_PER_NODE"):
        number = environment.get(name, "").partition("(")[0].partition(",")[0]
        if number.isdigit():
            return int(number)
    return 1 if "JOB_COMPLETION_INDEX" in environment else world_size  # one pod, one rank
