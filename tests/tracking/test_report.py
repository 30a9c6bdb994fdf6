import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from sample_run import RUN_ID, failed_run, llm_run, wide_run

from pipeline.tracking.report import render_report
from pipeline.tracking.view import RunStatus, SeriesPoint, StageStatus, StageView

HOSTILE = '<script>alert("x")</script><img src=http://evil/ onerror=1>\'&'
VOID = {"meta", "link", "img", "br", "rect", "path", "circle", "line", "polyline"}


class Text(HTMLParser):
    """The page's tags, attributes and text; fails on an element that is closed but was not open."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.words, self.open = [], [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def hostile_run():
    stage = StageView(
        name=HOSTILE,
        kind=HOSTILE,
        status=StageStatus.FAILED,
        reason=HOSTILE,
        needs=(HOSTILE,),
        fingerprint=HOSTILE,
        producer_run_id=HOSTILE,
        attempts=tuple(replace(a, error=HOSTILE, failure_class=HOSTILE) for a in llm_run().stages[1].attempts),
        metrics={HOSTILE: float("nan")},
        facts={HOSTILE: HOSTILE, "list": [HOSTILE], "url": "http://x/" + HOSTILE.replace(" ", "")},
        series={HOSTILE: [SeriesPoint(step=1, value=float("inf"), time=0.0)]},
        figures={HOSTILE: {"title": HOSTILE, "kind": HOSTILE, "series": [{"name": HOSTILE, "x": [HOSTILE], "y": [1]}]}},
        digests={HOSTILE: HOSTILE},
        gates=tuple(replace(gate, metric=HOSTILE, value=float("nan")) for gate in llm_run().stages[3].gates),
    )
    return replace(
        llm_run(),
        run_id=HOSTILE,
        flow=HOSTILE,
        flow_file=HOSTILE,
        flow_text=HOSTILE,
        error=HOSTILE,
        host=HOSTILE,
        user=HOSTILE,
        parameters={HOSTILE: HOSTILE},
        stages=(stage,),
    )


RUNS = {
    "done": llm_run(),
    "failed": failed_run(),
    "wide": wide_run(),
    "hostile": hostile_run(),
    "empty": replace(llm_run(), stages=(), parameters={}, flow_text=""),
    "crashed": replace(llm_run(), status=RunStatus.CRASHED, ended_at=None, error="the driver died"),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_page_is_well_formed_and_asks_for_nothing(name):
    page = Text(render_report(RUNS[name]))
    assert not {"script", "img", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    loading = [value for key, value in page.attributes if key in ("src", "srcset", "data", "xlink:href", "action")]
    assert loading == []
    assert [value for key, value in page.attributes if key == "href" and not value.startswith("http")] == ["data:,"]
    assert not [key for key, _ in page.attributes if key.startswith("on")]
    assert not re.search(r"url\(|@import", render_report(RUNS[name]))


def test_hostile_names_are_shown_as_text():
    page = render_report(hostile_run())
    assert "<script" not in page
    assert "<img" not in page
    assert HOSTILE in "".join(Text(page).words)


def test_a_finished_run_says_what_happened():
    text = Text(render_report(llm_run())).text
    for expected in (
        RUN_ID,
        "2 min 57 s",
        "7 of 7",
        "1 reused",
        "3 of 3",
        "24.71",
        "1.24e-5",
        "max abs logit difference",
        "<= 0.001",
        "holds",
        "Learning rate",
        "tokens per second",
        "rank 1 ended with signal 9 (SIGKILL) at step 60",
        "20251231-220000-llm-77aa",
        "models:/stdlib-llama/4",
        "auto: no worker has a GPU",
        "uses: train.fsdp",
    ):
        assert expected in text


def test_a_failed_run_opens_what_failed_and_says_the_gap():
    page = render_report(failed_run())
    text = Text(page).text
    assert "Failed. stage parity: max_abs_logit_difference = 0.81 FAILS <= 0.001" in text
    assert "3 tracking calls were lost" in text
    assert "missing" in text
    assert "NaN" in text
    assert page.count('<details class="card" open>') == 1


def test_every_stage_of_a_large_run_is_in_graph_timeline_and_details():
    page = render_report(wide_run())
    assert page.count('class="node ') == 30
    assert page.count('class="track"') == 30
    assert page.count("<details") == 31
    assert "so far" in Text(page).text


def test_loss_and_validation_loss_share_a_chart():
    page = render_report(llm_run())
    curves = page.split("<h2>Curves</h2>")[1].split("<h2>")[0]
    assert curves.count("<figure") == 4
    assert curves.count("<polyline") == 5


def test_a_page_of_a_long_training_stays_small():
    run = llm_run()
    points = [SeriesPoint(step=n, value=1 / (n + 1), time=float(n)) for n in range(50_000)]
    stages = tuple(replace(s, series={"loss": points}) if s.name == "train" else s for s in run.stages)
    assert len(render_report(replace(run, stages=stages))) < 200_000


def test_secrets_do_not_reach_the_page():
    run = replace(
        llm_run(),
        error="cannot reach http://ada:hunter2@db",
        flow_text="store: s3://u:hunter2@x",
        parameters={"password": "hunter2"},
    )
    assert "hunter2" not in render_report(run)
