import threading

from pipeline.tracking.system_metrics import SystemSampler, parse_smi, sample


def test_a_sample_has_cpu_and_memory_in_sensible_ranges():
    values = sample()
    assert 0 <= values["system/cpu_utilization_percentage"] <= 100
    assert 0 < values["system/system_memory_usage_percentage"] <= 100
    assert values["system/system_memory_usage_megabytes"] > 10


def test_the_answer_of_nvidia_smi_is_read_per_gpu():
    values = parse_smi("35, 1024, 4096, 120.5\n0, 10, 4096, [N/A]\n")
    assert values["system/gpu_0_utilization_percentage"] == 35
    assert values["system/gpu_0_memory_usage_percentage"] == 25
    assert values["system/gpu_0_power_usage_watts"] == 120.5
    assert values["system/gpu_1_memory_usage_megabytes"] == 10
    assert "system/gpu_1_power_usage_watts" not in values
    assert parse_smi("Failed to initialize NVML") == {}


def test_every_watched_attempt_gets_samples_until_it_ends():
    got, enough, others = [], threading.Event(), running()

    def deliver(run_id, stage, attempt, reports):
        got.append((stage, reports[0].step))
        if len(got) >= 6:
            enough.set()

    sampler = SystemSampler(deliver, interval_seconds=0.02)
    sampler.watch("r", "a", 1)
    sampler.watch("r", "b", 1)
    assert enough.wait(5)
    sampler.unwatch("r", "a", 1)
    sampler.close()
    assert running() == others
    assert [step for stage, step in got if stage == "a"][:3] == [0, 1, 2]
    assert {stage for stage, _ in got} == {"a", "b"}


def test_no_interval_means_no_thread():
    others = running()
    sampler = SystemSampler(lambda *args: None, interval_seconds=0)
    sampler.watch("r", "a", 1)
    assert running() == others


def running():
    return [thread for thread in threading.enumerate() if thread.name == "system-metrics"]
