"""`pipeline diff` and `pipeline parity`: do two checkpoints hold the same, do two models compute the same.

Owns the tables of both and the small plot of errors by layer. Knows nothing of formats or frameworks: both are public
calls of `converters`. The one decision: exit code 0 says "the same" and 1 "not the same", so a script needs no text.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import converters
from converters.parity_report import BlockAgreement, ParityLimits, ParityReport
from pipeline.cli.models import find_flax, find_model, writable_directory
from pipeline.cli.progress import following
from pipeline.cli.text import make_console, make_table, number, print_json
from pipeline.tracking.parity_page import PAGE_FILE, render_parity

if TYPE_CHECKING:
    from converters.difference import CheckpointDifference

BAR_WIDTH = 30
SMALLEST_EXPONENT = -9
"""Left end of the plot of errors; zero stands there too."""
LARGEST_EXPONENT = 0
MAX_DIFFERENCES = 200
MAX_ROWS = 60
"""Blocks shown one by one; of more, the ends and the worst."""


def parity(
    *,
    source: str,
    flax: str,
    block_limit: float,
    output_limit: float,
    continued_tokens: int,
    seed: int,
    report: Path | None,
    as_json: bool,
) -> int:
    """Compare a torch checkpoint with the Flax model made from it; 0 where every level holds, else 1."""
    checkpoint, model = find_model(source), find_flax(flax)
    if report is not None:
        writable_directory(report)
    with following("levels", quiet=as_json) as progress:
        found = converters.check_parity(
            checkpoint,
            model,
            limits=ParityLimits(block_relative_error=block_limit, output_relative_error=output_limit),
            seed=seed,
            continued_tokens=continued_tokens,
            progress=progress,
        )
    if report is not None:
        found.write(report)
        (report / PAGE_FILE).write_text(render_parity(found), encoding="utf-8")
    if as_json:
        print_json(found.to_json())
    else:
        console = make_console()
        _print_parity(console, found)
        if report is not None:
            console.print(f"report: {escape(str(report / PAGE_FILE))}")
    return 0 if found.passed else 1


def diff(*, first: str, second: str, tolerance: float, as_json: bool) -> int:
    """Compare two checkpoints tensor by tensor; 0 where they are the same, else 1."""
    paths = find_model(first), find_model(second)
    with following("tensors", quiet=as_json) as progress:
        found = converters.diff(*paths, tolerance=tolerance, progress=progress)
    if as_json:
        print_json({"same": found.same, **asdict(found)})
    else:
        _print_diff(make_console(), found)
    return 0 if found.same else 1


def _print_diff(console: Console, found: "CheckpointDifference") -> None:
    console.print(f"first: {escape(found.first)} ({found.first_format})")
    console.print(f"second: {escape(found.second)} ({found.second_format})")
    if found.differences:
        table = _table(
            ("tensor", False), ("", False), ("first", False), ("second", False), ("differ", True), ("by", True)
        )
        for one in found.differences[:MAX_DIFFERENCES]:
            count = "-" if one.num_different is None else number(one.num_different)
            by = "-" if one.max_difference is None else f"{one.max_difference:.3g}"
            table.add_row(escape(one.name), one.kind, escape(one.first) or "-", escape(one.second) or "-", count, by)
        console.print(table)
    if len(found.differences) > MAX_DIFFERENCES:
        console.print(f"and {len(found.differences) - MAX_DIFFERENCES} more; --json lists all")
    if found.not_held:
        console.print(f"computed by the model, not compared: {escape(', '.join(found.not_held))}")
    console.print(f"{found.num_identical} of {found.num_compared} tensors that both have are the same bit for bit")
    if found.same:
        within = f" within {found.tolerance:g}" if found.tolerance and found.max_difference else ""
        console.print(f"[green]the same{within}[/]")
    else:
        console.print(f"[red]not the same[/]: {len(found.differences)} differences")


def _print_parity(console: Console, report: ParityReport) -> None:
    tensors, limits = report.tensors, report.limits
    console.print(f"{escape(report.name)} ({report.kind}, by {report.road})")
    rounded = f", {len(tensors.rounded)} rounded by a declared cast" if tensors.rounded else ""
    console.print(f"tensors: {tensors.num_identical} of {tensors.num_tensors} come back bit for bit{rounded}")
    if report.blocks:
        console.print(_block_table(report.blocks, limit=limits.block_relative_error))
        if report.judged_in_float64:
            console.print(
                "two float32 sides differ by more than the limit, so all errors are those from torch in float64"
            )
    console.print(_output_table(report))
    if report.greedy_match is not None:
        num = len(report.continuations)
        console.print(f"continuations: {report.greedy_match:.1%} of the tokens of {num} prompts agree")
    for failure in report.failures:
        console.print(f"[red]does not hold:[/] {escape(failure)}")
    console.print("[green]all levels hold[/]" if report.passed else "[red]not the same[/]")


def _block_table(blocks: Sequence[BlockAgreement], *, limit: float) -> Table:
    own = (("torch's own", True),) if any(block.torch_rounding is not None for block in blocks) else ()
    table = _table(("block", False), ("largest", True), ("mean", True), *own, (f"1e{SMALLEST_EXPONENT} to 1", False))
    for block in _shown(blocks):
        if block is None:
            table.add_row("...")
            continue
        colour = "green" if block.max_relative <= limit else "red"
        bar = f"[{colour}]{log_bar(block.max_relative, limit=limit)}[/]"
        rounding = () if block.torch_rounding is None else (f"{block.torch_rounding:.2e}",)
        table.add_row(escape(block.name), f"{block.max_relative:.2e}", f"{block.mean_relative:.2e}", *rounding, bar)
    return table


def _shown(blocks: Sequence[BlockAgreement]) -> list[BlockAgreement | None]:
    """All blocks, or the first and last ones and the worst, with None where some are left out."""
    if len(blocks) <= MAX_ROWS:
        return list(blocks)
    worst = max(range(len(blocks)), key=lambda index: blocks[index].max_relative)
    half = MAX_ROWS // 2
    kept = sorted({*range(half), worst, *range(len(blocks) - half, len(blocks))})
    shown: list[BlockAgreement | None] = []
    for index, previous in zip(kept, [-1, *kept], strict=False):
        if index != previous + 1:
            shown.append(None)
        shown.append(blocks[index])
    return shown


def log_bar(value: float, *, limit: float) -> str:
    """`value` as a bar on a logarithmic scale from 1e-9 to 1, with `|` where `limit` is."""

    def place(number: float) -> int:
        if math.isnan(number) or number == math.inf:
            return BAR_WIDTH
        exponent = math.log10(number) if number > 0 else SMALLEST_EXPONENT
        share = (exponent - SMALLEST_EXPONENT) / (LARGEST_EXPONENT - SMALLEST_EXPONENT)
        return round(BAR_WIDTH * min(max(share, 0.0), 1.0))

    cells = ["█" if index < place(value) else "·" for index in range(BAR_WIDTH)]
    cells[min(place(limit), BAR_WIDTH - 1)] = "|"
    return "".join(cells)


def _output_table(report: ParityReport) -> Table:
    table = _table(
        ("output", False), ("absolute", True), ("relative", True), ("KL", True), ("top 1", True), ("top 10", True)
    )
    for output in report.outputs:
        logits = ("-", "-", "-")
        if output.max_kl is not None and output.top1_agreement is not None and output.topk_overlap is not None:
            logits = (f"{output.max_kl:.1e}", f"{output.top1_agreement:.1%}", f"{output.topk_overlap:.1%}")
        table.add_row(escape(output.name), f"{output.max_abs:.2e}", f"{output.max_relative:.2e}", *logits)
    return table


def _table(*columns: tuple[str, bool]) -> Table:
    table = make_table()
    for title, is_number in columns:
        table.add_column(title, justify="right" if is_number else "left", no_wrap=True)
    return table
