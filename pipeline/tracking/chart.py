"""Charts as SVG text.

Owns lines, scatter and bars in the form `Reporter.figure` takes. Knows nothing of runs or pages. The one decision: no
script and no library, so that a picture is the same in the report, in MLflow's artifact view and in a file; colours are
CSS variables that follow the reader's light or dark scheme.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from pipeline.stages.protocol import JSON
from pipeline.tracking.scale import Scale, bar_distance, fit, fit_bars, number_text, tick_texts

WIDTH = 520
HEIGHT = 270
MAX_LINE_POINTS = 400
MAX_SCATTER_POINTS = 1500
MAX_SERIES = 12
NUM_COLOURS = 6
_LEFT, _RIGHT, _BOTTOM = 58, 14, 40
_CHARACTER = 6.6
"""Mean width of a character at the chart's text size, for the legend's line breaks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One named sequence of points; `x` are numbers, or positions of `labels`."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]


def chart_css() -> str:
    """The style rules every chart needs once per page."""
    return files("pipeline.tracking").joinpath("chart.css").read_text(encoding="utf-8")


def standalone_svg(chart: Mapping[str, JSON]) -> str:
    """A chart as a file of its own, with its title and style inside."""
    return render_chart(chart, title=True, style=chart_css())


def render_chart(chart: Mapping[str, JSON], *, title: bool = False, style: str = "") -> str:
    """A chart in the form `Reporter.figure` takes, as one `<svg>` element.

    Values that are not finite break a line and are counted below it; a series of one point is a dot; no values at all
    is said in words. Text is escaped.
    """
    labels, series = _read(chart)
    name = str(chart.get("title", ""))
    legend, legend_height = _legend(chart, series)
    top = (26 if title else 8) + legend_height
    x = (fit_bars if chart.get("kind") == "bars" else fit)(
        [value for one in series for value in one.x],
        start=_LEFT,
        end=WIDTH - _RIGHT,
        log=chart.get("x_scale") == "log" and not labels,
    )
    y = fit(
        [value for one in series for value in one.y],
        start=HEIGHT - _BOTTOM,
        end=top + 6,
        log=chart.get("y_scale") == "log",
        zero=chart.get("kind") == "bars",
    )
    hidden = sum(not (x.shows(a) and y.shows(b)) for one in series for a, b in zip(one.x, one.y, strict=True))
    draw = {"scatter": _scatter, "bars": _bars}.get(str(chart.get("kind")), _lines)
    body = draw(series, x, y) if any(one.x for one in series) else _no_data()
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(name)}">',
        f"<style>{style}</style>" if style else "",
        f'<text class="title" x="{_LEFT}" y="16">{escape(_short(name, 60))}</text>' if title else "",
        f'<g transform="translate({_LEFT} {22 if title else 4})">{legend}</g>',
        _axes(chart, x, y, labels),
        body,
        _hidden_note(hidden),
        "</svg>",
    ]
    return "".join(parts)


def _read(chart: Mapping[str, JSON]) -> tuple[list[str], list[Series]]:
    """Axis labels (where x is text) and the series as numbers."""
    given = list(chart.get("series") or ())[:MAX_SERIES]
    texts = [value for one in given for value in one.get("x") or () if isinstance(value, str)]
    labels = list(dict.fromkeys(str(value) for one in given for value in one.get("x") or ())) if texts else []
    position = {label: float(index) for index, label in enumerate(labels)}
    series = []
    for index, one in enumerate(given):
        pairs = list(zip(one.get("x") or (), one.get("y") or (), strict=False))
        series.append(
            Series(
                name=str(one.get("name", f"series {index + 1}")),
                x=tuple(position[str(a)] if labels else _number(a) for a, _ in pairs),
                y=tuple(_number(b) for _, b in pairs),
            )
        )
    return labels, series


def _number(value: JSON) -> float:
    if value is None or isinstance(value, str):
        return {"inf": math.inf, "-inf": -math.inf, "Infinity": math.inf, "-Infinity": -math.inf}.get(
            str(value), math.nan
        )
    return float(value)


def _axes(chart: Mapping[str, JSON], x: Scale, y: Scale, labels: Sequence[str]) -> str:
    parts = []
    bottom = HEIGHT - _BOTTOM
    for tick, text in zip(y.ticks(), tick_texts(y.ticks()), strict=True):
        at = y.at(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 7}" y="{at + 4:.1f}" text-anchor="end">{text}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    if labels:
        room = (WIDTH - _LEFT - _RIGHT) / len(labels) / _CHARACTER
        every = max(1, math.ceil(4 / room))
        marks = [(float(i), _short(label, max(4, int(room * every)))) for i, label in enumerate(labels)][::every]
    else:
        marks = list(zip(x.ticks(), tick_texts(x.ticks()), strict=True))
    for tick, text in marks:
        at = x.at(tick)
        parts.append(f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 17}" text-anchor="middle">{escape(text)}</text>')
    middle_x, middle_y = (_LEFT + WIDTH - _RIGHT) / 2, (y.start + y.end) / 2
    x_label, y_label = _short(str(chart.get("x_label", "")), 60), _short(str(chart.get("y_label", "")), 34)
    parts.append(f'<text x="{middle_x:.1f}" y="{HEIGHT - 5}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(
        f'<text transform="translate(11 {middle_y:.1f}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>'
    )
    return "".join(parts)


def _legend(chart: Mapping[str, JSON], series: Sequence[Series]) -> tuple[str, int]:
    """Names with their colour, wrapped; nothing where one series says what the title says."""
    if len(series) <= 1 and (not series or series[0].name in ("", chart.get("title"), chart.get("y_label"))):
        return "", 0
    parts, at, row = [], 0.0, 0
    for index, one in enumerate(series):
        name = _short(one.name, 30)
        width = 24 + _CHARACTER * len(name) + 16
        if at and at + width > WIDTH - _LEFT - _RIGHT:
            at, row = 0.0, row + 1
        y = 18 * row + 8
        mark = (
            f'<line class="line {_dash(index)}" x1="{at:.1f}" x2="{at + 16:.1f}" y1="{y}" y2="{y}"/>'
            if chart.get("kind", "lines") == "lines"
            else f'<circle class="mark" cx="{at + 8:.1f}" cy="{y}" r="4"/>'
        )
        parts.append(
            f'<g class="{_colour(index)}">{mark}<text class="name" x="{at + 22:.1f}" y="{y + 4}">{escape(name)}'
            f"<title>{escape(one.name)}</title></text></g>"
        )
        at += width
    return "".join(parts), 18 * (row + 1)


def _lines(series: Sequence[Series], x: Scale, y: Scale) -> str:
    parts = []
    for index, one in enumerate(series):
        drawn = []
        for run in _unbroken(one, x, y):
            if len(run) == 1:
                drawn.append(f'<circle class="mark" cx="{x.at(run[0][0]):.1f}" cy="{y.at(run[0][1]):.1f}" r="3.5"/>')
            else:
                path = " ".join(f"{x.at(a):.1f},{y.at(b):.1f}" for a, b in _thin(run))
                drawn.append(f'<polyline class="line {_dash(index)}" points="{path}"/>')
        shown = [(a, b) for a, b in zip(one.x, one.y, strict=True) if x.shows(a) and y.shows(b)]
        if len(shown) > 1:
            drawn.append(f'<circle class="mark" cx="{x.at(shown[-1][0]):.1f}" cy="{y.at(shown[-1][1]):.1f}" r="2.6"/>')
        hint = f"{one.name}: {number_text(shown[-1][1])} at {number_text(shown[-1][0])}" if shown else one.name
        parts.append(f'<g class="{_colour(index)}"><title>{escape(hint)}</title>{"".join(drawn)}</g>')
    return "".join(parts)


def _unbroken(one: Series, x: Scale, y: Scale) -> list[list[tuple[float, float]]]:
    runs: list[list[tuple[float, float]]] = [[]]
    for point in zip(one.x, one.y, strict=True):
        if x.shows(point[0]) and y.shows(point[1]):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `MAX_LINE_POINTS` points; of each bucket its lowest and highest, so that spikes stay."""
    if len(points) <= MAX_LINE_POINTS:
        return list(points)
    size = math.ceil(2 * len(points) / MAX_LINE_POINTS)
    kept = [points[0]]
    for start in range(0, len(points), size):
        indexes = range(start, min(start + size, len(points)))
        low, high = min(indexes, key=lambda i: points[i][1]), max(indexes, key=lambda i: points[i][1])
        kept.extend(points[i] for i in sorted({low, high}))
    return [*kept, points[-1]]


def _scatter(series: Sequence[Series], x: Scale, y: Scale) -> str:
    parts = []
    for index, one in enumerate(series):
        shown = [(a, b) for a, b in zip(one.x, one.y, strict=True) if x.shows(a) and y.shows(b)]
        every = max(1, math.ceil(len(shown) / MAX_SCATTER_POINTS))
        dots = "".join(f'<circle cx="{x.at(a):.1f}" cy="{y.at(b):.1f}" r="2.2"/>' for a, b in shown[::every])
        parts.append(f'<g class="mark faint {_colour(index)}"><title>{escape(one.name)}</title>{dots}</g>')
    return "".join(parts)


def _bars(series: Sequence[Series], x: Scale, y: Scale) -> str:
    base = y.start if y.log else y.at(0.0)
    slot = 0.8 * bar_distance([value for one in series for value in one.x], x) / max(1, len(series))
    width = min(slot, 56.0)
    parts = []
    for index, one in enumerate(series):
        offset = (index - len(series) / 2) * width
        bars = []
        for a, b in zip(one.x, one.y, strict=True):
            if x.shows(a) and y.shows(b):
                top, low = sorted((y.at(b), base))
                bars.append(
                    f'<rect x="{x.at(a) + offset:.1f}" y="{top:.1f}" width="{max(width - 1, 0.5):.1f}" '
                    f'height="{low - top:.1f}"><title>{escape(one.name)}: {number_text(b)}</title></rect>'
                )
        parts.append(f'<g class="mark {_colour(index)}">{"".join(bars)}</g>')
    return "".join(parts)


def _no_data() -> str:
    return (
        f'<text x="{(_LEFT + WIDTH) / 2:.0f}" y="{HEIGHT / 2:.0f}" text-anchor="middle">no values were reported</text>'
    )


def _hidden_note(hidden: int) -> str:
    if not hidden:
        return ""
    noun = "value is" if hidden == 1 else "values are"
    text = f"{hidden} {noun} not drawable"
    return f'<text class="name" x="{WIDTH - _RIGHT}" y="{HEIGHT - 5}" text-anchor="end">{text}</text>'


def _colour(index: int) -> str:
    return f"s{index % NUM_COLOURS + 1}"


def _dash(index: int) -> str:
    return f"d{index % 3 + 1}" if index else "d1"


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
