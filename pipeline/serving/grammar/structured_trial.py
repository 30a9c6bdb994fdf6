"""Whether a constraint compiles in time, found out in a process of its own.

Owns that process's life: it is started at the first question, ended at a breach, and ends by itself when the replica
does. Knows nothing of the cache. Not for several threads at once.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import IO, Any

from pipeline.serving.grammar.response_format import Constraint
from pipeline.serving.grammar.structured_matcher import GrammarFault
from pipeline.serving.grammar.vocabulary import Vocabulary

START_SECONDS = 60.0
_MODULE = "pipeline.serving.grammar.structured_child"


class CompilerUnavailable(Exception):  # noqa: N818 - a state, not a fault of the caller
    """The compiling process does not start, or is busy with others."""


class TooCostly(GrammarFault):
    """It is not compiled before the deadline or within the memory; the process is ended."""


class Trial:
    """Judges constraints for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary, *, deadline_seconds: float) -> None:
        self._vocabulary = vocabulary
        self._deadline_seconds = deadline_seconds
        self._child: subprocess.Popen[str] | None = None

    def judge(self, constraint: Constraint) -> None:
        """Compile and throw away.

        Raises:
            GrammarFault: it is wrong.
            TooCostly: it is not compiled in time.
            CompilerUnavailable: the process does not start.
        """
        child = self.started()
        asked = {"kind": constraint.kind, "text": constraint.text, "alarm_seconds": 2 * self._deadline_seconds}
        answer = _ask(child, asked, seconds=self._deadline_seconds)
        if answer is None:
            self.close()
            raise TooCostly(
                f"compiling it takes more than {self._deadline_seconds:g} s or too much memory; make it simpler"
            )
        if answer["fault"]:
            raise GrammarFault(answer["fault"])

    def close(self) -> None:
        """End the process, if there is one."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()

    def started(self) -> "subprocess.Popen[str]":
        """The process, which takes about a second to start.

        Raises:
            CompilerUnavailable: it does not start.
        """
        if self._child is not None and self._child.poll() is None:
            return self._child
        self.close()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._child = subprocess.Popen(
            [sys.executable, "-m", _MODULE],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        if _ask(self._child, self._vocabulary.grammar_file(), seconds=START_SECONDS) is None:
            self.close()
            raise CompilerUnavailable("the process that compiles grammars does not start; its output says why")
        return self._child


def _ask(child: "subprocess.Popen[str]", message: Mapping[str, Any], *, seconds: float) -> dict[str, Any] | None:
    """The child's answer; None where it came too late or the child ended."""
    assert child.stdin is not None and child.stdout is not None
    limit = threading.Timer(seconds, child.kill)
    limit.start()
    try:
        _write(child.stdin, json.dumps(message))
        line = child.stdout.readline()
    finally:
        limit.cancel()
    return dict(json.loads(line)) if line.endswith("\n") else None


def _write(pipe: IO[str], text: str) -> None:
    try:
        pipe.write(text + "\n")
        pipe.flush()
    except BrokenPipeError:  # the child has ended; reading then finds the end
        return
