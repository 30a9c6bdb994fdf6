"""`train.fsdp`: train a torch model with FSDP2 on Ray Train workers.

Owns the checks before anything is launched, and the way of the final committed checkpoint into the stage's output.
Knows nothing of steps or ranks; that is `pipeline.training`. The one decision: everything that can be refused by
reading (device, batch arithmetic, vocabulary, precision) is refused here, before a worker starts.
"""

import functools
import importlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from converters.starting_weights import open_weights
from pipeline.artifacts.store import Store, open_store
from pipeline.data.arrays import ArrayDataset
from pipeline.data.dataset import TokenDataset, open_dataset
from pipeline.errors import ParameterError
from pipeline.models.module_file import MODULE_FILE
from pipeline.stages.parameters import TrainFsdpParameters
from pipeline.stages.protocol import Report, Reporter, StageContext, StageResult
from pipeline.stages.reporting import BufferedReporter
from pipeline.stages.starting_point import StartingPoint, inherit, starting_point
from pipeline.stages.user_module import is_function
from pipeline.training.checkpoints.checkpoint import CONFIG_NAME, DCP_DIRECTORY, STATE_NAME, TOKENIZER_NAME
from pipeline.training.checkpoints.commit import COMMIT_NAME, CheckpointCommit
from pipeline.training.config import TrainConfig
from pipeline.training.device import DeviceChoice, choose_device
from pipeline.training.faults.out_of_memory import rows_were_cut
from pipeline.training.launch.ray_train import Gang, GangResult, cluster_gpus, train_on_ray
from pipeline.training.launch.sizes import choose_sizes
from pipeline.training.loop import TrainResult
from pipeline.training.parallel.pipeline import check_stages
from pipeline.training.precision import check_precision
from pipeline.training.session import TrainJob
from pipeline.training.tasks.documents import check_documents
from pipeline.training.tasks.empty_model import build_empty
from pipeline.training.tasks.model import blocks_of, check_fits, model_config, read_model_config, shape_of
from pipeline.training.tasks.module_factory import check_module
from pipeline.training.tasks.module_task import check_supported, module_blocks
from pipeline.training.tasks.opening import opener_of
from pipeline.training.tasks.starting import check_start
from pipeline.training.updates.refusals import check_updates
from pipeline.training.updates.schedule import check_schedule
from pipeline.training.worker import backend_of

_KEPT = (DCP_DIRECTORY, CONFIG_NAME, MODULE_FILE, TOKENIZER_NAME, STATE_NAME, COMMIT_NAME)
"""Of a committed checkpoint, what the next stages read; votes and RNG states stay in the workspace."""
_MERGED_EXPORT = "pipeline.stages.merged_export"
"""By name, for it loads peft, which takes 2.7 s, and most trainings have no adapters."""
NOT_CONFIG = {"dataset", "model", "device", "max_worker_failures", "sources"}
"""Parameters that the loop does not read; all others are fields of `TrainConfig` by the same name."""


def run(context: StageContext[TrainFsdpParameters]) -> StageResult:
    """Train, and hand on the final committed checkpoint.

    Raises:
        ParameterError: the device is not there, the batch does not divide, the factory gives no module that can be
            trained, model and dataset do not fit.
        StageError: the loss became non-finite or a rank raised.
        ClusterError: workers died more often than allowed.
        CheckpointError: a checkpoint could not be written, or none of those that exist could be read.
    """
    parameters = context.parameters
    source = context.input("dataset")
    dataset = open_dataset(source.path, cache_bytes=parameters.loader_cache_bytes)
    rows = {split: dataset.num_rows(split) for split in ("train", "validation")}
    context.reporter.dataset("train", digest=source.digest, source=source.stage, facts={"rows": rows})
    given = context.inputs.get("initial")
    start = starting_point(
        parameters,
        committed=None if given is None else (given.path, given.digest),
        project_root=context.project_root,
    )
    config = config_of(parameters, dataset, project_root=context.project_root, start=start)
    gpus = context.resources.gpus or 0.0
    device = choose_device(parameters.device, gpus_per_worker=gpus, available_gpus=cluster_gpus())
    check_precision(config.precision, device=device.device)
    _check(config, dataset, context=context)
    gang = _gang(config, dataset, context=context, device=device)
    tensors = check_start(config, None if start is None else start.weights)
    context.reporter.note(f"training on {device.device} with {backend_of(device.device)}: {device.reason}")
    end = train_on_ray(
        TrainJob(
            config=config,
            workspace=context.workspace,
            open_dataset=opener_of(source.path, config),
            open_initial=None if start is None else functools.partial(open_weights, start.place),
            project_root=str(context.project_root),
        ),
        gang=gang,
        make_reporter=BufferedReporter,
        deliver=functools.partial(_replay, context.reporter),
    )
    result = end.training
    store, checkpoint = open_store(context.workspace), context.output("checkpoint")
    if start is not None and config.lora is not None:
        importlib.import_module(_MERGED_EXPORT).export_merged(
            store, result.commit, checkpoint, start=start, lora=config.lora, tensors=tensors
        )
    else:
        export_checkpoint(store, result.commit, checkpoint)
    if start is not None:
        inherit(start, checkpoint)
    is_cut = rows_were_cut(store, asked_rows=config.micro_batch_sequences)
    return StageResult(metrics=_metrics(result), facts=_facts(end, config, device=device, is_cut=is_cut))


def _gang(
    config: TrainConfig,
    dataset: TokenDataset | ArrayDataset,
    *,
    context: StageContext[TrainFsdpParameters],
    device: DeviceChoice,
) -> Gang:
    """The ranks, in every number that can take the same steps."""
    resources = context.resources
    sizes = choose_sizes(
        config,
        sequence_length=None if isinstance(dataset, ArrayDataset) else dataset.sequence_length,
        shape=None if isinstance(config.model, str) else shape_of(model_config(config.model)),
        min_workers=resources.min_workers,
        max_workers=resources.workers,
    )
    if resources.min_workers is not None:
        context.reporter.note(f"an elastic gang of {sizes}")
    return Gang(
        sizes=sizes.allowed,
        cpus_per_worker=resources.cpus,
        gpus_per_worker=resources.gpus or 0.0,
        device=device,
        max_worker_failures=context.parameters.max_worker_failures,
        memory_per_worker=resources.memory_bytes,
        labels=resources.labels,
        num_threads=max(1, (os.cpu_count() or 1) // sizes.allowed[-1]),
    )


def _facts(end: GangResult, config: TrainConfig, *, device: DeviceChoice, is_cut: bool) -> dict[str, Any]:
    result = end.training
    return {
        "device": device.device,
        "device_reason": device.reason,
        "backend": backend_of(device.device),
        "world_size": result.state.world_size,
        "world_sizes": list(end.world_sizes),
        # Sums are rounded in another order where the number of ranks changed, or of the passes that a step has.
        "bit_reproducible": len(set(end.world_sizes)) == 1 and not is_cut,
        "precision": config.precision,
        "weights": "last" if config.ema is None else f"moving average, decay {config.ema.decay:g}",
        "resumed_from_step": result.resumed_from_step,
        "checkpoint_generation": result.commit.key.generation,
    }


def config_of(
    parameters: TrainFsdpParameters,
    dataset: TokenDataset | ArrayDataset,
    *,
    project_root: Path,
    start: StartingPoint | None = None,
) -> TrainConfig:
    """The run's config.

    Raises:
        ParameterError: the config file is wrong, the kind of model is not that of the dataset, or a parameter is set
            that only a module of the user's own has.
        ArtifactError: there is neither a model nor a config beside the starting weights.
    """
    own = parameters.model is not None and is_function(parameters.model)
    is_arrays = isinstance(dataset, ArrayDataset)
    if own != is_arrays:
        held = "arrays" if is_arrays else "rows of tokens"
        raise ParameterError(
            f"model {parameters.model!r} is {'module:factory' if own else 'a config file'}, the dataset holds {held}",
            hint="a config file of transformers is trained on `data.text`, module:factory on `data.arrays`",
        )
    if not own and (parameters.model_arguments or parameters.loss != "cross_entropy"):
        raise ParameterError(
            f"model {parameters.model!r} is a config file, which has no factory and is trained by cross entropy",
            hint="leave out `model_arguments` and `loss`; they are for module:factory",
        )
    model: str | dict[str, Any] | None = parameters.model
    if parameters.model is None and start is not None:
        model = start.config()
    elif parameters.model is not None and not own:
        model = read_model_config(project_root / parameters.model)
    given = parameters.model_dump(exclude=NOT_CONFIG)
    if parameters.lora is not None:
        given["lora"] = parameters.lora.model_dump(exclude={"enabled"}) if parameters.lora.enabled else None
    given |= {"model": model, "initial": None if start is None else start.digest}
    return TypeAdapter(TrainConfig).validate_python(given)


def _check(
    config: TrainConfig, dataset: TokenDataset | ArrayDataset, *, context: StageContext[TrainFsdpParameters]
) -> None:
    """Model against the dataset; see `run`."""
    check_schedule(config)
    check_documents(config)
    if isinstance(dataset, ArrayDataset):
        check_supported(config)
        assert isinstance(config.model, str)
        module = check_module(
            config.model,
            arguments=config.model_arguments,
            project_root=str(context.project_root),
            dataset=dataset,
            loss=config.loss,
            seed=config.seed,
        )
        check_updates(module, module_blocks(module), config)
        return
    assert not isinstance(config.model, str)
    described = model_config(config.model)
    check_fits(described, vocabulary_size=dataset.vocabulary_size, sequence_length=dataset.sequence_length)
    model = build_empty(described)
    check_stages(model, config)
    # Adapters have names of their own, so ranks check groups of those.
    check_updates(model, blocks_of(model), config if config.lora is None else replace(config, parameter_groups=()))


def _metrics(result: TrainResult) -> dict[str, float]:
    state, unit = result.state, result.unit
    return {
        "train_loss": state.train_loss,
        **state.validation,
        "initial_validation_loss": state.initial_validation_loss,
        f"{unit}s_per_second": result.units_per_second,
        "validation_loss_change": state.validation_loss - state.initial_validation_loss,
        "num_parameters": float(result.num_parameters),
        f"num_{unit}s": float(state.units),
        "steps": float(state.step),
        "resumed_from_step": float(result.resumed_from_step),
    }


def export_checkpoint(store: Store, commit: CheckpointCommit, directory: Path) -> None:
    """Put the committed files of `_KEPT` into `directory`; hard links where both are on one file system."""
    source = store.local_path(commit.key.prefix, names=[entry.path for entry in commit.files])
    kept = [entry.path for entry in commit.files if entry.path.split("/")[0] in _KEPT]
    for name in kept:
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        try:
            os.link(source / name, target)
        except OSError:  # another file system, or one without hard links
            shutil.copyfile(source / name, target)
    (directory / COMMIT_NAME).unlink(missing_ok=True)
    (directory / COMMIT_NAME).write_bytes(commit.to_json())  # a copy that a resume has fetched is without it


def _replay(reporter: Reporter, reports: Sequence[Report]) -> None:
    """Tell `reporter` what rank 0 reported, where it could not be told live."""
    for report in reports:
        payload = report.payload
        if report.kind == "metrics":
            reporter.metrics(payload, step=report.step)
        elif report.kind == "progress":
            reporter.progress(payload["done"], total=payload["total"], unit=payload["unit"], note=payload["note"])
        elif report.kind == "note":
            reporter.note(payload["text"])
