"""A deployment that sleeps is woken before it is given another version."""

import time
from types import SimpleNamespace

import pytest

from pipeline.errors import ClusterError
from pipeline.serving.rollout.ray_serve import Endpoint
from pipeline.stages import scaling
from pipeline.stages.deployment import Watch


class Sleeper:
    """An application whose replica comes after so many requests; each answers as the ingress would."""

    def __init__(self, monkeypatch, *, wakes_after, minimum=0, error=None):
        self.urls, self.notes = [], []
        self._wakes_after, self._minimum, self._error = wakes_after, minimum, error
        monkeypatch.setattr(scaling, "running_applications", self.running)
        monkeypatch.setattr(scaling.urllib.request, "urlopen", self.open)
        monkeypatch.setattr(scaling, "POLL_SECONDS", 0.001)

    def running(self):
        process = SimpleNamespace(autoscaling={"min_replicas": self._minimum, "max_replicas": 2})
        is_awake = len(self.urls) >= self._wakes_after
        found = SimpleNamespace(
            num_running=int(is_awake), route_prefix="/tiny", config=SimpleNamespace(process=process)
        )
        return {"tiny": found}

    def open(self, url, timeout):
        self.urls.append(url)
        if self._error is not None:
            raise self._error
        if len(self.urls) == 1:
            raise scaling.urllib.error.HTTPError(url, 503, "no replica", {}, None)
        return _Answer()

    def wake(self, *, seconds=10.0):
        watch = Watch(deadline=time.monotonic() + seconds, on_progress=lambda text: None, note=self.notes.append)
        scaling.wake("tiny", at=Endpoint(host="h", port=8000, route_prefix="/"), watch=watch)


class _Answer:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def read(self):
        return b"{}"


def test_it_is_asked_until_a_replica_is_there_to_stay(monkeypatch):
    sleeper = Sleeper(monkeypatch, wakes_after=3)
    sleeper.wake()
    assert sleeper.urls == ["http://h:8000/tiny/health"] * 3
    assert sleeper.notes == ["tiny sleeps; waking it"]


def test_one_that_is_awake_or_may_not_sleep_is_left_alone(monkeypatch):
    awake = Sleeper(monkeypatch, wakes_after=0)
    awake.wake()
    fixed = Sleeper(monkeypatch, wakes_after=9, minimum=1)
    fixed.wake()
    assert awake.urls == fixed.urls == [] == awake.notes


def test_one_that_does_not_wake_in_time_or_has_no_ingress_is_an_error(monkeypatch):
    with pytest.raises(ClusterError, match="does not wake"):
        Sleeper(monkeypatch, wakes_after=10**6).wake(seconds=0.05)
    with pytest.raises(ClusterError, match="refused"):
        Sleeper(monkeypatch, wakes_after=9, error=ConnectionRefusedError("refused")).wake()
