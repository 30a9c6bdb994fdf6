"""A deployment that the GPUs have no room for is refused before Ray waits for it."""

import json
import subprocess
import sys
import time
import urllib.request

import numpy as np
import pytest

from pipeline.cluster.ledger import Claim
from pipeline.errors import ParameterError
from pipeline.serving.replica_settings import ProcessSettings
from pipeline.serving.rollout import ray_claims
from pipeline.serving.rollout.ray_claims import check_room


def process(gpus, replicas=1):
    return ProcessSettings(
        identity="i", isolation="process", cpus=1, gpus=gpus, replicas=replicas, drain_seconds=1, environment={}
    )


def serving(*claims):
    return {name: Claim(owner=name, share=share, processes=num) for name, share, num in claims}


@pytest.fixture
def one_gpu(monkeypatch):
    monkeypatch.setattr(ray_claims.ray, "cluster_resources", lambda: {"GPU": 1.0, "CPU": 4.0})


def test_what_serves_counts_and_what_has_no_replica_does_not(one_gpu):
    check_room("new", process(0.5), serving=serving(("a", 0.5, 1), ("gone", 1.0, 0), ("cpu", 0.0, 3)))
    with pytest.raises(ParameterError) as caught:
        check_room("new", process(0.5), serving=serving(("a", 0.5, 1), ("b", 0.25, 1)))
    assert str(caught.value).startswith(
        "GPUs are oversubscribed: 'a' 0.5 + 'b' 0.25 run already; 'new' 0.5 asked for: 1.25 together; "
        "the cluster has 1 GPU"
    )
    assert "isolation: shared" in caught.value.hint


def test_a_deployment_that_is_replaced_needs_room_for_both(one_gpu):
    check_room("a", process(0.6), serving=serving(("a", 0.6, 1)))
    with pytest.raises(ParameterError, match=r"'a \(until it is replaced\)' 0\.6 run already") as caught:
        check_room("a", process(0.6), serving=serving(("a", 0.6, 1)), is_replaced=True)
    assert "swapped in without a second process" in caught.value.hint
    check_room("a", process(0.5), serving=serving(("a", 0.5, 1)), is_replaced=True)


def test_a_cpu_deployment_asks_nobody(monkeypatch):
    monkeypatch.setattr(ray_claims.ray, "cluster_resources", lambda: pytest.fail("asked"))
    check_room("a", process(0.0, replicas=9), serving={})


@pytest.fixture
def gpu_node(ray_cluster):
    """A second node with one logical GPU, for as long as the test runs."""
    import ray

    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--address", ray_cluster, "--block"]
    options = ["--num-cpus", "2", "--num-gpus", "1", "--disable-usage-stats", "--node-ip-address", "127.0.0.1"]
    node = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while ray.cluster_resources().get("GPU", 0) < 1 and time.monotonic() < deadline:
        time.sleep(0.1)
    yield
    node.terminate()
    node.wait(timeout=30)


@pytest.mark.ray
@pytest.mark.slow
def test_two_halves_of_a_logical_gpu_serve_and_a_third_is_refused(gpu_node, tmp_path, model_directory):
    from pipeline.serving.rollout.ray_serve import delete
    from pipeline.stages.deploy_serve import run
    from pipeline.stages.parameters import DeployServeParameters
    from pipeline.stages.protocol import InputArtifact, Resources, StageContext
    from pipeline.stages.reference import OutputReference
    from pipeline.stages.reporting import BufferedReporter

    def deploy(name):
        reporter = BufferedReporter()
        model = InputArtifact(
            stage="flax",
            output="model",
            path=model_directory,
            fingerprint="f",
            digest=name * 64,
            run_id="r",
            metrics={},
        )
        parameters = DeployServeParameters(
            model=OutputReference(stage="flax", output="model"),
            name=name,
            slots=1,
            max_context_tokens=32,
            prefill_chunk_tokens=8,
            prefix_cache_tokens=0,
        )
        result = run(
            StageContext(
                run_id="r",
                flow="f",
                stage="serve",
                attempt=1,
                fingerprint="f",
                parameters=parameters,
                inputs={"model": model},
                output_root=tmp_path / name,
                workspace=str(tmp_path / "workspace"),
                project_root=tmp_path,
                resources=Resources(cpus=0.2, gpus=0.5),
                reporter=reporter,
                deadline=None,
            )
        )
        return result.facts

    try:
        for name in ("a", "b"):
            facts = deploy(name)
            assert (facts["gpus"], facts["device"]) == (0.5, "cpu")
            assert "0.95 x 0.5" in facts["share_reason"]
            health = json.loads(urllib.request.urlopen(facts["health_url"], timeout=10).read())
            assert np.isfinite(health["estimated_per_second"])
        started = time.monotonic()
        with pytest.raises(
            ParameterError, match=r"'a' 0\.5 \+ 'b' 0\.5 run already; 'c' 0\.5 asked for: 1\.5 together"
        ):
            deploy("c")
        assert time.monotonic() - started < 10  # at once, not when Ray gives up
    finally:
        for name in ("a", "b", "c"):
            delete(name)
