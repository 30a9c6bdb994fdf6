"""Why a committed deployment is or is not live, in plain words."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest

from pipeline.cluster.endpoint import why_not_live


@pytest.fixture
def server():
    answer = {"status": 200, "body": b"{}"}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(answer["status"])
            self.end_headers()
            self.wfile.write(answer["body"])

        def log_message(self, *args):
            pass

    made = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{made.server_port}/health", answer
    made.shutdown()
    thread.join()
    made.server_close()


def commit_of(url):
    return SimpleNamespace(facts={"health_url": url, "name": "tiny", "model_digest": "a" * 64})


def test_a_live_endpoint_with_the_committed_model_is_live(server):
    url, answer = server
    answer["body"] = json.dumps({"models": {"tiny": {"digest": "a" * 64}}}).encode()
    assert why_not_live(commit_of(url), {}) is None


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (200, json.dumps({"models": {"tiny": {"digest": "b" * 64}}}).encode(), "serves another model"),
        (200, json.dumps({"models": {"other": {"digest": "a" * 64}}}).encode(), "'other', not 'tiny'"),
        (503, b"{}", "status 503"),
        (404, b"{}", "status 404"),
        (200, b"<html>", "something else answers"),
        (200, b"[]", "something else answers"),
    ],
)
def test_the_reason_is_said(server, status, body, words):
    url, answer = server
    answer.update(status=status, body=body)
    assert words in why_not_live(commit_of(url), {})


def test_nobody_at_the_address_is_said():
    assert "nothing answers" in why_not_live(commit_of("http://127.0.0.1:9/health"), {})


def test_a_commit_without_facts_is_not_live():
    assert why_not_live(SimpleNamespace(facts={}), {}) is not None


def test_an_ephemeral_run_keeps_nothing_up_and_asks_nothing():
    assert why_not_live(commit_of("http://127.0.0.1:9/health"), {"ephemeral": "1"}) is None
