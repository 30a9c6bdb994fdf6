"""The run's stages as pictures: what depends on what, and when each ran.

Owns the graph (SVG) and the Gantt (positioned boxes, so that its text keeps its size on a phone). Pure. The one
decision: colour never speaks alone; every box says its status in words.
"""

from html import escape

from pipeline.tracking.layered_graph import Edge, Layout, Placement, lay_out
from pipeline.tracking.page_text import duration_text
from pipeline.tracking.view import AttemptView, RunView, StageStatus, StageView

NODE_WIDTH, NODE_HEIGHT = 146, 62
COLUMN, ROW = 184, 84
SLACK = 6
"""How far a long edge's curve reaches over the nodes it passes."""
MAX_NAME, MAX_KIND = 16, 20
NO_ROOM_AFTER = 62
"""Percent of the width after which a bar's text no longer fits behind it on a phone."""
TICK_STEPS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)


def seconds_of(stage: StageView, *, until: float) -> float | None:
    """Time spent in all attempts; one that still runs counts until `until`."""
    if not stage.attempts:
        return None
    return sum((attempt.ended_at or until) - attempt.started_at for attempt in stage.attempts)


def latest_time(run: RunView) -> float:
    """The end of the run, or the latest time that is known of it."""
    times = [run.started_at, *(a.ended_at or a.started_at for stage in run.stages for a in stage.attempts)]
    times += [point.time for stage in run.stages for series in stage.series.values() for point in series]
    return run.ended_at if run.ended_at is not None else max(times)


def graph_svg(run: RunView) -> str:
    """The stages layered left to right, with status and time in each; arrows point at what depends on it."""
    layout = lay_out({stage.name: stage.needs for stage in run.stages})
    width = max(1, layout.num_layers - 1) * COLUMN + NODE_WIDTH + 4 if layout.num_layers > 1 else NODE_WIDTH + 4
    height = layout.num_rows * ROW
    until = latest_time(run)
    edges = sorted(layout.edges, key=lambda edge: not edge.implied)
    nodes = "".join(_node(stage, layout.nodes[stage.name], until=until) for stage in run.stages)
    return (
        f'<svg class="graph" xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:.0f}" '
        f'viewBox="0 0 {width} {height:.0f}" role="img" aria-label="Graph of the stages">'
        f"{''.join(_edge(edge, layout) for edge in edges)}{nodes}</svg>"
    )


def _node(stage: StageView, place: Placement, *, until: float) -> str:
    x, y = place.layer * COLUMN + 2, place.row * ROW - NODE_HEIGHT / 2
    state = stage.status.value.lower()
    seconds = seconds_of(stage, until=until)
    if stage.status is not StageStatus.REUSED and seconds is not None:
        state += f" · {duration_text(seconds)}"
    kind = _short(stage.kind, MAX_KIND)
    if len(stage.attempts) > 1:
        kind = f"{_short(stage.kind, MAX_KIND - 8)} · {len(stage.attempts)} tries"
    return (
        f'<g class="node {stage.status.value}" transform="translate({x} {y:.1f})">'
        f"<title>{escape(stage.name)} ({escape(stage.kind)}): {escape(stage.reason)}</title>"
        f'<rect width="{NODE_WIDTH}" height="{NODE_HEIGHT}" rx="8"/>'
        f'<text class="name" x="12" y="21">{escape(_short(stage.name, MAX_NAME))}</text>'
        f'<text class="kind" x="12" y="37">{escape(kind)}</text>'
        f'<text class="state" x="12" y="53">{escape(state)}</text></g>'
    )


def _edge(edge: Edge, layout: Layout) -> str:
    start, end = layout.nodes[edge.source], layout.nodes[edge.target]
    x, y = start.layer * COLUMN + 2 + NODE_WIDTH, start.row * ROW
    path = f"M{x},{y:.1f}"
    for bend in edge.bends:
        left, level = bend.layer * COLUMN + 2, bend.row * ROW
        path += _curve(x, y, left + SLACK, level) + f" L{left + NODE_WIDTH - SLACK},{level:.1f}"
        x, y = left + NODE_WIDTH - SLACK, level
    tip, level = end.layer * COLUMN + 2, end.row * ROW
    path += _curve(x, y, tip - 6, level)
    kind, faint = ("edge implied", " faint") if edge.implied else ("edge", "")
    head = f"M{tip - 7},{level - 4:.1f} L{tip},{level:.1f} L{tip - 7},{level + 4:.1f} Z"
    return f'<path class="{kind}" d="{path}"/><path class="head{faint}" d="{head}"/>'


def _curve(x: float, y: float, to_x: float, to_y: float) -> str:
    middle = (x + to_x) / 2
    return f" C{middle},{y:.1f} {middle},{to_y:.1f} {to_x},{to_y:.1f}"


def gantt_html(run: RunView) -> str:
    """A row a stage, a bar an attempt, time from the start of the run (`m:ss` from a minute on)."""
    until = latest_time(run)
    total = max(until - run.started_at, 0.001)
    rows = "".join(
        f'<div class="label" title="{escape(stage.name)}">{escape(stage.name)}</div>'
        f'<div class="track">{_bars(stage, start=run.started_at, total=total, until=until)}</div>'
        for stage in run.stages
    )
    return f'<div class="gantt">{rows}<div></div><div class="ticks">{_ticks(total)}</div></div>'


def _bars(stage: StageView, *, start: float, total: float, until: float) -> str:
    if not stage.attempts:
        return f'<span class="mark {stage.status.value}">{escape(stage.status.value.lower())}</span>'
    bars = [_bar(attempt, start=start, total=total, until=until) for attempt in stage.attempts]
    last = stage.attempts[-1]
    first_left = 100 * max(0.0, stage.attempts[0].started_at - start) / total
    right = 100 * min(1.0, ((last.ended_at or until) - start) / total)
    text = duration_text(seconds_of(stage, until=until))
    if last.status is not StageStatus.DONE:
        text += f" · {last.status.value.lower()}"
    where = f'class="after" style="left:{right:.2f}%"'
    if right > NO_ROOM_AFTER:
        where = f'class="before" style="right:{100 - first_left:.2f}%"'
    if right > NO_ROOM_AFTER and first_left < 100 - NO_ROOM_AFTER:
        where = f'class="within" style="right:{100 - right:.2f}%"'
    return f"{''.join(bars)}<span {where}>{escape(text)}</span>"


def _bar(attempt: AttemptView, *, start: float, total: float, until: float) -> str:
    left = 100 * max(0.0, attempt.started_at - start) / total
    seconds = max(0.0, (attempt.ended_at or until) - attempt.started_at)
    title = f"attempt {attempt.attempt}: {attempt.status.value.lower()}, {duration_text(seconds)}"
    return (
        f'<span class="bar {attempt.status.value}" title="{escape(title)}" '
        f'style="left:{min(left, 100):.2f}%;width:{min(100 * seconds / total, 100 - min(left, 100)):.2f}%"></span>'
    )


def _ticks(total: float) -> str:
    step = next((step for step in TICK_STEPS if total / step <= 6), 86400 * max(1, round(total / 86400 / 6)))
    count = int(total / step) + 1
    return "".join(_tick(index * step, total) for index in range(count) if 100 * index * step / total <= 97)


def _tick(seconds: float, total: float) -> str:
    at = 100 * seconds / total
    whole = round(seconds)
    text = f"{seconds:g} s"
    if total >= 3600:
        text = f"{whole // 3600}:{whole % 3600 // 60:02d} h"
    elif total >= 60:
        text = f"{whole // 60}:{whole % 60:02d}"
    return f'<span style="left:{at:.2f}%">{text}</span><i style="left:{at:.2f}%"></i>'


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
