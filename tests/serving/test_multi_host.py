"""Two processes of this machine compute one model, each with one CPU device, over gloo."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from mesh_replica_trial import PROMPTS, written
from tiny_llama import greedy_texts

from pipeline.errors import ClusterError
from pipeline.serving.accelerator.multi_host import Follower, Leader

HERE = Path(__file__).parent
START_SECONDS = 240
TOLD_SECONDS = 10
"""Of a request that a follower's death ends; 0.1 s measured."""


class Hosts:
    """A leader and a follower."""

    def __init__(self, directory):
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
            "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])]),
        }
        script = str(HERE / "host_process.py")
        self.leader = subprocess.Popen(
            [sys.executable, script, "leader", str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        plan = self.heard()
        self.follower = subprocess.Popen(
            [sys.executable, script, "follower"], stdin=subprocess.PIPE, text=True, env=environment
        )
        self.follower.stdin.write(json.dumps(plan) + "\n")
        self.follower.stdin.flush()
        self.health = self.heard()

    def heard(self):
        for line in self.leader.stdout:
            if line.startswith("{"):  # gloo prints too
                return json.loads(line)
        raise AssertionError(f"the leader ended with {self.leader.wait(10)}")

    def tell(self, asked):
        self.leader.stdin.write(json.dumps(asked) + "\n")
        self.leader.stdin.flush()

    def ask(self, asked):
        self.tell(asked)
        return self.heard()

    def end(self):
        for process in (self.leader, self.follower):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait(30)


@pytest.fixture
def hosts(tmp_path):
    made = Hosts(written(tmp_path / "one", 0))
    yield made
    made.end()


@pytest.mark.slow
def test_two_hosts_answer_as_one_process_and_the_loss_of_one_is_an_error(hosts, model, tokenizer):
    assert hosts.health["mesh"] == {"tensor": 2, "data": 1, "hosts": 2}
    answer = hosts.ask(PROMPTS)
    assert [choice["text"] for choice in answer["body"]["choices"]] == greedy_texts(
        model, tokenizer, prompts=PROMPTS, num=6
    )
    assert hosts.ask("health")["body"]["compiles_while_serving"] == 0
    # The leader is inside a step, waiting for numbers that will never come.
    os.kill(hosts.follower.pid, signal.SIGSTOP)
    hosts.tell(PROMPTS)
    time.sleep(0.5)
    killed_at = time.monotonic()
    hosts.follower.kill()
    failed = hosts.heard()
    assert time.monotonic() - killed_at < TOLD_SECONDS
    reason = f"host process 1 (pid {hosts.follower.pid}"
    assert failed["status"] in (500, 503) and reason in failed["body"]["error"]["message"]
    after = hosts.ask("health")
    assert after["status"] == 503 and reason in after["body"]["failure"]
    assert hosts.ask(PROMPTS)["status"] == 503


class Calls:
    """In place of an executor."""

    def __init__(self):
        self.before_run = self.before_first_run = None


def met(leader, monkeypatch):
    """A leader and a follower in this process, without jax's part."""
    monkeypatch.setattr("pipeline.serving.accelerator.multi_host.join", lambda plan: None)
    found = {}
    thread = threading.Thread(target=lambda: found.update(follower=Follower(leader.plan(1))))
    thread.start()
    leader.meet()
    thread.join(10)
    return found["follower"]


def test_a_follower_makes_the_leaders_calls_in_order_and_ends_with_it(monkeypatch):
    leader = Leader(address="127.0.0.1", num_hosts=2)
    follower = met(leader, monkeypatch)
    ours, theirs, made = Calls(), Calls(), []
    leader.lead(ours)
    follower.meet(theirs)
    compiled = threading.Thread(target=theirs.before_first_run)
    compiled.start()
    ours.before_first_run()
    compiled.join(10)
    following = threading.Thread(target=follower.follow, args=(lambda *call: made.append(call),))
    following.start()
    for number in range(3):
        ours.before_run(("decode", 1, 32), (number,))
    leader.end()
    following.join(10)
    assert not following.is_alive()
    assert made == [(("decode", 1, 32), number) for number in range(3)]


def test_what_ends_a_follower_is_what_the_leader_says(monkeypatch):
    leader = Leader(address="127.0.0.1", num_hosts=2)
    follower = met(leader, monkeypatch)
    said = []
    leader.on_lost(said.append)
    follower.failed(ValueError("no memory"))
    assert "failed: ValueError: no memory" in leader.why(RuntimeError())
    calls = Calls()
    leader.lead(calls)
    with pytest.raises(ClusterError, match="failed: ValueError: no memory"):
        calls.before_run("a", ())
    with pytest.raises(ClusterError, match="failed: ValueError: no memory"):
        calls.before_first_run()


def test_a_follower_without_a_leader_ends(monkeypatch):
    leader = Leader(address="127.0.0.1", num_hosts=2)
    follower = met(leader, monkeypatch)
    for connection in leader._followers:
        # As when its process dies; a descriptor that a thread waits on cannot simply be closed.
        with socket.socket(fileno=os.dup(connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)
    with pytest.raises(ClusterError, match="the leader of this replica is gone"):
        follower.follow(print)


def test_a_stranger_without_the_key_is_turned_away(monkeypatch):
    leader = Leader(address="127.0.0.1", num_hosts=2)
    monkeypatch.setattr("pipeline.serving.accelerator.multi_host.join", lambda plan: None)
    plan = leader.plan(1)
    stranger = type(plan)(
        coordinator=plan.coordinator, control=plan.control, num_hosts=2, rank=1, key=b"not the key of this replica"
    )
    meeting = threading.Thread(target=leader.meet)
    meeting.start()
    with pytest.raises(ClusterError, match="refused the key of host process 1"):
        Follower(stranger)
    follower = Follower(plan)
    meeting.join(10)
    assert list(leader._followers.values()) == [f"host process 1 (pid {os.getpid()} on {os.uname().nodename})"]
    leader.end()
    follower.follow(print)
