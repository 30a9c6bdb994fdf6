"""The hosts of a replica on a Ray cluster."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mesh_replica_trial import PROMPTS
from tiny_llama import greedy_texts

from pipeline.serving.accelerator.replica_environment import NUM_HOSTS
from pipeline.serving.rollout.ray_hosts import led_hosts, spread_options

HERE = Path(__file__).parent


def test_a_process_of_one_host_leads_nobody(monkeypatch):
    monkeypatch.delenv(NUM_HOSTS, raising=False)
    assert led_hosts() is None


def test_every_host_has_a_bundle_of_its_own_machine():
    assert spread_options(num_hosts=2, cpus=1.0, gpus=4.0) == {
        "placement_group_bundles": [{"CPU": 1.0, "GPU": 4.0}] * 2,
        "placement_group_strategy": "STRICT_SPREAD",
    }
    assert spread_options(num_hosts=2, cpus=1.0, gpus=0.0)["placement_group_bundles"] == [{"CPU": 1.0}] * 2


@pytest.mark.ray
@pytest.mark.slow
def test_a_model_over_two_nodes_answers_and_is_replaced_when_one_is_lost(model, tokenizer):
    done = subprocess.run(
        [sys.executable, str(HERE / "ray_hosts_trial.py")],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])]),
            "RAY_USAGE_STATS_ENABLED": "0",
        },
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    wanted = greedy_texts(model, tokenizer, prompts=PROMPTS, num=6)
    assert found["mesh"] == {"tensor": 2, "data": 1, "hosts": 2} and found["num_followers"] == 1
    assert found["first"] == wanted
    assert found["second"] == wanted
