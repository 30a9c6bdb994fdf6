"""`pipeline verify-resume`: a training stage of a flow, killed and resumed, against itself.

Owns the way from a flow to the experiment, and its table. The one decision: the stage's inputs come from the flow
itself, reused or run, so that what is verified is the user's model on the user's data.
"""

import functools
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.markup import escape

from pipeline.cli.place import Place, find_place
from pipeline.cli.run import run_to_end
from pipeline.cli.text import make_console, make_table, print_json
from pipeline.data.dataset import open_dataset
from pipeline.diagnostics.verify_resume import OTHER_WORLD_TOLERANCE, ResumeReport, default_kills, verify_resume
from pipeline.errors import UsageError, nearest_name
from pipeline.execution.reading import Reading
from pipeline.plan.graph import Flow, ResolvedStage, ancestors, open_flow
from pipeline.plan.planner import Action, make_plan
from pipeline.stages.parameters import TrainFsdpParameters
from pipeline.stages.train_fsdp import config_of
from pipeline.training.device import choose_device, num_cuda_devices

KIND = "train.fsdp"
_OTHER = {
    False: f"same rows, losses within {OTHER_WORLD_TOLERANCE:g}",
    True: "same rows; the model draws random numbers, other ranks draw others",
}


def run(
    *,
    flow_path: Path,
    stage: str,
    steps: int,
    checkpoint_every: int,
    kill_at: list[int],
    every: bool,
    other_workers: int | None,
    overrides: list[str],
    store: str | None,
    as_json: bool,
) -> int:
    """Verify one training stage; 0 where everything is equal, 1 where something differs.

    Raises:
        UsageError: the flow has no such stage, or both `kill_at` and `every` are given.
    """
    flow = open_flow(flow_path, overrides=overrides)
    place = find_place(start=flow.spec.file.parent, store=store)
    chosen = choose_stage(flow, stage)
    if kill_at and every:
        raise UsageError("--kill-at and --every exclude each other")
    kills = kill_at or (tuple(range(steps)) if every else default_kills(steps))
    path = _dataset(flow, chosen, place=place)
    parameters, resources = chosen.parameters, chosen.resources
    assert isinstance(parameters, TrainFsdpParameters)
    device = choose_device(
        parameters.device, gpus_per_worker=resources.gpus or 0.0, available_gpus=float(num_cuda_devices())
    )
    config = replace(
        config_of(parameters, open_dataset(path), project_root=flow.spec.project_root),
        steps=steps,
        checkpoint_every_steps=checkpoint_every,
        validate_every_steps=steps,
        log_every_steps=1,
        decay_steps=None,  # of a shorter run
        warmup_steps=min(parameters.warmup_steps, steps),
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="pipeline-verify-resume-") as work:
        report = verify_resume(
            config,
            open_dataset=functools.partial(open_dataset, path, verify=False),
            project_root=str(flow.spec.project_root),
            work=Path(work),
            world_size=resources.workers,
            other_world_size=_other(resources.workers) if other_workers is None else other_workers or None,
            kills=kills,
            device=device.device,
            notice=_notice,
        )
    if as_json:
        print_json(report.to_json())
    else:
        _print(report, stage=chosen.name)
    return 0 if report.ok else 1


def choose_stage(flow: Flow, name: str) -> ResolvedStage:
    """The training stage of that name; the only one where the name is empty.

    Raises:
        UsageError: there is none, or more than one.
    """
    trains = [stage for stage in flow.stages if stage.kind.name == KIND]
    names = [stage.name for stage in trains]
    if not trains:
        raise UsageError(f"{flow.spec.file}: no stage of this flow is a {KIND}")
    if not name and len(trains) == 1:
        return trains[0]
    for stage in trains:
        if stage.name == name:
            return stage
    nearest = nearest_name(name, names)
    raise UsageError(
        f"--stage: {f'no {KIND} stage {name!r}' if name else 'the flow trains more than once'}; there are: "
        f"{', '.join(names)}",
        hint=f"did you mean {nearest!r}?" if nearest else "",
    )


def _dataset(flow: Flow, stage: ResolvedStage, *, place: Place) -> Path:
    """The committed dataset of the stage; what is missing before it runs first."""
    wanted = set(ancestors(flow.stages, stage.name))
    before = replace(flow, stages=tuple(one for one in flow.stages if one.name in wanted))
    reference = stage.inputs["dataset"]
    store = place.open_store()
    for _ in range(2):
        reading = Reading(
            store=store,
            flow=flow.spec.name,
            project_root=flow.spec.project_root,
            environment={"ephemeral": "1"},
            hashes=True,
        )
        made = make_plan(
            before.stages,
            lookup=reading.lookup,
            sources=reading.sources,
            verify=reading.verify,
            previous={},
            force=frozenset(),
            now=0.0,
        )
        planned = made[reference.stage]
        if planned.action is Action.REUSE and planned.commit is not None:
            return store.local_path(f"{planned.commit.attempt_key}/{reference.output}")
        run_to_end(before, place=place)
    raise UsageError(
        f"stage {reference.stage!r} ran, but its output is not committed", hint="see `pipeline show latest`"
    )


def _other(world_size: int) -> int:
    return world_size // 2 if world_size > 1 else 2


def _notice(text: str) -> None:
    make_console(stderr=True).print(text, markup=False)


def _print(report: ResumeReport, *, stage: str) -> None:
    console = make_console()
    console.print(
        f"stage {escape(stage)}: {report.steps} steps, a checkpoint every {report.checkpoint_every_steps}, killed on "
        f"{report.world_size} rank(s)"
    )
    table = make_table()
    for title in ("killed at step", "resumed from", "ranks", "loss error", "verdict"):
        table.add_column(title, justify="left" if title == "verdict" else "right")
    for case in report.cases:
        is_same = case.world_size == report.world_size
        equal = "bit-equal" if is_same else _OTHER[report.draws]
        table.add_row(
            str(case.killed_at),
            str(case.resumed_from),
            str(case.world_size),
            f"{case.loss_error:.1e}",
            f"[green]{equal}[/]" if case.ok else f"[red]{escape(_joined(case.problems))}[/]",
        )
    console.print(table)


def _joined(problems: Sequence[str]) -> str:
    return "; ".join(problems)
