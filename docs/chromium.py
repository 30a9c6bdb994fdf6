"""A headless Chromium driven over its DevTools pipe.

Owns starting the browser, opening a page, asking it things and taking pictures. Knows nothing of what the pages show.
The one decision: the protocol runs over two pipes (`--remote-debugging-pipe`), which needs no port and no websocket
library, and the browser ends when they close.
"""

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--hide-scrollbars",
    "--metrics-recording-only",
    "--mute-audio",
)
ANSWER_TIMEOUT_SECONDS = 30.0


def find_chromium() -> str | None:
    """The path of a Chromium on this machine, or None."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


@dataclass
class Page:
    """An open page. `requests` are the URLs it asked for, `errors` what it said on the console or threw."""

    send: Callable[..., Mapping[str, Any]]
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def open(self, url: str) -> None:
        """Go to a URL and wait until the document is complete."""
        self.send("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """The JSON value of a JavaScript expression; a promise is awaited.

        Raises:
            RuntimeError: the expression threw.
        """
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression!r}: {answer['exceptionDetails'].get('exception', answer)}")
        return answer["result"].get("value")

    def wait_for(self, expression: str, *, timeout_seconds: float = 30.0) -> None:
        """Wait until a JavaScript expression is true.

        Raises:
            TimeoutError: it never was; quotes the page's text.
        """
        deadline = time.monotonic() + timeout_seconds
        while not self.evaluate(f"Boolean({expression})"):
            if time.monotonic() > deadline:
                text = self.evaluate("document.body ? document.body.innerText.slice(0, 600) : ''")
                raise TimeoutError(f"not within {timeout_seconds:.0f} s: {expression}; the page shows: {text!r}")
            time.sleep(0.1)

    def settle(self, *, quiet_seconds: float = 1.0, timeout_seconds: float = 20.0) -> None:
        """Wait until the page has asked for nothing and changed nothing for a while."""
        deadline = time.monotonic() + timeout_seconds
        state, since = None, time.monotonic()
        while time.monotonic() < deadline and time.monotonic() - since < quiet_seconds:
            now = (len(self.requests), self.evaluate("document.body.innerHTML.length"))
            if now != state:
                state, since = now, time.monotonic()
            time.sleep(0.1)

    def resize(self, width: int, height: int, *, scale: float = 1.0) -> None:
        """Set the size of the window in CSS pixels, and how many picture pixels each is."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )

    def prefer(self, scheme: str) -> None:
        """Ask for the `light` or the `dark` scheme."""
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, path: Path) -> None:
        """Write what the window shows as a PNG."""
        answer = self.send("Page.captureScreenshot", format="png")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(answer["data"]))


@contextmanager
def open_page(*, program: str | None = None) -> Iterator[Page]:
    """A page of a browser that ends with the block.

    Raises:
        FileNotFoundError: there is no Chromium.
    """
    program = program or find_chromium()
    if program is None:
        raise FileNotFoundError(f"no Chromium found; looked for {', '.join(PROGRAMS)}")
    to_browser, our_out = os.pipe()
    our_in, from_browser = os.pipe()
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        browser = _start(program, profile, reads=to_browser, writes=from_browser)
        os.close(to_browser)
        os.close(from_browser)
        try:
            yield _Connection(our_in, our_out).page()
        finally:
            os.close(our_out)
            os.close(our_in)
            _stop(browser)


_MOVE_DESCRIPTORS = """
import fcntl, os, sys
reads, writes = (fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3])
os.dup2(reads, 3)
os.dup2(writes, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""A shell would do, but dash takes no descriptor above 9."""


def _start(program: str, profile: str, *, reads: int, writes: int) -> subprocess.Popen[bytes]:
    """Start the browser with `reads` and `writes` as its file descriptors 3 and 4."""
    command = [program, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
    return subprocess.Popen(
        [sys.executable, "-c", _MOVE_DESCRIPTORS, str(reads), str(writes), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(reads, writes),
        start_new_session=True,
    )


def _stop(browser: subprocess.Popen[bytes]) -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(browser.pid, sign)
            browser.wait(timeout=5)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    browser.wait()


class _Connection:
    """Messages are JSON, each ended by a zero byte."""

    def __init__(self, reads: int, writes: int) -> None:
        self._reads, self._writes = reads, writes
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self._page = Page(send=self.send)

    def page(self) -> Page:
        targets = self.send("Target.getTargets")["targetInfos"]
        target = next(info["targetId"] for info in targets if info["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")
        return self._page

    def send(self, method: str, **parameters: Any) -> Mapping[str, Any]:
        """Call a method and wait for its answer; events that come before it are kept on the page."""
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + ANSWER_TIMEOUT_SECONDS
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return dict(answer["result"])
            self._note(answer)

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._reads], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._reads, 1 << 20) if ready else b""
            if not data:
                raise TimeoutError("the browser did not answer")
            self._buffer += data
        message, self._buffer = self._buffer.split(b"\0", 1)
        received: dict[str, Any] = json.loads(message)
        return received

    def _note(self, event: Mapping[str, Any]) -> None:
        method, values = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self._page.requests.append(values["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self._page.errors.append(str(values["exceptionDetails"].get("text")))
        elif method == "Runtime.consoleAPICalled" and values["type"] in ("error", "assert"):
            self._page.errors.append(" ".join(str(value.get("value")) for value in values["args"]))
        elif method == "Log.entryAdded" and values["entry"]["level"] == "error":
            self._page.errors.append(values["entry"]["text"])
