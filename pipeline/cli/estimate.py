"""`pipeline estimate`: what a rank of a training stage will hold in memory, before it is trained.

Owns the table and the verdict. The one decision: the stage's inputs are reused or made first, because how long rows are
is in them; nothing is trained, and no parameter is allocated.
"""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.markup import escape

from pipeline.cli.place import find_place
from pipeline.cli.text import byte_text, make_console, make_table, number, print_json
from pipeline.cli.verify_resume import choose_stage, stage_inputs
from pipeline.plan.graph import open_flow

ESTIMATE = "pipeline.diagnostics.estimate_stage:estimate_stage"


def run(
    *, flow_path: Path, stage: str, memory_gb: float | None, overrides: list[str], store: str | None, as_json: bool
) -> int:
    """Estimate one training stage; 0 where it fits, 1 where it does not.

    Raises:
        UsageError: the flow has no such stage.
    """
    flow = open_flow(flow_path, overrides=overrides)
    place = find_place(start=flow.spec.file.parent, store=store)
    chosen = choose_stage(flow, stage)
    module, _, name = ESTIMATE.partition(":")
    found = getattr(importlib.import_module(module), name)(
        chosen.parameters,
        resources=chosen.resources,
        inputs=stage_inputs(flow, chosen, place=place),
        project_root=flow.spec.project_root,
        available_bytes=None if memory_gb is None else int(memory_gb * 1e9),
    )
    if as_json:
        print_json(found)
    else:
        _print(found, stage=chosen.name)
    return 0 if found["ok"] else 1


def _print(found: Mapping[str, Any], *, stage: str) -> None:
    console = make_console()
    unit = "tokens" if "tokens_a_step" in found else "examples"
    console.print(
        f"stage {escape(stage)}: {number(found['parameters'])} parameters, {number(found['trained'])} of them trained; "
        f"{number(found[f'{unit}_a_step'])} {unit} a step over {found['workers']} ranks in {found['passes']} passes; "
        f"computed for {'CPU' if found['device'] == 'cpu' else 'GPU'} ranks"
    )
    table = make_table()
    table.add_column("at the peak of a rank")
    table.add_column("", justify="right")
    for kind, size in found["bytes"].items():
        if size:
            table.add_row(kind, byte_text(size))
    table.add_row("all", byte_text(found["peak_bytes"]))
    console.print(table)
    available = found["available_bytes"]
    if available is None:
        console.print("how much a GPU has is not known here: --memory-gb says it")
    elif found["ok"]:
        console.print(f"[green]fits[/] into {byte_text(available)} a rank")
    else:
        console.print(
            f"[red]does not fit[/] into {byte_text(available)} a rank: more workers with `parallel: zero3`, fewer "
            "`micro_batch_sequences`, or `activation_checkpointing: full`"
        )
