"""A replica's process knows its share of a device before it loads jax."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.errors import ParameterError
from pipeline.serving.accelerator.device_reserve import known_reserve, remember_reserve
from pipeline.serving.accelerator.replica_environment import replica_environment, settle

MIB, GIB = 2**20, 2**30
IMAGE = "jaxlib 1, NVIDIA H200, driver 1"
CHILD = """
import json, sys
from pipeline.serving.accelerator.replica_environment import settle
share = settle()
was_loaded = "jax" in sys.modules
from jaxlib.xla_client import generate_pjrt_gpu_plugin_options
print(json.dumps({"loaded": was_loaded, "device": share.device, "reason": share.memory_reason,
                  "options": generate_pjrt_gpu_plugin_options()}))
"""


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """An `nvidia-smi` that knows one device of 80 GiB."""
    script = tmp_path / "bin" / "nvidia-smi"
    script.parent.mkdir()
    script.write_text(
        '#!/bin/sh\ncase "$1" in --id=0) echo "GPU-1a2b, NVIDIA H200, 570.1, 81920, 1024";; *) exit 6;; esac\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")


def test_jax_reads_the_share_in_a_child_process_that_had_not_loaded_it(driver, tmp_path):
    environment = {
        **os.environ,
        **replica_environment(device="auto", gpus=0.25, state_directory=str(tmp_path)),
        "CUDA_VISIBLE_DEVICES": "0",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9",  # of whoever started the head; jax takes no second name beside ours
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-c", CHILD]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["loaded"] is False
    # A quarter less 1 GiB of 80, and at most 95 % of the quarter.
    assert said["options"]["memory_fraction"] == 0.2375 and said["options"]["preallocate"] is True
    assert said["device"] == "GPU-1a2b"
    assert "0.25 x 80.00 GiB = 20.00 GiB, less 1.00 GiB" in said["reason"]


def test_a_process_that_has_loaded_jax_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", object())
    with pytest.raises(RuntimeError, match="jax was loaded before"):
        settle({"PIPELINE_GPU_SHARE": "0.5"})


@pytest.fixture
def without_jax(monkeypatch):
    monkeypatch.delitem(sys.modules, "jax", raising=False)


def test_a_measured_reserve_takes_the_place_of_the_default(driver, without_jax, tmp_path):
    first = {"PIPELINE_GPU_SHARE": "0.5", "PIPELINE_STATE_DIRECTORY": str(tmp_path), "CUDA_VISIBLE_DEVICES": "0"}
    share = settle(first)
    assert "the default, not measured here" in share.memory_reason
    remember_reserve(tmp_path, image=share.image, before=0, after=45 * GIB, allocated=40 * GIB)
    second = dict(first)
    assert "measured here" in settle(second).memory_reason
    assert float(second["XLA_CLIENT_MEM_FRACTION"]) == pytest.approx(0.5 - 5 / 80, abs=2e-4)
    assert second["XLA_PYTHON_CLIENT_PREALLOCATE"] == "true"


def test_a_cpu_process_has_no_share_and_is_held_to_the_cpu():
    assert replica_environment(device="auto", gpus=0, state_directory=None) == {"JAX_PLATFORMS": "cpu"}
    environment = {}
    assert settle(environment).share == 0 and environment == {}


def test_a_mesh_on_a_processor_is_shown_as_so_many_devices():
    made = replica_environment(device="auto", gpus=0, state_directory=None, cpu_devices=4)
    assert made == {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    assert "XLA_FLAGS" not in replica_environment(device="auto", gpus=4, state_directory=None, cpu_devices=4)


def test_a_device_that_nobody_knows_still_gets_a_fraction_and_says_so(driver, without_jax):
    environment = {"PIPELINE_GPU_SHARE": "0.5", "CUDA_VISIBLE_DEVICES": "7"}
    share = settle(environment)
    assert environment["XLA_CLIENT_MEM_FRACTION"] == "0.4750"
    assert share.device == "7" and "unknown" in share.memory_reason


def test_a_share_that_the_reserve_eats_is_refused(driver, without_jax):
    with pytest.raises(ParameterError, match=r"gpus: 0\.01 leaves"):
        settle({"PIPELINE_GPU_SHARE": "0.01", "CUDA_VISIBLE_DEVICES": "0"})


def test_a_running_multi_process_service_gets_the_share_and_its_absence_is_said(driver, without_jax, tmp_path):
    given = {
        "PIPELINE_GPU_SHARE": "0.25",
        "CUDA_VISIBLE_DEVICES": "0",
        "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "mps"),
    }
    environment = dict(given)
    (warning,) = settle(environment).warnings
    assert "take turns" in warning and "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in environment
    (tmp_path / "mps").mkdir()
    os.mkfifo(tmp_path / "mps" / "control")
    environment = dict(given)
    assert settle(environment).warnings == ()
    assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    whole = {**given, "PIPELINE_GPU_SHARE": "1"}
    assert settle(whole).warnings == () and "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in whole


def test_a_socket_is_a_service_and_a_plain_file_is_none(driver, without_jax, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    given = {"PIPELINE_GPU_SHARE": "0.25", "CUDA_VISIBLE_DEVICES": "0", "CUDA_MPS_PIPE_DIRECTORY": "."}
    Path("control").touch()
    assert settle(dict(given)).warnings != ()
    Path("control").unlink()
    with socket.socket(socket.AF_UNIX) as service:
        service.bind("control")
        assert settle(dict(given)).warnings == ()


def test_the_largest_reserve_is_kept_and_what_cannot_be_is_dropped(tmp_path):
    def remember(num_bytes):
        return remember_reserve(tmp_path, image=IMAGE, before=GIB, after=GIB + 9 * GIB + num_bytes, allocated=9 * GIB)

    assert remember(-5 * MIB) is None and remember(50 * GIB) is None
    assert known_reserve(tmp_path, image=IMAGE).num_bytes == GIB
    assert remember(700 * MIB).num_bytes == 700 * MIB
    assert remember(600 * MIB).num_bytes == 700 * MIB
    assert known_reserve(tmp_path, image=IMAGE).source == "measured here"
    assert known_reserve(tmp_path, image="another driver").num_bytes == GIB
    (tmp_path / "device-reserve.json").write_text("{broken")
    assert known_reserve(tmp_path, image=IMAGE).num_bytes == GIB
