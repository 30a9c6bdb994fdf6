"""How values are written on the report's page.

Owns durations, times, digests, chips and rows. Knows nothing of the page's order. The one decision: every text goes
through `escape` here or in the caller that writes the element; there is no place where a name becomes markup.
"""

import json
import time
from collections.abc import Iterable, Mapping
from html import escape

from pipeline.stages.protocol import JSON
from pipeline.tracking.redaction import scrub
from pipeline.tracking.scale import number_text

DIGEST_CHARACTERS = 12
NOTHING = "-"
NOTHING_HTML = f'<span class="muted">{NOTHING}</span>'


def duration_text(seconds: float | None) -> str:
    """`0.42 s`, `8.1 s`, `1 min 05 s`, `2 h 03 min`; a dash where nothing is known."""
    if seconds is None:
        return NOTHING
    seconds = max(0.0, seconds)
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def when_text(seconds: float) -> str:
    """`2026-03-01 14:05:09 UTC`."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def chip(status: str) -> str:
    """A status as a coloured word."""
    return f'<span class="chip {escape(status)}">{escape(status.lower())}</span>'


def digest(value: str | None) -> str:
    """The first characters of a digest; the whole as a tooltip."""
    if not value:
        return NOTHING_HTML
    return f'<code title="{escape(value)}">{escape(value[:DIGEST_CHARACTERS])}</code>'


def words(name: str) -> str:
    """`tokens_per_second` as `tokens per second`."""
    return name.replace("_", " ")


def value_html(value: JSON) -> str:
    """A fact for a person: numbers aligned and short, web addresses as links, anything nested as JSON."""
    if isinstance(value, bool) or value is None:
        return escape(json.dumps(value))
    if isinstance(value, int | float):
        return escape(number_text(float(value), digits=6))
    if not isinstance(value, str):
        return f"<code>{escape(scrub(json.dumps(value, default=str, sort_keys=True)))}</code>"
    text = escape(scrub(value))
    if value.startswith(("http://", "https://")) and not any(character.isspace() for character in value):
        return f'<a href="{text}" rel="noreferrer">{text}</a>'
    return text


def facts_table(rows: Mapping[str, JSON]) -> str:
    """Name and value, a row each."""
    body = "".join(
        f"<tr><td>{escape(words(name))}</td><td>{value_html(value)}</td></tr>" for name, value in rows.items()
    )
    return f'<table class="facts"><tbody>{body}</tbody></table>'


def table(columns: Iterable[tuple[str, bool]], rows: Iterable[Iterable[str]]) -> str:
    """A table of ready cells; `columns` are (heading, whether its cells are numbers)."""
    heads = list(columns)
    css = [' class="number"' if number else "" for _, number in heads]
    head = "".join(f"<th{one}>{escape(text)}</th>" for one, (text, _) in zip(css, heads, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{one}>{cell}</td>" for one, cell in zip(css, row, strict=True)) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
