"""A head that is gone is noticed by a connection, not by Ray."""

import socket

import pytest

from pipeline.errors import ClusterError
from pipeline.execution import ray_backend
from pipeline.execution.ray_backend import HEAD_FAILURES, HeadWatch, RayBackend


def test_a_head_that_hangs_up_is_gone_for_good_after_a_few_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_backend, "HEAD_LOOK_SECONDS", 0.0)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    watch = HeadWatch(f"127.0.0.1:{port}")
    assert not watch.is_gone()
    listener.close()
    assert [watch.is_gone() for _ in range(HEAD_FAILURES)] == [False] * (HEAD_FAILURES - 1) + [True]
    with socket.create_server(("127.0.0.1", port)):
        assert watch.is_gone()


def test_looks_that_fail_for_a_while_are_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_backend, "HEAD_LOOK_SECONDS", 0.0)
    answers = iter([False, True, *[False] * (HEAD_FAILURES - 1), True, False])
    monkeypatch.setattr(ray_backend.ray_connection, "answers", lambda _: next(answers))
    watch = HeadWatch("127.0.0.1:1")
    assert not any(watch.is_gone() for _ in range(HEAD_FAILURES + 3))


def test_a_head_that_comes_back_is_waited_for_before_it_is_spoken_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_backend, "HEAD_LOOK_SECONDS", 0.0)
    answers = iter([*[False] * (HEAD_FAILURES - 1), True])
    monkeypatch.setattr(ray_backend.ray_connection, "answers", lambda _: next(answers))
    assert HeadWatch("127.0.0.1:1").is_found()
    assert next(answers, None) is None


def test_no_attempt_is_started_on_a_head_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_backend, "HEAD_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(ray_backend.ray_connection, "connect", lambda address, *, verbose: "the capacity")
    looks = []
    monkeypatch.setattr(ray_backend.ray_connection, "answers", lambda _: looks.append(True))
    left = []
    monkeypatch.setattr(ray_backend.ray_connection, "disconnect", lambda: left.append(True))
    backend = RayBackend(address="10.0.0.1:6379", verbose=False)
    for _ in range(2):
        with pytest.raises(ClusterError, match=r"the Ray head at 10.0.0.1:6379 does not answer any more"):
            backend.capacity()
    assert len(looks) == HEAD_FAILURES
    backend.close()
    assert left == []
