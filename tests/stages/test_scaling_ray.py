"""Ray Serve scales by the requests that HAProxy sends straight to the replicas, down to none and back."""

import json
import time
import urllib.request
from pathlib import Path

import pytest
from test_deploy_serve import context_of, write_model

from pipeline.stages.deploy_serve import run

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
def test_a_deployment_that_sleeps_answers_the_request_that_wakes_it(ray_cluster: str, tmp_path: Path) -> None:
    from pipeline.serving.rollout.ray_rollout import running_applications
    from pipeline.serving.rollout.ray_serve import delete

    scaling = {
        "min_replicas": 0,
        "max_replicas": 2,
        "idle_delay_seconds": 1.0,
        "averaging_seconds": 1.0,
        "upscale_delay_seconds": 0.0,
    }
    context = context_of(tmp_path, write_model(tmp_path / "model"), autoscaling=scaling)
    object.__setattr__(context, "environment", {"state_directory": str(tmp_path / "state")})
    url = run(context).facts["url"]
    started = time.monotonic()
    while running_applications()["tiny"].replicas:
        assert time.monotonic() - started < SLEEP_SECONDS
        time.sleep(0.1)
    until_asleep = time.monotonic() - started
    until_answered = answered(url)
    print(f"asleep after {until_asleep:.1f} s; the request that woke it took {until_answered:.1f} s; {answered(url)}")
    assert running_applications()["tiny"].num_running == 1
    delete("tiny")
