"""`parity.html`: what a parity check found, on one page.

Owns the order of that page. Reads a `ParityReport` and nothing else. The one decision: it looks like the run report,
and the worst number of each level stands on top, beside the limit that it was held against.
"""

from collections.abc import Iterator
from html import escape

from converters.parity_report import OutputAgreement, ParityReport
from pipeline.tracking.page import chart_cards, document, section, tiles
from pipeline.tracking.page_text import NOTHING_HTML, facts_table, table
from pipeline.tracking.scale import number_text

PAGE_FILE = "parity.html"
MAX_SHOWN_TENSORS = 50


def render_parity(report: ParityReport) -> str:
    """The page as HTML text; every name is escaped."""
    sections = [
        _header(report),
        section("Blocks", _blocks(report)),
        section("Outputs", f'<div class="card">{_outputs(report)}</div>'),
        section("Continuations", _continuations(report)),
        section("Tensors", _tensors(report)),
        section("What was compared", f'<div class="card">{facts_table(_facts(report))}</div>'),
    ]
    verdict = "passed" if report.passed else "failed"
    return document(
        f"Parity of {report.name} · {verdict}",
        body="".join(sections),
        footer="Both sides ran in float32 on the CPU. Relative errors are max |Flax - torch| / max |torch|.",
    )


def _header(report: ParityReport) -> str:
    css, word = ("DONE", "passed") if report.passed else ("FAILED", "failed")
    failures = "\n".join(report.failures)
    note = f'<div class="note FAILED"><b>What does not hold.</b>\n{escape(failures)}</div>\n' if failures else ""
    return (
        f'<header>\n<div class="title"><h1>Parity of {escape(report.name)}</h1><span class="chip {css}">{word}</span>'
        f'</div>\n<div class="subtitle"><span>torch: <code>{escape(report.source)}</code></span>'
        f"<span>Flax: <code>{escape(report.model)}</code></span></div>\n{note}{tiles(_tiles(report))}</header>\n"
    )


def _tiles(report: ParityReport) -> Iterator[tuple[str, str, str]]:
    limits, tensors = report.limits, report.tensors
    rounded = f"{len(tensors.rounded)} rounded by a cast" if tensors.rounded else ""
    yield "tensors bit for bit", f"{tensors.num_identical} of {tensors.num_tensors}", rounded
    if report.blocks:
        error = number_text(report.max_block_relative_error, digits=3)
        yield (
            f"largest relative error of {len(report.blocks)} blocks",
            error,
            f"limit {number_text(limits.block_relative_error)}",
        )
    if report.outputs:
        worst = max(report.outputs, key=lambda output: output.max_relative)
        error = number_text(worst.max_relative, digits=3)
        yield f"largest relative error of {worst.name}", error, f"limit {number_text(limits.output_relative_error)}"
    if report.greedy_match is not None:
        yield "greedy match", f"{report.greedy_match:.1%}", f"limit {limits.greedy_match:.0%}"


def _blocks(report: ParityReport) -> str:
    if not report.blocks:
        return '<p class="card muted">This model names no blocks that both sides have.</p>'
    rows = [
        (
            escape(block.name),
            escape(block.torch_name),
            _shape(block.shape),
            number_text(block.max_relative, digits=3),
            number_text(block.mean_relative, digits=3),
            *([number_text(block.torch_rounding or 0.0, digits=3)] if report.judged_in_float64 else []),
            _verdict(holds=block.max_relative <= report.limits.block_relative_error),
        )
        for block in report.blocks
    ]
    columns = [
        ("Flax module", False),
        ("torch module", False),
        ("shape", False),
        ("largest", True),
        ("mean", True),
        *([("torch's own", True)] if report.judged_in_float64 else []),
        ("", False),
    ]
    caption = "Flax in float32, torch in float64" if report.judged_in_float64 else "both sides in float32"
    charts = chart_cards([(caption, chart) for chart in report.charts().values()])
    return f'<div class="lone">{charts}</div><div class="card">{table(columns, rows)}</div>'


def _outputs(report: ParityReport) -> str:
    limits = report.limits
    rows = [
        (
            escape(output.name),
            _shape(output.shape),
            number_text(output.max_abs, digits=3),
            number_text(output.max_relative, digits=3),
            *_logit_cells(output),
            _verdict(
                holds=output.max_relative <= limits.output_relative_error
                and (output.max_kl is None or output.max_kl <= limits.max_kl)
            ),
        )
        for output in report.outputs
    ]
    columns = [
        ("output", False),
        ("shape", False),
        ("absolute", True),
        ("relative", True),
        ("largest KL", True),
        ("same top 1", True),
        ("top 10 shared", True),
        ("", False),
    ]
    return table(columns, rows)


def _logit_cells(output: OutputAgreement) -> tuple[str, str, str]:
    if output.max_kl is None or output.top1_agreement is None or output.topk_overlap is None:
        return NOTHING_HTML, NOTHING_HTML, NOTHING_HTML
    return number_text(output.max_kl, digits=3), f"{output.top1_agreement:.1%}", f"{output.topk_overlap:.1%}"


def _continuations(report: ParityReport) -> str:
    rows = [
        (
            f"{continued.matched}&nbsp;of&nbsp;{len(continued.reference)}",
            f"<code>{escape(' '.join(map(str, continued.reference)))}</code>",
            f"<code>{escape(' '.join(map(str, continued.candidate)))}</code>",
        )
        for continued in report.continuations
    ]
    columns = [("agree", False), ("torch", False), ("Flax", False)]
    return f'<div class="card">{table(columns, rows)}</div>' if rows else ""


def _tensors(report: ParityReport) -> str:
    named = [(name, "differs") for name in report.tensors.differing]
    named += [(name, "rounded by a declared cast") for name in report.tensors.rounded]
    if not named:
        return ""
    rows = [(f"<code>{escape(name)}</code>", escape(why)) for name, why in named[:MAX_SHOWN_TENSORS]]
    more = len(named) - len(rows)
    rest = f'<p class="muted">and {more} more, in parity.json</p>' if more else ""
    return f'<div class="card">{table([("tensor", False), ("", False)], rows)}{rest}</div>'


def _facts(report: ParityReport) -> dict[str, str]:
    inputs = {f"input {name}": what for name, what in report.inputs.items()}
    only = {"only torch gives": ", ".join(report.not_compared)} if report.not_compared else {}
    return {"kind": report.kind, "road": report.road, **inputs, **only}


def _shape(shape: tuple[int, ...]) -> str:
    return "&nbsp;x&nbsp;".join(map(str, shape))


def _verdict(*, holds: bool) -> str:
    return f'<span class="chip {"DONE" if holds else "FAILED"}">{"holds" if holds else "fails"}</span>'
