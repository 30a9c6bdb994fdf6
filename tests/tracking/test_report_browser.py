"""The report in a real browser."""

import pytest
from sample_run import failed_run, llm_run, wide_run

from pipeline.tracking.report import render_report

pytestmark = pytest.mark.browser


def show(page, run, tmp_path, *, width=1280, height=900, scheme="light"):
    path = tmp_path / "report.html"
    path.write_text(render_report(run), encoding="utf-8")
    page.resize(width, height)
    page.prefer(scheme)
    page.requests.clear()
    page.errors.clear()
    page.open(path.as_uri())
    return path.as_uri()


@pytest.mark.parametrize("make", [llm_run, failed_run, wide_run])
def test_the_page_loads_without_errors_and_asks_for_nothing_else(page, tmp_path, make):
    address = show(page, make(), tmp_path)
    assert page.errors == []
    assert [url for url in page.requests if not url.startswith("data:")] == [address]


def test_a_reader_sees_stages_gates_and_curves(page, tmp_path):
    show(page, llm_run(), tmp_path)
    text = page.evaluate("document.body.innerText")
    for expected in ("7 of 7", "evaluate.parity", "max abs logit difference", "holds", "Learning rate", "1 min 55 s"):
        assert expected in text
    assert page.evaluate("document.querySelectorAll('.chart polyline').length") == 7


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("make", [llm_run, failed_run, wide_run])
def test_nothing_sticks_out_of_the_window(page, tmp_path, width, make):
    show(page, make(), tmp_path, width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_text_inside_the_nodes_of_the_graph_fits(page, tmp_path):
    show(page, llm_run(), tmp_path)
    outside = page.evaluate(
        """[...document.querySelectorAll('.graph .node')].flatMap(node => {
             const box = node.querySelector('rect').getBoundingClientRect();
             return [...node.querySelectorAll('text')].filter(t => t.getBoundingClientRect().right > box.right - 2)
               .map(t => t.textContent);
           })"""
    )
    assert outside == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(page, tmp_path, scheme):
    """WCAG AA: 4.5 to 1 for every chip and muted text."""
    show(page, failed_run(), tmp_path, scheme=scheme)
    worst = page.evaluate(CONTRAST)
    assert worst["ratio"] >= 4.5, worst


CONTRAST = """(() => {
  const parse = c => c.match(/[\\d.]+/g).map(Number);
  const light = c => { const [r, g, b] = parse(c).map(v => { v /= 255;
    return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; }); return 0.2126*r + 0.7152*g + 0.0722*b; };
  const ground = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
    if ((parse(c)[3] ?? 1) === 1) return c; } return 'rgb(255,255,255)'; };
  let worst = {ratio: 99};
  const all = '.chip, .muted, .subtitle, td, th, dt, dd, .after, .before, .mark, .within, p, b';
  for (const e of document.querySelectorAll(all)) {
    if (!e.innerText || !e.offsetParent) continue;
    const back = e.className === 'within' ? getComputedStyle(e.previousElementSibling).backgroundColor : ground(e);
    const a = light(getComputedStyle(e).color), b = light(back);
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < worst.ratio) worst = {ratio, text: e.innerText.slice(0, 40), tag: e.className};
  }
  return worst;
})()"""
