"""`/metrics` as a Prometheus server reads it."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pipeline.serving.engine.metrics import COUNTERS, GAUGES, HISTOGRAMS, Metrics, render

DASHBOARDS = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total", "generation_tokens_total", "request_success_total"),
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
    *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
)
"""Names that dashboards of language model servers know."""


def families(text):
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_every_name_is_there_once_with_its_type_and_its_help():
    text = render([Metrics(model="one"), Metrics(model="two")])
    found = families(text)
    assert {name.removesuffix("_total") for name in DASHBOARDS} <= set(found)
    for table, kind in ((COUNTERS, "counter"), (GAUGES, "gauge"), (HISTOGRAMS, "histogram")):
        for name, words in table.items():
            family = found[name.removesuffix("_total")]
            assert family.type == kind and family.documentation == words
            assert text.count(f"# TYPE {name} ") == 1


def test_values_of_several_models_stand_beside_each_other():
    one, two = Metrics(model="one"), Metrics(model='odd "name"\\ of\ntwo')
    one.count("generation_tokens_total", 123456789)
    two.count("request_success_total", label="stop")
    two.gauge("kv_cache_usage_perc", 0.125)
    found = families(render([one, two]))
    tokens = {sample.labels["model_name"]: sample.value for sample in found["generation_tokens"].samples}
    assert tokens == {"one": 123456789.0, two.model: 0.0}
    ended = {tuple(sample.labels.values()): sample.value for sample in found["request_success"].samples}
    assert ended[two.model, "stop"] == 1.0 and ended["one", "length"] == 0.0
    assert [sample.value for sample in found["kv_cache_usage_perc"].samples] == [0.0, 0.125]


def test_a_histogram_is_cumulative_and_ends_with_everything():
    metrics = Metrics(model="tiny")
    for seconds, times in ((0.002, 1), (0.2, 3), (1000.0, 1)):
        metrics.observe("inter_token_latency_seconds", seconds, times=times)
    samples = families(metrics.render())["inter_token_latency_seconds"].samples
    buckets = {sample.labels["le"]: sample.value for sample in samples if sample.name.endswith("_bucket")}
    assert buckets["0.001"] == 0 and buckets["0.005"] == 1 and buckets["0.25"] == 4 and buckets["+Inf"] == 5
    assert list(buckets.values()) == sorted(buckets.values())
    totals = {sample.name.rpartition("_")[2]: sample.value for sample in samples if "le" not in sample.labels}
    assert totals["count"] == 5 and totals["sum"] == pytest.approx(1000.602)


def test_a_name_that_is_not_in_the_table_is_an_error():
    metrics = Metrics(model="tiny")
    for record in (metrics.count, lambda name: metrics.gauge(name, 1.0), lambda name: metrics.observe(name, 1.0)):
        with pytest.raises(KeyError):
            record("tokens_of_all_kinds")


def test_a_process_has_only_the_names_it_counts():
    process = Metrics(model="", names=("rejected_requests_total",))
    process.count("rejected_requests_total", label="401")
    samples = [sample for family in families(process.render()).values() for sample in family.samples]
    assert [(sample.name, sample.labels["status"]) for sample in samples] == [("rejected_requests_total", "401")]
