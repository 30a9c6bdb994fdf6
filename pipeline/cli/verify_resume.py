"""`pipeline verify-resume`: a training stage of a flow, killed and resumed, against itself.

Owns the way from a flow to the experiment, and its table. The one decision: the stage's inputs come from the flow
itself, reused or run, so that what is verified is the user's model on the user's data.
"""

import importlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.markup import escape

from pipeline.cli.place import Place, find_place
from pipeline.cli.run import run_to_end
from pipeline.cli.text import make_console, make_table, print_json
from pipeline.errors import UsageError, nearest_name
from pipeline.execution.reading import Reading
from pipeline.plan.graph import Flow, ResolvedStage, ancestors, open_flow
from pipeline.plan.planner import Action, make_plan

KIND = "train.fsdp"
EXPERIMENT = "pipeline.diagnostics.verify_stage:verify_stage"


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
    report = _load(EXPERIMENT)(
        chosen.parameters,
        resources=chosen.resources,
        inputs=stage_inputs(flow, chosen, place=place),
        project_root=flow.spec.project_root,
        steps=steps,
        checkpoint_every=checkpoint_every,
        kill_at=kill_at,
        every=every,
        other_workers=other_workers,
        notice=_notice,
    )
    if as_json:
        print_json(report)
    else:
        _print(report, stage=chosen.name)
    return 0 if report["ok"] else 1


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


def stage_inputs(flow: Flow, stage: ResolvedStage, *, place: Place) -> dict[str, tuple[Path, str]]:
    """Directory and digest of each committed input of the stage; what is missing before it runs first."""
    wanted = set(ancestors(flow.stages, stage.name))
    before = replace(flow, stages=tuple(one for one in flow.stages if one.name in wanted))
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
        commits = {
            name: (made[reference.stage].commit, reference.output)
            for name, reference in stage.inputs.items()
            if made[reference.stage].action is Action.REUSE
        }
        found = {
            name: (store.local_path(f"{commit.attempt_key}/{output}"), commit.outputs[output].digest)
            for name, (commit, output) in commits.items()
            if commit is not None
        }
        if found.keys() == stage.inputs.keys():
            return found
        run_to_end(before, place=place)
    lacking = ", ".join(str(reference) for name, reference in stage.inputs.items() if name not in found)
    raise UsageError(f"{lacking}: its stage ran, but it is not committed", hint="see `pipeline show latest`")


def _notice(text: str) -> None:
    make_console(stderr=True).print(text, markup=False)


def _print(report: Mapping[str, Any], *, stage: str) -> None:
    console = make_console()
    console.print(
        f"stage {escape(stage)}: {report['steps']} steps, a checkpoint every {report['checkpoint_every_steps']}, "
        f"killed on {report['world_size']} rank(s)"
    )
    elsewhere = f"same rows, losses and state within {report['tolerance']:g}"
    if report["draws"]:
        elsewhere = "same rows; the model draws random numbers, other ranks draw others"
    table = make_table()
    for title in ("killed at step", "resumed from", "ranks", "loss error", "state error", "verdict"):
        table.add_column(title, justify="left" if title == "verdict" else "right")
    for case in report["cases"]:
        equal = "bit-equal" if case["world_size"] == report["world_size"] else elsewhere
        table.add_row(
            str(case["killed_at"]),
            str(case["resumed_from"]),
            str(case["world_size"]),
            f"{case['loss_error']:.1e}",
            f"{case['state_error']:.1e}",
            f"[green]{equal}[/]" if case["ok"] else f"[red]{escape('; '.join(case['problems']))}[/]",
        )
    console.print(table)


def _load(dotted: str) -> Any:
    module, _, name = dotted.partition(":")
    return getattr(importlib.import_module(module), name)
