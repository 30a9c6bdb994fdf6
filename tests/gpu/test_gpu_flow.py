"""What only a machine with a GPU can show: the shipped flow, unchanged, on CUDA."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.cluster.capacity import planned_capacity

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(planned_capacity().gpus < 1, reason="no GPU on this machine"),
]


def test_the_shipped_flow_runs_on_cuda(project: Path, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    command = [sys.executable, "-m", "pipeline"]
    subprocess.run([*command, "run", "flows/llm.yaml", "--ephemeral", "--store", store], cwd=project, check=True)
    shown = subprocess.run(
        [*command, "show", "latest", "--store", store, "--json"], cwd=project, check=True, capture_output=True
    )
    stages = {stage["name"]: stage for stage in json.loads(shown.stdout)["stages"]}
    num_gpus = planned_capacity().gpus
    if num_gpus >= 2:
        assert stages["train"]["facts"]["device"] == "cuda"
        assert stages["train"]["facts"]["backend"] == "nccl"
    assert stages["serve"]["facts"]["device"] in ("gpu", "cuda")
    assert stages["parity"]["metrics"]["max_abs_logit_difference"] <= 1e-3
