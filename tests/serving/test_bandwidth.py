"""What would run absurdly slowly is refused before it is loaded."""

import json

import jax
import pytest

from pipeline.errors import ParameterError
from pipeline.serving.accelerator import bandwidth
from pipeline.serving.accelerator.bandwidth import bandwidth_of, check_speed, speed_of

GB = 10**9


def test_the_bound_is_bandwidth_over_bytes_with_its_arithmetic():
    speed = speed_of(32 * GB, bandwidth=16 * GB)
    assert speed.per_second == 0.5
    assert speed.reason == (
        "16.0 GB/s of memory bandwidth / 32.000 GB of weights read for each of the tokens = 0.5 tokens a second"
    )


def test_below_the_floor_is_refused_slow_is_said_and_fast_is_silent():
    with pytest.raises(ParameterError) as caught:
        check_speed(speed_of(33 * GB, bandwidth=16 * GB), floor=0.5)
    for words in ("absurdly slowly", "0.485 tokens a second", "min_tokens_per_second is 0.5", "int8"):
        assert words in str(caught.value)
    (warning,) = check_speed(speed_of(8 * GB, bandwidth=16 * GB), floor=0.5)
    assert warning.startswith("slow: 16.0 GB/s")
    assert check_speed(speed_of(GB, bandwidth=16 * GB), floor=0.5) == ()
    assert check_speed(speed_of(99 * GB, bandwidth=GB), floor=0.0) != ()


def test_it_is_measured_once_for_each_device(tmp_path, monkeypatch):
    device = jax.devices("cpu")[0]
    monkeypatch.setitem(bandwidth._ROWS, "cpu", 512)
    monkeypatch.setattr(bandwidth, "MEASURE_SECONDS", 0.02)
    first = bandwidth_of(device, directory=tmp_path / "state")
    assert 1e8 < first < 1e12
    ((key, kept),) = json.loads((tmp_path / "state" / "memory-bandwidth.json").read_text()).items()
    assert kept == first and "jaxlib" in key
    monkeypatch.setattr(bandwidth, "_measured", lambda device: pytest.fail("measured again"))
    assert bandwidth_of(device, directory=tmp_path / "state") == first


def test_a_figure_of_a_busy_machine_is_replaced_by_a_better_one_and_never_by_a_worse(tmp_path, monkeypatch):
    device = jax.devices("cpu")[0]
    for measured, kept in ((2.0, 2.0), (5.0, 5.0), (3.0, 5.0)):
        monkeypatch.setattr(bandwidth, "_measured", lambda device, measured=measured: measured * GB)
        assert bandwidth_of(device, directory=tmp_path, again=True) == kept * GB
    assert bandwidth_of(device, directory=tmp_path) == 5 * GB


def test_a_damaged_file_is_measured_again(tmp_path, monkeypatch):
    monkeypatch.setattr(bandwidth, "_measured", lambda device: 5.0 * GB)
    (tmp_path / "memory-bandwidth.json").write_text("[1")
    assert bandwidth_of(jax.devices("cpu")[0], directory=tmp_path) == 5 * GB
    assert len(json.loads((tmp_path / "memory-bandwidth.json").read_text())) == 1
    assert bandwidth_of(jax.devices("cpu")[0], directory=None) == 5 * GB
