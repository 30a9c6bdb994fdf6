"""However a trial ends, the champion has all requests again and the challenger is gone."""

import dataclasses
import time
from types import SimpleNamespace

import pytest
from test_deploy_serve import context_of

from pipeline.artifacts.store import open_store
from pipeline.errors import ArtifactError, ClusterError, GateError
from pipeline.serving.replica_settings import ProcessSettings, ReplicaConfig, ReplicaSettings
from pipeline.serving.rollout.deployment_record import deployment_events
from pipeline.serving.rollout.ray_serve import Endpoint
from pipeline.serving.traffic.traffic_conditions import ArmCount, CopyCount, Evidence
from pipeline.stages import trial
from pipeline.stages.deployment import Watch
from pipeline.stages.reporting import BufferedReporter

AT = Endpoint(host="127.0.0.1", port=8000, route_prefix="/")
PROCESS = ProcessSettings(
    identity="i",
    isolation="process",
    cpus=1.0,
    gpus=0.0,
    replicas=3,
    drain_seconds=1.0,
    environment={},
    autoscaling={"min_replicas": 1, "max_replicas": 3},
)


def settings_of(digest, **given):
    fields = {"name": "tiny", "model_path": "/m", "digest": digest * 64, "version": digest, "deployment_id": digest}
    return ReplicaSettings(
        **{**fields, "slots": 2, "context": 128, "prefill_chunk_tokens": 16, "decode_steps": 2, **given}
    )


CHAMPION, CHALLENGER = settings_of("a"), settings_of("b")
GOOD = Evidence(
    champion=ArmCount(answered=9, ttft_ms=[5.0] * 9, latency_ms=[9.0] * 9),
    challenger=ArmCount(answered=60, ttft_ms=[10.0] * 60, latency_ms=[20.0] * 60),
)
BAD = Evidence(challenger=ArmCount(answered=50, failed=10, ttft_ms=[1.0] * 50, latency_ms=[1.0] * 50))


class Cluster:
    """What the trial asked of Ray Serve, in order; evidence comes from a list, an exception is raised."""

    def __init__(self, monkeypatch, *evidence, start=None, running=True):
        self.asked = []
        self.evidence = list(evidence)
        self.start = start
        config = ReplicaConfig(models=(CHAMPION,), process=PROCESS)
        self.running = {"tiny": SimpleNamespace(config=config, num_running=3)} if running else {}
        monkeypatch.setattr(trial, "running_applications", lambda: self.running)
        monkeypatch.setattr(trial, "bring", self.bring)
        monkeypatch.setattr(trial, "set_traffic", self.set_traffic)
        monkeypatch.setattr(trial, "collect", self.collect)
        monkeypatch.setattr(trial, "take_down", lambda name: self.asked.append(("down", name)))
        monkeypatch.setattr(trial, "JUDGE_SECONDS", 0.01)

    def bring(self, settings, *, application, process, at, **_):
        assert settings == CHALLENGER
        self.asked.append(("start", application, process.replicas, process.autoscaling))
        if self.start is not None:
            raise self.start
        return SimpleNamespace(endpoint=dataclasses.replace(at, route_prefix=f"/{application}"))

    def set_traffic(self, application, traffic, **_):
        self.asked.append(("traffic", application, None if traffic is None else traffic.mode))
        self.traffic = traffic or self.traffic

    def collect(self, application, *, trial_id):
        assert trial_id == self.traffic.trial_id
        found = self.evidence.pop(0) if self.evidence else None
        if isinstance(found, BaseException):
            raise found
        return found


DOWN = ("down", "tiny-challenger")
START = ("start", "tiny-challenger", 1, None)


def trial_of(mode):
    return [("traffic", "tiny", mode), ("traffic", "tiny", None)]


def prove(tmp_path, **given):
    reporter = BufferedReporter()
    context = context_of(tmp_path, tmp_path, reporter=reporter, **given)
    context = dataclasses.replace(context, environment={"store": str(tmp_path / "store")})
    watch = Watch(deadline=time.monotonic() + 60, on_progress=lambda text: None, note=reporter.note)
    try:
        return trial.prove(context, CHALLENGER, application="tiny", process=PROCESS, at=AT, watch=watch), reporter
    finally:
        prove.events = deployment_events(open_store(str(tmp_path / "store")), "tiny")


def test_a_won_canary_gives_its_metrics_and_leaves_no_trace(tmp_path, monkeypatch):
    cluster = Cluster(monkeypatch, None, Evidence(), GOOD)
    metrics, _ = prove(tmp_path, canary={"percent": 25})
    assert cluster.asked == [DOWN, START, *trial_of("canary"), DOWN]
    assert cluster.traffic.percent == 25.0 and cluster.traffic.challenger_url == "http://127.0.0.1:8000/tiny-challenger"
    assert metrics["canary_requests"] == 60.0 and metrics["canary_champion_requests"] == 9.0
    assert metrics["canary_error_rate"] == 0.0 and metrics["canary_p95_latency_ratio"] == pytest.approx(20 / 9)
    (event,) = prove.events
    assert event.action == "canary" and event.target.digest == CHAMPION.digest and "promote" in event.reason


def test_a_lost_canary_is_a_gate_that_fails_with_the_figure_in_tracker_and_history(tmp_path, monkeypatch):
    cluster = Cluster(monkeypatch, BAD)
    with pytest.raises(
        GateError, match=r"version b was taken down: after 60 requests: error_rate = 0.16.* FAILS < 0.01"
    ):
        prove(tmp_path, canary={})
    assert cluster.asked == [DOWN, START, *trial_of("canary"), DOWN]
    (event,) = prove.events
    assert "rollback of version b" in event.reason and "FAILS" in event.gates["error_rate"]
    assert event.settings["digest"] == CHAMPION.digest


def test_a_canary_follows_its_shadow_only_where_that_was_won(tmp_path, monkeypatch):
    equal = dataclasses.replace(GOOD, copies=CopyCount(equal=60))
    both = {"shadow": {"until": {"agreement": ">= 99%"}}, "canary": {}}
    cluster = Cluster(monkeypatch, equal, GOOD)
    metrics, _ = prove(tmp_path, **both)
    assert cluster.asked == [DOWN, START, *trial_of("shadow"), *trial_of("canary"), DOWN]
    assert metrics["shadow_agreement"] == 1.0 and metrics["shadow_compared"] == 60.0 and "canary_requests" in metrics
    cluster = Cluster(monkeypatch, dataclasses.replace(GOOD, copies=CopyCount(equal=1, different=59)))
    with pytest.raises(GateError, match="shadow of 'tiny'"):
        prove(tmp_path, **both)
    assert cluster.asked == [DOWN, START, *trial_of("shadow"), DOWN]


def test_a_trial_without_requests_ends_with_its_window_and_says_so(tmp_path, monkeypatch):
    Cluster(monkeypatch, *[Evidence()] * 100)
    with pytest.raises(GateError, match=r"taken down: no request came within 0.1 s"):
        prove(tmp_path, canary={"window_seconds": 0.1})


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ClusterError("gone")], ids=["ctrl-c", "error"])
def test_an_interrupted_trial_leaves_the_champion_alone(tmp_path, monkeypatch, error):
    cluster = Cluster(monkeypatch, Evidence(), error)
    with pytest.raises(type(error)):
        prove(tmp_path, canary={})
    assert cluster.asked == [DOWN, START, *trial_of("canary"), DOWN]


def test_a_trial_of_which_nothing_is_heard_is_given_up(tmp_path, monkeypatch):
    cluster = Cluster(monkeypatch)
    monkeypatch.setattr(trial, "SILENT_SECONDS", 0.1)
    with pytest.raises(ClusterError, match="no replica has said anything"):
        prove(tmp_path, canary={})
    assert cluster.asked[-2:] == [("traffic", "tiny", None), DOWN]


def test_a_challenger_that_does_not_start_gets_no_request(tmp_path, monkeypatch):
    cluster = Cluster(monkeypatch, start=ArtifactError("damaged"))
    with pytest.raises(ArtifactError, match="damaged"):
        prove(tmp_path, canary={})
    assert cluster.asked == [DOWN, START, DOWN]


def test_without_a_champion_or_a_change_there_is_no_trial(tmp_path, monkeypatch):
    cluster = Cluster(monkeypatch, running=False)
    metrics, reporter = prove(tmp_path, canary={}, shadow=True)
    assert metrics == {} and cluster.asked == []
    assert "no shadow and canary: nothing serves as 'tiny' yet" in reporter.drain()[0].payload["text"]
    cluster = Cluster(monkeypatch)
    cluster.running["tiny"].config = ReplicaConfig(models=(settings_of("b", deployment_id="c"),), process=PROCESS)
    metrics, reporter = prove(tmp_path, canary={})
    assert metrics == {} and cluster.asked == [] and "serves already" in reporter.drain()[0].payload["text"]
