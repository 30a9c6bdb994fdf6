"""What only a GPU can show of shares: the allocator's limit, the reserve, the bandwidth, int8 as it is."""

import json
import os
import subprocess
import sys

import pytest

from pipeline.cluster.capacity import planned_capacity
from pipeline.serving.accelerator.nvidia import read_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(planned_capacity().gpus < 1, reason="no GPU on this machine"),
]

SHARE = 0.25
CHILD = """
import json, os, sys
from pathlib import Path
from pipeline.serving.accelerator.replica_environment import settle
share = settle()
import jax, jax.numpy as jnp
from pipeline.models.registry import describe_config
from pipeline.serving.accelerator.bandwidth import bandwidth_of
from pipeline.serving.accelerator.device import rebuilds_weight
from pipeline.serving.accelerator.device_start import started_on
config = describe_config(json.loads(sys.argv[1])).parsed
with started_on(share, who="test", is_first=True):
    device = jax.devices()[0]
    bandwidth = bandwidth_of(device, directory=None)
print(json.dumps({
    "limit": device.memory_stats()["bytes_limit"],
    "reason": share.memory_reason,
    "bandwidth": bandwidth,
    "rebuilds": rebuilds_weight(device, config),
    "reserve": json.loads((Path(os.environ["PIPELINE_STATE_DIRECTORY"]) / "device-reserve.json").read_text()),
}))
"""
CONFIG = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
}
LEAST_BANDWIDTH = 1e11
"""Of any GPU that models are served on."""


def test_a_process_keeps_to_its_share_and_int8_rebuilds_no_weight(tmp_path) -> None:
    device = read_device("0")
    assert device is not None
    environment = {**os.environ, "PIPELINE_GPU_SHARE": str(SHARE), "PIPELINE_STATE_DIRECTORY": str(tmp_path)}
    environment.pop("JAX_PLATFORMS", None)
    command = [sys.executable, "-c", CHILD, json.dumps(CONFIG)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    said = json.loads(done.stdout.splitlines()[-1])
    assert SHARE * 0.8 * device.total_bytes < said["limit"] <= SHARE * device.total_bytes - 2**30 * 0.9
    assert said["bandwidth"] > LEAST_BANDWIDTH
    (reserve,) = said["reserve"].values()
    assert 2**27 < reserve < 4 * 2**30
    assert said["rebuilds"] is False
