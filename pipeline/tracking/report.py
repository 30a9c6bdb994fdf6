"""The run report: one page that says what a run did.

Owns the order of the page and what is worth a place in it. Reads a `RunView` and nothing else: no clock, no store, no
network. The one decision: what a person asks first stands first: did it work, what failed, where did the time go.
"""

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from pipeline.spec.gate import GateVerdict
from pipeline.stages.protocol import JSON
from pipeline.tracking.page import chart_cards, document, section, tiles
from pipeline.tracking.page_text import (
    NOTHING,
    NOTHING_HTML,
    chip,
    digest,
    duration_text,
    facts_table,
    table,
    when_text,
    words,
)
from pipeline.tracking.parameter_table import flatten
from pipeline.tracking.redaction import scrub
from pipeline.tracking.scale import number_text
from pipeline.tracking.stage_pictures import gantt_html, graph_svg, latest_time, seconds_of
from pipeline.tracking.view import RunStatus, RunView, SeriesPoint, StageStatus, StageView

HEADLINES = (
    "validation_loss",
    "perplexity",
    "validation_accuracy",
    "max_abs_logit_difference",
    "greedy_match",
    "top1_agreement",
    "tokens_per_second",
    "examples_per_second",
    "max_rel_output_difference",
    "max_block_relative_error",
)
"""Metrics that get a tile on top, in this order, where some stage has them."""
MAX_HEADLINES = 4
FIRST_CURVES = ("learning_rate", "gradient_norm", "tokens_per_second", "examples_per_second")


def render_report(run: RunView) -> str:
    """The page as HTML text; every name and text from the run is escaped, secrets in URIs are scrubbed."""
    sections = [
        _header(run),
        section("Stages", f'<div class="card scroll">{graph_svg(run)}</div>') if run.stages else _nothing(),
        section("Timeline", f'<div class="card">{gantt_html(run)}</div>') if run.stages else "",
        section("Gates", _gates(run)),
        section("Curves", chart_cards(list(_curves(run)))),
        section("Figures", chart_cards(list(_figures(run)))),
        section("Stage by stage", "".join(_stage(stage, run) for stage in run.stages)),
        section("Lineage", _lineage(run)),
        section("Flow", _flow(run)),
    ]
    return document(
        f"{run.flow} · {run.run_id} · {run.status.value.lower()}",
        body="".join(sections),
        footer=f"Run {run.run_id} of flow {run.flow}. Times are UTC.",
    )


def _nothing() -> str:
    return section("Stages", '<p class="card muted">This run has no stages.</p>')


def _header(run: RunView) -> str:
    where = [f"<span>run <code>{escape(run.run_id)}</code></span>", f"<span>{when_text(run.started_at)}</span>"]
    if run.user or run.host:
        where.append(f"<span>{escape(run.user)}{' on ' if run.user and run.host else ''}{escape(run.host)}</span>")
    where.append(f"<span>{escape(run.flow_file)}</span>")
    return (
        f'<header>\n<div class="title"><h1>{escape(run.flow)}</h1>{chip(run.status.value)}</div>\n'
        f'<div class="subtitle">{"".join(where)}</div>\n{_failure(run)}{_gap(run)}'
        f"{tiles(_tiles(run))}\n{_parameters(run)}</header>\n"
    )


def _failure(run: RunView) -> str:
    if not run.error:
        return ""
    return f'<div class="note {run.status.value}"><b>{_ended(run.status)}</b> {escape(scrub(run.error))}</div>\n'


def _ended(status: RunStatus) -> str:
    return {RunStatus.FAILED: "Failed.", RunStatus.INTERRUPTED: "Interrupted.", RunStatus.CRASHED: "Crashed."}.get(
        status, "Note."
    )


def _gap(run: RunView) -> str:
    if not run.tracking_gap:
        return ""
    noun = "tracking call was" if run.tracking_gap == 1 else "tracking calls were"
    return (
        f'<div class="note RUNNING"><b>{run.tracking_gap} {noun} lost</b> while the tracking server was away.</div>\n'
    )


def _tiles(run: RunView) -> Iterator[tuple[str, str, str]]:
    """(label, value, small print)."""
    over = run.ended_at is not None
    yield "duration", duration_text(latest_time(run) - run.started_at), "" if over else "so far"
    done = sum(stage.status in (StageStatus.DONE, StageStatus.REUSED) for stage in run.stages)
    reused = sum(stage.status is StageStatus.REUSED for stage in run.stages)
    yield "stages done", f"{done} of {len(run.stages)}", f"{reused} reused" if reused else ""
    verdicts = [verdict for stage in run.stages for verdict in stage.gates]
    if verdicts:
        yield "gates that hold", f"{sum(verdict.holds for verdict in verdicts)} of {len(verdicts)}", ""
    found = {}
    for stage in run.stages:
        for name in HEADLINES:
            if name in stage.metrics:
                found[name] = (number_text(float(stage.metrics[name])), f"stage {stage.name}")
    for name in [name for name in HEADLINES if name in found][:MAX_HEADLINES]:
        yield words(name), found[name][0], found[name][1]


def _parameters(run: RunView) -> str:
    if not run.parameters:
        return ""
    rows = flatten(run.parameters)
    return _fold("Parameters", f'<div class="inside"><div class="pairs">{_columns(rows)}</div></div>', f"{len(rows)}")


def _fold(title: str, body: str, end: str = "") -> str:
    return (
        f'<details class="card"><summary><b>{escape(title)}</b><span class="end">{escape(end)}</span></summary>'
        f"{body}</details>\n"
    )


def _columns(rows: Mapping[str, JSON]) -> str:
    """A facts table, or two of them side by side where there are many rows."""
    items = list(rows.items())
    half = (len(items) + 1) // 2 if len(items) > 3 else len(items)
    return "".join(facts_table(dict(part)) for part in (items[:half], items[half:]) if part)


def _gates(run: RunView) -> str:
    rows = [_gate_row(stage, verdict) for stage in run.stages for verdict in stage.gates]
    if not rows:
        return ""
    columns = [("stage", False), ("metric", False), ("value", True), ("limit", True), ("verdict", False)]
    return f'<div class="card">{table(columns, rows)}</div>'


def _gate_row(stage: StageView, verdict: GateVerdict) -> tuple[str, str, str, str, str]:
    value = "missing" if verdict.value is None else number_text(verdict.value, digits=6)
    word = "holds" if verdict.holds else "fails"
    return (
        escape(stage.name),
        escape(words(verdict.metric)),
        escape(value),
        f"{escape(verdict.comparison)} {escape(number_text(verdict.limit, digits=6))}",
        f'<span class="chip {"DONE" if verdict.holds else "FAILED"}">{word}</span>',
    )


def _curves(run: RunView) -> Iterator[tuple[str, Mapping[str, JSON]]]:
    """(stage, chart): all losses of a stage in one, then each other series."""
    for stage in run.stages:
        losses = sorted((name for name in stage.series if name.endswith("loss")), key=lambda name: (len(name), name))
        if losses:
            yield stage.name, _series_chart("loss", {name: stage.series[name] for name in losses})
        others = [name for name in FIRST_CURVES if name in stage.series]
        others += sorted(name for name in stage.series if name not in losses and name not in others)
        for name in others:
            yield stage.name, _series_chart(words(name), {name: stage.series[name]})


def _series_chart(title: str, series: Mapping[str, Sequence[SeriesPoint]]) -> Mapping[str, JSON]:
    return {
        "title": title,
        "kind": "lines",
        "x_label": "step",
        "series": [
            {"name": words(name), "x": [point.step for point in points], "y": [point.value for point in points]}
            for name, points in series.items()
        ],
    }


def _figures(run: RunView) -> Iterator[tuple[str, Mapping[str, JSON]]]:
    for stage in run.stages:
        for name, chart in stage.figures.items():
            yield stage.name, {**chart, "title": chart.get("title") or name}


def _stage(stage: StageView, run: RunView) -> str:
    seconds = seconds_of(stage, until=latest_time(run))
    failed = stage.status in (StageStatus.FAILED, StageStatus.INTERRUPTED)
    end = duration_text(seconds) if stage.status is not StageStatus.REUSED else ""
    parts = [_part("Why", f"<p>{escape(stage.reason)}</p>") if stage.reason else "", _attempts(stage)]
    parts.append(_hops(stage))
    pairs = [
        _part("Metrics", facts_table(dict(stage.metrics))) if stage.metrics else "",
        _part("Facts", facts_table(dict(stage.facts))) if stage.facts else "",
        _part("Identity", _identity(stage)) if stage.fingerprint else "",
    ]
    parts.append(f'<div class="pairs">{"".join(f"<div>{pair}</div>" for pair in pairs if pair)}</div>')
    return (
        f'<details class="card"{" open" if failed else ""}><summary><b>{escape(stage.name)}</b>'
        f'<span class="muted">{escape(stage.kind)}</span>{chip(stage.status.value)}'
        f'<span class="end">{escape(end)}</span></summary><div class="inside">{"".join(parts)}</div></details>\n'
    )


def _part(title: str, body: str) -> str:
    return f"<h4>{escape(title)}</h4>{body}"


def _identity(stage: StageView) -> str:
    rows = {"fingerprint": stage.fingerprint or ""} | {
        f"digest of {name}": value for name, value in stage.digests.items()
    }
    if stage.producer_run_id:
        rows["computed by run"] = stage.producer_run_id
    body = "".join(
        f"<tr><td>{escape(name)}</td><td><code>{escape(value)}</code></td></tr>" for name, value in rows.items()
    )
    return f'<table class="facts"><tbody>{body}</tbody></table>'


def _attempts(stage: StageView) -> str:
    telling = len(stage.attempts) > 1 or any(attempt.error for attempt in stage.attempts)
    if not telling:
        return ""
    rows = [
        (
            str(attempt.attempt),
            chip(attempt.status.value),
            duration_text(None if attempt.ended_at is None else attempt.ended_at - attempt.started_at),
            escape(attempt.failure_class or NOTHING),
            f"<pre>{escape(scrub(attempt.error))}</pre>" if attempt.error else NOTHING_HTML,
        )
        for attempt in stage.attempts
    ]
    columns = [("attempt", False), ("status", False), ("time", True), ("class", False), ("error", False)]
    return _part("Attempts", table(columns, rows))


def _hops(stage: StageView) -> str:
    if not stage.hops:
        return ""
    rows = [
        (str(hop.after_attempt), escape(hop.failure_class), f"<pre>{escape(scrub(hop.error))}</pre>", escape(hop.to))
        for hop in stage.hops
    ]
    columns = [("after attempt", False), ("class", False), ("error", False), ("went on with", False)]
    return _part("Fallbacks", table(columns, rows))


def _lineage(run: RunView) -> str:
    rows = [
        (
            escape(stage.name),
            escape(output) if output else NOTHING_HTML,
            digest(value),
            digest(stage.fingerprint),
            f"<code>{escape(stage.producer_run_id or run.run_id)}</code>"
            + (' <span class="muted">this run</span>' if (stage.producer_run_id or run.run_id) == run.run_id else ""),
            escape(", ".join(stage.needs)) or NOTHING_HTML,
        )
        for stage in run.stages
        for output, value in (stage.digests or {"": ""}).items()
        if stage.digests or stage.fingerprint
    ]
    if not rows:
        return ""
    columns = ["stage", "output", "digest", "fingerprint", "computed by", "made from"]
    return f'<div class="card">{table([(column, False) for column in columns], rows)}</div>'


def _flow(run: RunView) -> str:
    if not run.flow_text:
        return ""
    body = f'<div class="inside"><pre>{escape(scrub(run.flow_text))}</pre></div>'
    return _fold("Resolved flow", body, f"{len(run.flow_text.splitlines())} lines")
