"""One at a time over a cluster; a holder that was killed holds nothing for long."""

import threading
import time

import pytest

from pipeline.errors import ClusterError


@pytest.mark.ray
def test_the_lock_is_held_by_one_waited_for_by_others_and_outlived(ray_cluster):
    from pipeline.cluster.ray_lock import cluster_lock

    said: list[str] = []
    order: list[str] = []

    def second():
        with cluster_lock("llm", timeout_seconds=20, on_wait=said.append):
            order.append("second")

    with cluster_lock("llm", timeout_seconds=20, on_wait=said.append):
        with cluster_lock("other", timeout_seconds=1, on_wait=said.append):
            pass  # another name is another lock
        waiting = threading.Thread(target=second)
        waiting.start()
        with (
            pytest.raises(ClusterError, match="has been changing 'llm'"),
            cluster_lock("llm", timeout_seconds=0.3, on_wait=said.append),
        ):
            raise AssertionError("two held it")
        order.append("first")
    waiting.join(20)
    assert order == ["first", "second"]
    assert any("waiting for process" in text for text in said)

    # As by a process that was killed: the key stays, its time passes.
    with pytest.raises(KeyboardInterrupt):
        lock = cluster_lock("llm", timeout_seconds=0.2, on_wait=said.append)
        lock.__enter__()
        raise KeyboardInterrupt
    started = time.monotonic()
    with cluster_lock("llm", timeout_seconds=10, on_wait=said.append):
        assert time.monotonic() - started < 5
