"""A deployment that is not asked goes to sleep, and the request that wakes it is answered."""

import json
import time
import urllib.request
from pathlib import Path

import pytest
from test_deploy_serve import context_of, write_model

from pipeline.stages.deploy_serve import run
from pipeline.stages.reporting import BufferedReporter

SLEEP_SECONDS = 60.0


def answered(url: str) -> float:
    """Seconds until a request has its answer."""
    body = json.dumps({"model": "tiny", "prompt": "def main", "max_tokens": 4, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/completions", body, {"Content-Type": "application/json"})
    started = time.monotonic()
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 4
    return time.monotonic() - started


@pytest.mark.ray
@pytest.mark.slow
def test_it_sleeps_wakes_for_a_request_and_takes_a_new_version_asleep(ray_cluster: str, tmp_path: Path) -> None:
    from pipeline.serving.ray_rollout import running_applications
    from pipeline.serving.ray_serve import delete

    scaling = {
        "min_replicas": 0,
        "max_replicas": 2,
        "idle_delay_seconds": 0.5,
        "averaging_seconds": 1.0,
        "upscale_delay_seconds": 0.0,
    }

    def asleep() -> float:
        started = time.monotonic()
        while running_applications()["tiny"].num_running:
            assert time.monotonic() - started < SLEEP_SECONDS
            time.sleep(0.1)
        return time.monotonic() - started

    def deployed(seed: int) -> tuple[str, BufferedReporter]:
        reporter = BufferedReporter()
        model = write_model(tmp_path / f"m{seed}", seed=seed)
        context = context_of(tmp_path, model, digest=str(seed) * 64, reporter=reporter, autoscaling=scaling)
        object.__setattr__(context, "environment", {"state_directory": str(tmp_path / "state")})
        return run(context).facts["url"], reporter

    url, _ = deployed(0)
    until_asleep = asleep()
    until_awake = answered(url)
    print(f"asleep after {until_asleep:.1f} s, answered after {until_awake:.1f} s, then {answered(url):.3f} s")
    assert running_applications()["tiny"].num_running == 1
    asleep()
    _, reporter = deployed(1)
    assert "tiny sleeps; waking it" in [r.payload["text"] for r in reporter.drain() if r.kind == "note"]
    delete("tiny")
