"""What is done around the start of a process on its device."""

import os
import tempfile

import jax
import pytest

from pipeline.serving.accelerator import device_start
from pipeline.serving.accelerator.device_reserve import known_reserve
from pipeline.serving.accelerator.device_start import started_on
from pipeline.serving.accelerator.nvidia import DeviceReading
from pipeline.serving.accelerator.replica_environment import NO_SHARE, ProcessShare

GIB, MIB = 2**30, 2**20


@pytest.fixture(autouse=True)
def own_locks(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("locks")))


def readings(monkeypatch, *used):
    """A device on which so many bytes are in use, one figure a reading."""
    left = list(used)
    monkeypatch.setattr(
        device_start,
        "read_device",
        lambda device: DeviceReading(uuid=device, name="n", driver="1", total_bytes=80 * GIB, used_bytes=left.pop(0)),
    )
    return left


class Device:
    def __init__(self, **stats):
        self._stats = stats

    def memory_stats(self):
        return self._stats


def share_in(directory):
    return ProcessShare(share=0.5, device=f"GPU-{os.getpid()}", image="image", state_directory=directory)


def test_the_first_model_of_a_process_measures_what_lies_beside_the_allocator(tmp_path, monkeypatch):
    left = readings(monkeypatch, 10 * GIB, 10 * GIB + 38 * GIB + 900 * MIB)
    monkeypatch.setattr(jax, "local_devices", lambda: [Device(bytes_limit=38 * GIB, bytes_in_use=GIB)])
    with started_on(share_in(tmp_path), who="chat", is_first=True):
        assert len(left) == 1
    assert known_reserve(tmp_path, image="image").num_bytes == 900 * MIB


@pytest.mark.parametrize("is_first", [True, False])
def test_a_start_that_fails_or_is_not_the_first_measures_nothing(tmp_path, monkeypatch, is_first):
    readings(monkeypatch, GIB, 40 * GIB)
    if is_first:
        with pytest.raises(KeyError), started_on(share_in(tmp_path), who="chat", is_first=True):
            raise KeyError
    else:
        with started_on(share_in(tmp_path), who="chat", is_first=False):
            pass
    assert list(tmp_path.iterdir()) == []


def test_a_process_without_a_device_waits_for_nobody():
    with started_on(NO_SHARE, who="chat", is_first=True), started_on(NO_SHARE, who="other", is_first=True):
        pass
