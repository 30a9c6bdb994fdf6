"""What an interruption cost: the arithmetic, and the marks it is made of."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.artifacts.store import open_store
from pipeline.errors import ClusterError, StoreError
from pipeline.training.faults.recovery import (
    Heart,
    Lost,
    Outage,
    Pulse,
    Restart,
    find_lost,
    record_outage,
    recovery_metrics,
)
from pipeline.training.launch.spawn import respawn

PULSE = Pulse(generation=1, step=12, at=100.0, started_at=40.0, saves=((6, 94.0), (9, 97.0)))
RESTART = Restart(entered_at=104.0, ready_at=105.0, loaded_at=105.5, first_step_at=106.5, new_step_at=108.5)


def test_the_parts_add_up_to_the_whole() -> None:
    lost = Lost(pulse=PULSE, outage=Outage(noticed_at=101.0, torn_down_at=101.25))
    found = recovery_metrics(lost, RESTART, resumed_step=9)
    assert found == {
        "rto_detect_seconds": 1.0,
        "rto_teardown_seconds": 0.25,
        "rto_schedule_seconds": 2.75,
        "rto_init_seconds": 1.0,
        "rto_load_seconds": 0.5,
        "rto_warmup_seconds": 1.0,
        "rto_replay_seconds": 2.0,
        "rpo_steps": 3.0,
        "rpo_seconds": 3.0,
    }
    assert sum(value for name, value in found.items() if name.startswith("rto_")) == RESTART.new_step_at - PULSE.at


def test_what_nobody_measured_is_left_out() -> None:
    found = recovery_metrics(Lost(pulse=PULSE, outage=None), RESTART, resumed_step=12)
    assert not {"rto_detect_seconds", "rto_teardown_seconds", "rto_schedule_seconds"} & set(found)
    assert (found["rpo_steps"], found["rpo_seconds"]) == (0.0, 0.0)
    from_start = recovery_metrics(Lost(pulse=PULSE, outage=None), RESTART, resumed_step=0)
    assert (from_start["rpo_steps"], from_start["rpo_seconds"]) == (12.0, 60.0)


def test_only_a_gang_that_did_not_finish_has_lost_something(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    assert find_lost(store) is None
    heart = Heart(store=store, generation=3)
    with pytest.raises(KeyError), heart.beating():
        heart.beat(4)
        heart.saving(4)
        heart.beat(5)
        raise KeyError
    record_outage(store, Outage(noticed_at=time.time(), torn_down_at=time.time()))
    lost = find_lost(store)
    assert lost is not None
    assert (lost.pulse.generation, lost.pulse.step, lost.pulse.ended) == (3, 5, False)
    assert [step for step, _ in lost.pulse.saves] == [4]
    assert lost.outage is not None
    finished = Heart(store=store, generation=4)
    with finished.beating():
        finished.beat(6)
    assert find_lost(store) is None


@pytest.mark.parametrize("content", [b"{", b"[]", b"3", b'{"step": 4}', b'{"saves": [1]}', b"\xff"])
def test_a_mark_that_cannot_be_read_stops_no_training(tmp_path: Path, content: bytes) -> None:
    store = open_store(str(tmp_path))
    store.write("recovery/pulse.json", content)
    assert find_lost(store) is None


def test_storage_that_takes_no_mark_keeps_no_gang_from_starting_again(tmp_path: Path, monkeypatch) -> None:
    starts = []

    def gang(*_, on_failure, **__):
        starts.append(len(starts))
        if len(starts) == 1:
            on_failure()
            raise ClusterError("rank 1 died")
        return ["trained"]

    def refuse(*_):
        raise StoreError("storage is away")

    monkeypatch.setattr("pipeline.training.launch.spawn.spawn", gang)
    monkeypatch.setattr("pipeline.training.launch.spawn.record_outage", refuse)
    assert respawn(print, store=open_store(str(tmp_path)), max_restarts=1) == ["trained"]


def test_an_outage_of_an_earlier_gang_says_nothing_of_this_one(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    record_outage(store, Outage(noticed_at=time.time() - 60, torn_down_at=time.time() - 59))
    heart = Heart(store=store, generation=2)
    with pytest.raises(KeyError), heart.beating():
        heart.beat(1)
        raise KeyError
    lost = find_lost(store)
    assert lost is not None
    assert lost.outage is None
    assert replace(lost.pulse, step=2) != lost.pulse
