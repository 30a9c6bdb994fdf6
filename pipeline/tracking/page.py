"""The frame of a page: one self-contained HTML file without scripts.

Owns the document around the sections, and what every page is made of: sections, tiles, charts in cards. Knows nothing
of runs or reports. The one decision: style and pictures are inside the file, so that it can be mailed, archived, shown
by MLflow and read in ten years.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files

from pipeline.stages.protocol import JSON
from pipeline.tracking.chart import chart_css, render_chart


def document(title: str, *, body: str, footer: str) -> str:
    """The whole file; `title` and `footer` are text, `body` is HTML."""
    style = files("pipeline.tracking").joinpath("report.css").read_text(encoding="utf-8") + chart_css()
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n"
        f"<style>\n{style}</style>\n</head>\n<body>\n<main>\n{body}"
        f"<footer>{escape(footer)}</footer>\n"
        "</main>\n</body>\n</html>\n"
    )


def section(title: str, body: str) -> str:
    """A heading and what is below it; nothing where there is no body."""
    return f"<section>\n<h2>{escape(title)}</h2>\n{body}\n</section>\n" if body else ""


def tiles(values: Iterable[tuple[str, str, str]]) -> str:
    """A row of figures: (label, value, small print)."""
    return f'<dl class="tiles">{"".join(_tile(*value) for value in values)}</dl>'


def chart_cards(charts: Sequence[tuple[str, Mapping[str, JSON]]]) -> str:
    """(small print, chart) as cards side by side; a chart is in the form `Reporter.figure` takes."""
    if not charts:
        return ""
    cells = "".join(
        f'<figure class="card"><figcaption>{escape(_sentence(str(chart["title"])))} <span>{escape(small)}</span>'
        f"</figcaption>{render_chart(chart)}</figure>"
        for small, chart in charts
    )
    return f'<div class="charts">{cells}</div>'


def _tile(label: str, value: str, small: str) -> str:
    extra = f'<dd class="small">{escape(small)}</dd>' if small else ""
    return f'<div class="tile"><dt>{escape(label)}</dt><dd>{escape(value)}</dd>{extra}</div>'


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
