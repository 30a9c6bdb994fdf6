import math
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.tracking.chart import MAX_LINE_POINTS, MAX_SCATTER_POINTS, render_chart, standalone_svg

HOSTILE = "<script>alert(1)</script>\"'&"
SVG = "{http://www.w3.org/2000/svg}"


def chart(*series, kind="lines", **more):
    return {
        "title": "t",
        "kind": kind,
        "x_label": "x",
        "y_label": "y",
        "x_scale": "linear",
        "y_scale": "linear",
        "series": [{"name": name, "x": list(x), "y": list(y)} for name, x, y in series],
        **more,
    }


def parse(text):
    return ElementTree.fromstring(text)


NUMBERS = st.lists(st.floats(width=64), min_size=0, max_size=8)


@given(NUMBERS, NUMBERS, st.sampled_from(["lines", "scatter", "bars"]), st.sampled_from(["linear", "log"]), st.text())
def test_any_numbers_and_names_give_well_formed_svg_without_nan(x, y, kind, scale, name):
    name = "".join(c for c in name if c.isprintable())
    text = render_chart(
        chart((name, x, y), ("b", x, y), kind=kind, x_scale=scale, y_scale=scale, title=name), title=True
    )
    root = parse(text)
    positions = [
        value
        for element in root.iter()
        for key, value in element.attrib.items()
        if key in ("x", "y", "cx", "cy", "points")
    ]
    assert not any("nan" in value or "inf" in value for value in positions)


def test_names_are_escaped_everywhere():
    text = render_chart(
        chart((HOSTILE, ["<b>", "c"], [1, 2]), ("z", ["<b>"], [3]), title=HOSTILE, x_label=HOSTILE, y_label=HOSTILE),
        title=True,
    )
    parse(text)
    assert "<script" not in text
    assert "<b>" not in text


def test_values_that_cannot_be_drawn_break_the_line_and_are_counted():
    root = parse(render_chart(chart(("loss", range(7), [1, 2, math.nan, 3, 4, math.inf, 5]))))
    assert len(root.findall(f".//{SVG}polyline")) == 2
    assert "2 values are not drawable" in "".join(root.itertext())


def test_one_point_is_a_dot():
    root = parse(render_chart(chart(("loss", [3], [2.5]))))
    assert len(root.findall(f".//{SVG}circle")) == 1


@pytest.mark.parametrize("given", [{}, chart(), chart(("a", [], []))])
def test_no_values_are_said_in_words(given):
    assert "no values were reported" in render_chart(given)


def test_long_series_are_thinned_but_keep_their_spikes():
    y = [0.0] * 20_000
    y[12_345] = 1000.0
    root = parse(render_chart(chart(("loss", range(20_000), y))))
    points = root.find(f".//{SVG}polyline").attrib["points"].split()
    assert len(points) <= MAX_LINE_POINTS + 4
    assert min(float(point.split(",")[1]) for point in points) < 60


def test_large_scatters_are_sampled():
    text = render_chart(chart(("a", range(100_000), range(100_000)), kind="scatter"))
    assert text.count("<circle") <= MAX_SCATTER_POINTS + 1


def test_bars_of_categories_are_labelled():
    root = parse(render_chart(chart(("ours", ["a", "b"], [1, 2]), ("peer", ["a", "b"], [2, 1]), kind="bars")))
    assert len(root.findall(f".//{SVG}rect")) == 4
    assert {"a", "b", "ours", "peer"} <= set(root.itertext())


def test_a_standalone_picture_brings_its_style_and_title():
    text = standalone_svg(chart(("a", [1, 2], [1, 2]), title="the title"))
    assert "prefers-color-scheme" in text
    assert "the title" in "".join(parse(text).itertext())


def test_bars_on_a_logarithmic_axis_are_spread_by_their_exponents() -> None:
    chart = {
        "title": "differences",
        "kind": "bars",
        "x_scale": "log",
        "series": [{"name": "logits", "x": [1e-8, 1e-7, 1e-6], "y": [3, 2, 1]}],
    }
    places = [float(x) for x in re.findall(r'<rect x="([\d.]+)"', render_chart(chart))][:3]
    assert places[1] - places[0] == pytest.approx(places[2] - places[1], abs=0.2)
    assert places[1] - places[0] > 20
