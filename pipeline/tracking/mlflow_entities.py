"""Our values in MLflow's shapes and within its limits.

Owns names, lengths and batches. Talks to no server. The one decision: what MLflow would refuse is cut or renamed here,
and the full value is kept in an artifact beside it.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag

from pipeline.stages.protocol import JSON, Report
from pipeline.tracking.redaction import scrub
from pipeline.tracking.view import SeriesPoint

MAX_NAME = 250
MAX_PARAMETER = 6000
MAX_TAG = 5000
MAX_DATASET_DIGEST = 36
METRICS_IN_A_BATCH = 1000
TEXTS_IN_A_BATCH = 100
_CUT = " ... (cut; the full value is in parameters.json)"
_NOT_IN_A_NAME = re.compile(r"[^\w\-. /:]")

ItemT = TypeVar("ItemT")


def milliseconds(seconds: float | None) -> int | None:
    """Seconds since the epoch as MLflow counts them."""
    return None if seconds is None else int(seconds * 1000)


def entity_name(name: str) -> str:
    """`name` with what MLflow does not take replaced, cut to 250; never a path with `..` or a leading `/`."""
    cleaned = _NOT_IN_A_NAME.sub("_", name)
    parts = [part for part in cleaned.split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[:MAX_NAME] or "_"


def params(table: Mapping[str, str]) -> list[Param]:
    """A flat table as parameters; long values are cut."""
    return [Param(entity_name(name), _cut(value)) for name, value in table.items()]


def is_cut(table: Mapping[str, str]) -> bool:
    """True where some value of the table does not fit a parameter."""
    return any(len(value) > MAX_PARAMETER for value in table.values())


def _cut(value: str) -> str:
    return value if len(value) <= MAX_PARAMETER else value[: MAX_PARAMETER - len(_CUT)] + _CUT


def tags(table: Mapping[str, JSON]) -> list[RunTag]:
    """Tags of a run; None is left out, long values are cut, secrets scrubbed."""
    return [
        RunTag(entity_name(name), scrub(str(value))[:MAX_TAG]) for name, value in table.items() if value is not None
    ]


def metrics_of_reports(reports: Iterable[Report]) -> list[Metric]:
    """Every value of the `metrics` reports, at its own step and time."""
    return [
        Metric(entity_name(name), float(value), int(report.time * 1000), report.step or 0)
        for report in reports
        if report.kind == "metrics"
        for name, value in report.payload.items()
    ]


def metrics_of_series(series: Mapping[str, Sequence[SeriesPoint]]) -> list[Metric]:
    """The same values as they were reported live."""
    return [
        Metric(entity_name(name), float(point.value), int(point.time * 1000), point.step)
        for name, points in series.items()
        for point in points
    ]


def final_metrics(
    values: Mapping[str, float], series: Mapping[str, Sequence[SeriesPoint]], *, time_seconds: float
) -> list[Metric]:
    """A stage's final values, at the last step of their series so that MLflow shows them as the latest."""
    return [
        Metric(
            entity_name(name),
            float(value),
            int(time_seconds * 1000),
            max((point.step for point in series.get(name, ())), default=0),
        )
        for name, value in values.items()
    ]


def dataset_input(payload: Mapping[str, JSON]) -> DatasetInput:
    """A `dataset` report as an input of the run; MLflow keeps 36 characters of a digest, the tag keeps all."""
    digest, source = str(payload["digest"]), scrub(str(payload["source"]))
    facts = payload.get("facts") or {}
    return DatasetInput(
        dataset=Dataset(
            name=str(payload["name"])[:500],
            digest=digest[:MAX_DATASET_DIGEST],
            source_type="pipeline",
            source=_json({"uri": source}),
            profile=_json(facts),
        ),
        tags=[
            InputTag(key="mlflow.data.context", value=str(payload["name"])[:500]),
            InputTag(key="pipeline.digest", value=digest[:500]),
        ],
    )


def _json(value: JSON) -> str:
    return scrub(json_text(value))


def json_text(value: JSON) -> str:
    """JSON for a person: sorted, indented, with `str` for what JSON has no form for."""
    return json.dumps(value, indent=2, sort_keys=True, default=str)


def batches(items: Sequence[ItemT], size: int) -> Iterator[Sequence[ItemT]]:
    """Consecutive slices of at most `size` items."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
