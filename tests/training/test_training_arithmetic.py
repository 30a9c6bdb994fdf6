"""Schedule, batch plan, devices, speed: the values that need no training."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import ParameterError
from pipeline.training.config import TrainConfig, plan_batch
from pipeline.training.device import check_device_present, choose_device, peak_flops
from pipeline.training.precision import check_precision
from pipeline.training.speed import Speedometer
from pipeline.training.updates.schedule import check_schedule, learning_rate


def config(**fields) -> TrainConfig:
    given_fields = {
        "model": {},
        "steps": 10,
        "global_batch_tokens": 1024,
        "micro_batch_sequences": 2,
        "learning_rate": 1e-3,
    }
    return TrainConfig(**(given_fields | fields))


def rates_of(steps: int = 24, **fields) -> list[float]:
    run = config(steps=steps, **({"learning_rate": 1.0, "warmup_steps": 4} | fields))
    return [learning_rate(step, run) for step in range(steps)]


def test_the_learning_rate_rises_then_falls_to_the_floor() -> None:
    rates = rates_of()
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[-1] == pytest.approx(0.1)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[14] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 10 / 19)))


def test_the_other_schedules_have_their_phases() -> None:
    linear = rates_of(schedule="linear")
    assert linear[4:] == pytest.approx([1.0 - 0.9 * step / 19 for step in range(20)])
    stable = rates_of(schedule="wsd", decay_steps=5)
    assert stable[3:19] == [1.0] * 16
    assert stable[18:] == pytest.approx([1.0, 0.82, 0.64, 0.46, 0.28, 0.1])
    assert rates_of(schedule="wsd")[19:] == pytest.approx([1.0, 0.775, 0.55, 0.325, 0.1])  # a fifth of 24 is 4
    assert rates_of(schedule="constant")[3:] == [1.0] * 21
    assert {tuple(rates_of(schedule=name)[:4]) for name in ("linear", "wsd", "constant")} == {(0.25, 0.5, 0.75, 1.0)}


def test_a_phase_that_is_not_there_is_refused() -> None:
    with pytest.raises(ParameterError, match="decay_steps: 5 is for schedule: wsd, found schedule: cosine"):
        check_schedule(config(decay_steps=5))
    with pytest.raises(ParameterError, match=r"warmup_steps 4 \+ decay_steps 9 are more than steps 10"):
        check_schedule(config(schedule="wsd", decay_steps=9, warmup_steps=4))
    check_schedule(config(schedule="wsd", decay_steps=6, warmup_steps=4))


@given(
    steps=st.integers(1, 300),
    warmup=st.integers(0, 400),
    floor=st.floats(0, 1),
    schedule=st.sampled_from(["cosine", "linear", "wsd", "constant"]),
)
def test_the_learning_rate_stays_between_zero_and_the_peak(steps, warmup, floor, schedule) -> None:
    fields = {"warmup_steps": warmup, "minimum_learning_rate_ratio": floor, "schedule": schedule}
    for rate in rates_of(steps, learning_rate=2.0, **fields):
        assert 0.0 <= rate <= 2.0


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_accumulation_keeps_the_global_batch_for_every_world_size(world_size: int, accumulation: int) -> None:
    plan = plan_batch(config(), sequence_length=64, world_size=world_size)
    assert plan.accumulation == accumulation
    assert plan.rows_per_step == 16
    assert plan.rows_per_rank * world_size == 16
    assert plan.units_per_step == 1024


def test_a_batch_that_does_not_divide_shows_the_arithmetic_and_what_would() -> None:
    with pytest.raises(ParameterError) as caught:
        plan_batch(config(global_batch_tokens=2048, micro_batch_sequences=8), sequence_length=256, world_size=2)
    message = str(caught.value)
    assert "global_batch_tokens 2048 is no multiple of sequence_length 256 x 2 workers x micro_batch_sequences 8" in (
        message
    )
    assert "= 4096 (remainder 2048)" in message
    assert "set `global_batch_tokens` to 4096" in message
    assert "`micro_batch_sequences` to one of 1, 2, 4" in message
    with pytest.raises(ParameterError, match="to 4096 or 8192"):
        plan_batch(config(global_batch_tokens=5000, micro_batch_sequences=8), sequence_length=256, world_size=2)


def test_what_only_observes_or_cuts_a_step_may_change_on_resume() -> None:
    same = config(log_every_steps=7, checkpoint_every_steps=9, micro_batch_sequences=4, compile=True)
    assert same.identity() == config().identity()
    assert config(steps=11).identity() != config().identity()
    assert config(seed=1).identity() != config().identity()


@pytest.mark.parametrize(
    ("asked", "gpus", "available", "device", "reason"),
    [
        ("cpu", 0.0, 0.0, "cpu", "the flow says"),
        ("cpu", 1.0, 4.0, "cpu", "the flow says"),
        ("auto", 0.0, 0.0, "cpu", "no GPU is available"),
        ("auto", 0.0, 4.0, "cpu", "no GPU is reserved (4 available)"),
        ("auto", 1.0, 4.0, "cuda", "each worker has 1 GPU"),
        ("cuda", 1.0, 4.0, "cuda", "the flow says"),
    ],
)
def test_the_device_comes_with_its_reason(asked, gpus, available, device, reason) -> None:
    choice = choose_device(asked, gpus_per_worker=gpus, available_gpus=available)
    assert choice.device == device
    assert reason in choice.reason


@pytest.mark.parametrize(("asked", "gpus", "available"), [("cuda", 0.0, 0.0), ("cuda", 1.0, 0.0), ("auto", 1.0, 0.0)])
def test_a_gpu_that_is_not_there_is_a_config_error(asked, gpus, available) -> None:
    with pytest.raises(ParameterError, match="no GPU is") as caught:
        choose_device(asked, gpus_per_worker=gpus, available_gpus=available)
    assert caught.value.exit_code == 2


def test_a_rank_never_takes_another_device_than_the_chosen_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    check_device_present("cpu")
    with pytest.raises(ParameterError, match="torch sees no CUDA device in this worker"):
        check_device_present("cuda")


def test_bfloat16_needs_cuda() -> None:
    check_precision("bfloat16", device="cuda")
    check_precision("float32", device="cpu")
    with pytest.raises(ParameterError, match="gloo does not reduce bfloat16"):
        check_precision("bfloat16", device="cpu")


def test_peaks_are_known_by_the_names_that_cuda_gives() -> None:
    assert peak_flops("NVIDIA H200", precision="bfloat16") == 989e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", precision="bfloat16") == 312e12
    assert peak_flops("NVIDIA H100 PCIe", precision="bfloat16") == 756e12
    assert peak_flops("NVIDIA L4", precision="float32") == 30.3e12
    assert peak_flops("Tesla V100-SXM2-16GB", precision="bfloat16") is None
    assert peak_flops("Tesla V100-SXM2-16GB", precision="float16") == 125e12
    assert peak_flops("NVIDIA H200", precision="float16") == 989e12
    assert peak_flops("NVIDIA H200", precision="float8") is None
    assert peak_flops("A card of tomorrow", precision="float32") is None


def test_speed_counts_time_inside_steps_and_leaves_out_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 9.0, 10.0, 11.0, 20.0, 21.0, 30.0, 31.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    speed = Speedometer(units_per_step=100, flops_per_unit=2.0, peak_flops=1000.0)
    for _ in range(2):
        speed.start()
        speed.stop()
    assert speed.read_window() == pytest.approx(100 * 2 / 10)
    for _ in range(2):
        speed.start()
        speed.stop()
    assert speed.read_window() == pytest.approx(100.0)
    assert speed.steady() == pytest.approx(100.0)
    assert speed.mfu(100.0) == pytest.approx(0.2)
    assert Speedometer(units_per_step=1, flops_per_unit=1.0, peak_flops=None).mfu(1.0) is None
