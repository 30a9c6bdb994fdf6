"""`pipeline convert`: a model from one framework to the other, or the plan of it.

Owns what the verb refuses before anything is read, and its summary. Knows nothing of formats or frameworks: everything
is done by the public calls of `converters`, which load what they need when they are called. The one decision: results
go to standard output, progress to standard error, so a pipe gets one or the other.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args

from rich.markup import escape

import converters
from converters.export_record import ExportRecord
from converters.exporting import EXPORTERS
from converters.manifest import ConversionManifest
from converters.mapping import DtypePolicy
from pipeline.cli.models import choose, find_model, is_flax, new_directory
from pipeline.cli.progress import following
from pipeline.cli.text import byte_text, duration, make_console, make_table, number, print_json
from pipeline.errors import UsageError

ORBAX, ONNX = "orbax", "onnx"
FORMATS = (ORBAX, *EXPORTERS)
Via = Literal["auto", "family", "trace"]


def convert(
    *,
    source: str,
    to: Path | None,
    format: str,
    via: Via,
    dtype: DtypePolicy,
    opset: int | None,
    int8: bool,
    check: bool,
    as_json: bool,
) -> int:
    """Convert `source`, or say what that would do; 0 when done, 1 where a plan says that it would be refused."""
    choose("--format", format, FORMATS)
    choose("--via", via, get_args(Via))
    choose("--dtype", dtype, get_args(DtypePolicy))
    path = find_model(source)
    _check_together(path, source=source, format=format, via=via, opset=opset, int8=int8)
    if check:
        return _plan(path, via=via, dtype=dtype, as_json=as_json)
    if to is None:
        raise UsageError("--to is missing: where the converted model goes", hint="name a new directory: --to DIR")
    new_directory(to)
    started = time.monotonic()
    with following("tensors", quiet=as_json) as progress:
        facts = (
            _converted(converters.convert(path, to=to, via=via, dtype=dtype, progress=progress))
            if format == ORBAX
            else _exported(
                converters.export(path, to=to, format=format, dtype=dtype, opset=opset, int8=int8, progress=progress)
            )
        )
    facts |= {"seconds": round(time.monotonic() - started, 2), "format": format, "to": str(to)}
    if as_json:
        print_json(facts)
    else:
        _print(facts)
    return 0


def _check_together(path: Path, *, source: str, format: str, via: Via, opset: int | None, int8: bool) -> None:
    """Refuse options that do not go with each other or with the source.

    Raises:
        UsageError: says all of it.
    """
    complaints = []
    if is_flax(path) and format == ORBAX:
        complaints.append(f"{source} is a Flax model directory already; allowed formats for it: {', '.join(EXPORTERS)}")
    if via != "auto" and (format != ORBAX or is_flax(path)):
        complaints.append(f"--via {via} chooses the road to Flax; with --format {format} there is none to choose")
    if format != ONNX and (opset is not None or int8):
        complaints.append(f"--opset and --int8 belong to --format {ONNX}")
    if complaints:
        raise UsageError("; ".join(complaints))


def _converted(manifest: ConversionManifest) -> dict[str, Any]:
    return {
        "family": manifest.family,
        "road": manifest.road,
        "road_reason": manifest.road_reason,
        "source_format": manifest.source_format,
        "tensors": manifest.num_source_tensors,
        "leaves": manifest.num_target_leaves,
        "parameters": manifest.num_parameters,
        "bytes": manifest.num_bytes,
        "warnings": list(manifest.warnings),
    }


def _exported(record: ExportRecord) -> dict[str, Any]:
    return {
        "source_format": record.source_format,
        "tensors": record.num_tensors,
        "bytes": record.num_bytes,
        "files": list(record.files),
        **record.facts,
        **record.metrics,
        "warnings": list(record.warnings),
    }


def _plan(path: Path, *, via: Via, dtype: DtypePolicy, as_json: bool) -> int:
    found = converters.preview(path, via=via, dtype=dtype)
    if as_json:
        print_json(asdict(found))
    else:
        _print(
            {
                "format": found.format,
                "family": found.family or "none",
                "road": found.road or "none",
                "road_reason": found.road_reason,
                "tensors": found.num_tensors,
                "dtypes": [f"{count} {name}" for name, count in found.num_tensors_by_dtype.items()],
                "parameters": found.num_parameters,
                "bytes": found.num_source_bytes,
                "bytes_written": found.num_target_bytes,
                "largest_tensor": f"{found.largest_tensor} ({byte_text(found.largest_tensor_bytes)})",
                "memory_for_weights": byte_text(found.peak_memory_bytes),
                "tied": found.tied,
                "ignored": found.ignored,
                "carried": found.carried,
                **{f"fact {name}": value for name, value in found.facts.items()},
                "loaded_to_know_this": found.loaded or "no framework",
                "refused": found.refusal or "no",
            }
        )
    return 1 if found.refusal else 0


def _print(facts: Mapping[str, Any]) -> None:
    console = make_console()
    table = make_table(show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if name != "warnings" and value not in ("", None, [], (), {}):
            table.add_row(name.replace("_", " "), escape(_text(name, value)))
    console.print(table)
    for warning in facts.get("warnings", ()):
        console.print(f"[yellow]warning:[/] {escape(warning)}")


def _text(name: str, value: Any) -> str:
    if name.startswith("bytes"):
        return byte_text(value)
    if name == "seconds":
        return duration(value)
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return number(value)
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return ", ".join(value)
    if isinstance(value, list | tuple) and len(value) > 2 and all(item == value[0] for item in value):
        return f"{json.dumps(value[0])} in each of {len(value)}"
    return json.dumps(value)
