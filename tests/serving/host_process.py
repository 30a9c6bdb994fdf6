"""One host of a replica, run as a process of its own: `leader DIRECTORY` or `follower`, a plan on stdin as JSON.

The leader prints the follower's plan, then one line of JSON for each answer; it reads prompts from stdin.
"""

import base64
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from mesh_replica_trial import settings_of
from starlette.testclient import TestClient

from pipeline.serving.accelerator.multi_host import HostPlan, Leader
from pipeline.serving.hosting.follower import follow
from pipeline.serving.hosting.replica import Replica


def say(value):
    print(json.dumps(value), flush=True)


def lead(directory):
    leader = Leader(address="127.0.0.1", num_hosts=2)
    plan = asdict(leader.plan(1))
    say({**plan, "key": base64.b64encode(plan["key"]).decode()})
    leader.meet()
    replica = Replica(leader=leader)
    settings = settings_of(Path(directory), mesh_tensor=2, mesh_hosts=2)
    replica.reconfigure({"models": [asdict(settings)]})
    with TestClient(replica.app) as client:
        say(client.get("/health").json())
        for line in sys.stdin:
            asked = json.loads(line)
            started = time.monotonic()
            if asked == "health":
                answer = client.get("/health")
            else:
                body = {"model": "tiny", "prompt": asked, "max_tokens": 6, "temperature": 0, "logprobs": 2}
                answer = client.post("/v1/completions", json=body)
            say({"status": answer.status_code, "body": answer.json(), "seconds": time.monotonic() - started})


def be_follower():
    given = json.loads(sys.stdin.readline())
    given |= {"key": base64.b64decode(given["key"]), "control": tuple(given["control"])}
    follow(HostPlan(**given))


if __name__ == "__main__":
    if sys.argv[1] == "leader":
        lead(sys.argv[2])
    else:
        be_follower()
