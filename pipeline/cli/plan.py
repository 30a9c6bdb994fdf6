"""`pipeline plan`, `pipeline validate` and `pipeline schema`: everything that can be said before anything runs.

Owns their output. Loads no framework and no Ray. The one decision: `plan` reads commits through the same functions as
`run`; what it says will be reused is what a run reuses.
"""

import sys
import time
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.tree import Tree

from pipeline.cli.place import find_place
from pipeline.cli.text import make_console, print_json
from pipeline.cluster.capacity import Capacity, planned_capacity
from pipeline.cluster.head import find_head
from pipeline.errors import EXIT_CODE_BY_CLASS, FailureClass, SpecError
from pipeline.execution.demand import (
    assign,
    check_devices,
    check_sharing,
    demand_of,
    possible,
    serving_plan,
    why_impossible,
)
from pipeline.execution.reading import Reading
from pipeline.plan.graph import Flow, open_flow
from pipeline.plan.planner import Action, Plan, PlannedStage, make_plan
from pipeline.plan.schema import schema_text

_STYLES = {Action.REUSE: "cyan", Action.RUN: "yellow", Action.WAIT_FOR_INPUTS: "yellow"}
_WORDS = {Action.REUSE: "reuse", Action.RUN: "run", Action.WAIT_FOR_INPUTS: "run"}


def validate(*, flow_path: Path, overrides: list[str], as_json: bool) -> int:
    """Check a flow."""
    try:
        flow = open_flow(flow_path, overrides=overrides)
    except SpecError as error:
        if not as_json:
            raise
        problems = [
            {
                "file": problem.position.file,
                "line": problem.position.line,
                "column": problem.position.column,
                "path": problem.path,
                "code": problem.code,
                "found": problem.found,
                "allowed": list(problem.allowed),
                "nearest": problem.nearest,
                "hint": problem.hint,
            }
            for problem in error.problems
        ]
        print_json({"ok": False, "problems": problems})
        return error.exit_code
    check_sharing(flow.stages, where=lambda name: f"{flow.spec.stage(name).position('resources.gpus')} ")
    if as_json:
        print_json({"ok": True, "flow": flow.spec.name, "stages": [stage.name for stage in flow.stages]})
    else:
        make_console().print(
            f"{escape(str(flow_path))}: flow {escape(flow.spec.name)}, {len(flow.stages)} stages, no problem"
        )
    return 0


def schema() -> int:
    """Print the JSON Schema of flows."""
    sys.stdout.write(schema_text())
    return 0


def plan(
    *,
    flow_path: Path,
    overrides: list[str],
    store: str | None,
    cluster: Path | None,
    ephemeral: bool,
    force: list[str],
    as_json: bool,
) -> int:
    """Show what a run would do; exit code 2 where a stage can never run on the cluster."""
    flow = open_flow(flow_path, overrides=overrides)
    place = find_place(start=flow.spec.file.parent, store=store, cluster=cluster)
    reading = Reading(
        store=place.open_store(),
        flow=flow.spec.name,
        project_root=flow.spec.project_root,
        environment={"ephemeral": "1" if ephemeral else "0"},
        hashes=False,
        force=frozenset(force),
    )
    made = make_plan(
        flow.stages,
        lookup=reading.lookup,
        sources=reading.sources,
        verify=reading.verify,
        previous=reading.previous,
        force=reading.force,
        now=time.time(),
    )
    head = find_head(place.state_directory) if place.address is None else None
    capacity = place.cluster.capacity(planned_capacity())
    runnable = [possible(stage, capacity) for stage in flow.stages]
    problems = why_impossible(runnable, capacity)
    if as_json:
        print_json({**_as_json(flow, made, capacity), "problems": problems})
    else:
        _print(flow, made, capacity, has_head=head is not None)
    check_devices(runnable, capacity, where=lambda name: f"{flow.spec.stage(name).position('with.device')} ")
    if problems and not as_json:
        make_console(stderr=True).print("\n".join(f"[red]error:[/] {escape(line)}" for line in problems))
    return EXIT_CODE_BY_CLASS[FailureClass.CONFIG] if problems else 0


def _print(flow: Flow, made: Plan, capacity: Capacity, *, has_head: bool) -> None:
    console = make_console()
    on = "the running local head" if has_head else capacity.source
    tree = Tree(
        f"[bold]{escape(flow.spec.name)}[/]: {made.num_reused} of {len(made.stages)} stages reused, on {on} "
        f"({capacity.cpus:g} CPUs, {capacity.gpus:g} GPUs, {capacity.memory_bytes / 2**30:.0f} GiB)"
    )
    branches: dict[str, Tree] = {}
    for planned in made.stages:
        stage = planned.stage
        parent = branches[stage.needs[-1]] if stage.needs else tree
        branches[stage.name] = parent.add(_line(planned, capacity))
    console.print(tree)
    for process in serving_plan(flow.stages, capacity).processes:
        if process.share:
            names = escape(", ".join(process.deployments))
            console.print(
                f"[dim]{names}: {process.replicas} process(es) with {process.share:g} GPU each; "
                f"{escape(process.reason)}[/]"
            )


def _line(planned: PlannedStage, capacity: Capacity) -> str:
    stage = planned.stage
    short = planned.fingerprint[:12] if planned.fingerprint else "fingerprint open"
    also = f", also needs {', '.join(stage.needs[:-1])}" if len(stage.needs) > 1 else ""
    text = (
        f"[bold]{escape(stage.name)}[/] [dim]{stage.kind.name}[/] "
        f"[{_STYLES[planned.action]}]{_WORDS[planned.action]}[/] {escape(planned.reason)} [dim]({short}{also})[/]"
    )
    if planned.action is not Action.REUSE:
        _, gpu_reason = assign(stage, capacity)
        text += f"\n[dim]takes {demand_of(stage, capacity)}; {escape(gpu_reason)}[/]"
    if stage.resources.min_workers is not None:
        text += f"\n[dim]grows to {stage.resources.workers} workers where there is room[/]"
    for hop in stage.fallback:
        text += f"\n[dim]falls back to {escape(str(hop))}[/]"
    for gate in stage.gates:
        text += f"\n[dim]gate {escape(gate.metric)} {gate.comparison} {gate.limit:g}[/]"
    return text


def _as_json(flow: Flow, made: Plan, capacity: Capacity) -> dict[str, Any]:
    return {
        "flow": flow.spec.name,
        "parameters": dict(flow.spec.params),
        "capacity": {"cpus": capacity.cpus, "gpus": capacity.gpus, "memory_bytes": capacity.memory_bytes},
        "serving": [
            {
                "application": process.application,
                "deployments": list(process.deployments),
                "gpus": process.share,
                "replicas": process.replicas,
                "reason": process.reason,
            }
            for process in serving_plan(flow.stages, capacity).processes
        ],
        "stages": [
            {
                "name": planned.stage.name,
                "kind": planned.stage.kind.name,
                "action": planned.action,
                "reason": planned.reason,
                "fingerprint": planned.fingerprint,
                "needs": list(planned.stage.needs),
                "fallback": [str(hop) for hop in planned.stage.fallback],
                "demand": {
                    "cpus": demand_of(planned.stage, capacity).cpus,
                    "gpus": demand_of(planned.stage, capacity).gpus,
                    "memory_bytes": demand_of(planned.stage, capacity).memory_bytes,
                },
            }
            for planned in made.stages
        ],
    }
