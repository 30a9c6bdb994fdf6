"""A conversion holds a few tensors at a time, and leaves nothing behind when it is stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from streaming_programs import FULL_DISK, INTERRUPTED, MEMORY

from pipeline.models.parameter_reader import READ_AHEAD_BYTES
from pipeline.models.parameter_writer import BUFFER_BYTES

PROJECT = Path(__file__).resolve().parents[2]
# What the allocator keeps of freed blocks, of threads' stacks and of Orbax's own; seen 40 MB at most.
SLACK_BYTES = 64 * 2**20
TIMEOUT_SECONDS = 240


def environment(**more):
    return {**os.environ, "PYTHONPATH": str(PROJECT), "JAX_PLATFORMS": "cpu", **more}


def run(program, *arguments, **more):
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        env=environment(**more),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_memory_is_twice_the_largest_tensor_and_a_buffer_whatever_the_model(tmp_path):
    found = run(MEMORY, tmp_path, XLA_FLAGS="--xla_force_host_platform_device_count=4")
    limit = 2 * found["largest"] + SLACK_BYTES
    assert found["total"] > 1.5 * (limit + BUFFER_BYTES)
    assert found["converted"] < limit + BUFFER_BYTES
    assert found["exported"] < limit + READ_AHEAD_BYTES
    # The model itself stays, whole once over all devices.
    assert found["loaded"] < found["total"] + limit + READ_AHEAD_BYTES
    assert found["num_devices"] == 4
    assert found["wide"] == []  # nothing ever lay on one device alone
    assert found["kernel_shards"] == [[1024, 512]]
    assert found["norm_devices"] == 4
    assert found["equal"]


@pytest.mark.slow
def test_a_full_disk_is_said_and_leaves_nothing_in_any_format(tmp_path):
    for format, (kind, text, is_clean) in run(FULL_DISK, tmp_path).items():
        assert (kind, is_clean) == ("StoreError", True), (format, text)
        assert f"{tmp_path / 'out'}: cannot be written" in text
        assert "nothing was left behind" in text


@pytest.mark.parametrize("format", ["orbax", "safetensors"])
def test_control_c_leaves_nothing(tmp_path, format):
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path), format],
        stderr=subprocess.PIPE,
        env=environment(),
    )
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not any(tmp_path.glob(".out.partial-*/*")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert any(tmp_path.glob(".out.partial-*")), process.communicate()[1]
    process.send_signal(signal.SIGINT)
    _, text = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT, text
    assert text.rstrip().endswith(b"KeyboardInterrupt")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
