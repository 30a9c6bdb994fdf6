"""A canary on a real cluster: a good challenger takes over, one that says something else goes."""

import json
import threading
import urllib.request
from pathlib import Path

import pytest
from test_deploy_serve import context_of, write_model

from pipeline.artifacts.store import open_store
from pipeline.errors import GateError
from pipeline.serving.rollout.deployment_record import deployment_events
from pipeline.stages.deploy_serve import run
from pipeline.stages.reporting import BufferedReporter

TRIAL_SECONDS = 60.0


class Clients:
    """Two that ask all the time; every answer has a status and the version that computed it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.statuses: list[int] = []
        self.arms: list[str] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(2)]

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)

    def _ask(self) -> None:
        body = json.dumps({"model": "tiny", "prompt": "def main", "max_tokens": 8, "temperature": 0}).encode()
        while not self._stop.wait(0.02):
            request = urllib.request.Request(f"{self.url}/completions", body, {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    answer.read()
                    self.statuses.append(answer.status)
                    self.arms.append(answer.headers.get("x-served-by", ""))
            except urllib.error.HTTPError as error:
                self.statuses.append(error.code)


def notes(reporter: BufferedReporter) -> str:
    return "\n".join(report.payload["text"] for report in reporter.drain() if report.kind == "note")


@pytest.mark.ray
@pytest.mark.slow
def test_a_good_challenger_takes_over_and_one_that_disagrees_goes(ray_cluster: str, tmp_path: Path) -> None:
    from ray import serve

    from pipeline.serving.rollout.ray_rollout import describe
    from pipeline.serving.rollout.ray_serve import delete

    store = tmp_path / "store"
    environment = {"store": str(store), "state_directory": str(tmp_path / "state")}

    def context(seed: int, digest: str, **given):
        reporter = BufferedReporter()
        made = context_of(
            tmp_path, write_model(tmp_path / f"m{digest}", seed=seed), digest=digest * 64, reporter=reporter, **given
        )
        object.__setattr__(made, "environment", environment)
        return made, reporter

    rules = {"min_requests": 8, "window_seconds": TRIAL_SECONDS}
    first, reporter = context(0, "a", canary={"percent": 50, **rules})
    result = run(first)
    assert "no canary: nothing serves as 'tiny' yet" in notes(reporter)
    with Clients(result.facts["url"]) as clients:
        second, reporter = context(1, "b", canary={"percent": 50, "until": {"error_rate": "< 1%"}, **rules})
        promoted = run(second)
        said = notes(reporter)
        assert "canary: promote: after" in said and "swapped in" in said, said
        assert promoted.metrics["canary_requests"] >= 8 and promoted.metrics["canary_error_rate"] == 0.0
        assert promoted.metrics["canary_champion_requests"] > 0 and promoted.metrics["canary_p95_ttft_ms"] > 0
        assert {"champion", "challenger"} <= set(clients.arms)

        third, reporter = context(2, "c", shadow={"until": {"agreement": ">= 0.99"}, **rules})
        with pytest.raises(GateError, match=r"shadow of 'tiny'.*agreement = 0 FAILS >= 0.99"):
            run(third)
        (metrics,) = [report.payload for report in reporter.drain() if report.kind == "metrics"]
        assert metrics["shadow_agreement"] == 0.0 and metrics["shadow_error_rate"] == 0.0
    assert set(clients.statuses) == {200} and len(clients.statuses) > 30

    assert [(one["traffic"], one["models"]["tiny"]["digest"]) for one in describe("tiny")] == [({}, "b" * 64)]
    assert "tiny-challenger" not in serve.status().applications
    events = deployment_events(open_store(str(store)), "tiny")
    assert [(event.action, event.target.digest[0]) for event in events] == [
        ("deploy", "a"),
        ("canary", "a"),
        ("deploy", "b"),
        ("shadow", "b"),
    ]
    assert "rollback of version" in events[-1].reason and "FAILS" in events[-1].gates["agreement"]
    delete("tiny")
