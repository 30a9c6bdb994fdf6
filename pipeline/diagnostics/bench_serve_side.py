"""One side of a comparison, in a process of its own that is asked questions.

Owns the pipe between the bench and its sides. Knows nothing of what is measured. The one decision: torch and jax never
share a process, and a side loads its model once and answers many times, so rounds of the sides can take turns; an
exception in a side is an answer that says so, never a figure.
"""

import contextlib
import importlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from pipeline.errors import PipelineError, StageError

SIDES: Mapping[str, str] = {
    "ours": "pipeline.diagnostics.bench_serve_ours:answers",
    "ours_embeddings": "pipeline.diagnostics.bench_serve_ours:embedding_answers",
    "ours_products": "pipeline.diagnostics.bench_serve_ours:product_answers",
    "ours_start": "pipeline.diagnostics.bench_serve_ours:start_answers",
    "transformers": "pipeline.diagnostics.bench_serve_torch:answers",
    "torch_embeddings": "pipeline.diagnostics.bench_serve_torch:embedding_answers",
    "onnxruntime": "pipeline.diagnostics.bench_serve_onnx:answers",
    "llama_cpp": "pipeline.diagnostics.bench_serve_llama:answers",
}
"""`(directory) -> {question: function}`; resolved in the side's own process."""
THREADS = 2
"""Of every side. XLA takes a thread for each core; the bench says so where a machine has more."""
ANSWER_SECONDS = 600.0
_LAST_WORDS = 400
"""Characters of a side's own output that a failure quotes."""


class Side:
    """A process that answers `ask`."""

    def __init__(self, kind: str, *, directory: Path, log: Path) -> None:
        """Start it; `directory` is the model's, `log` takes what it prints."""
        self.kind = kind
        self._log = log
        threads = {name: str(THREADS) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __spec__.name, kind, str(directory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=os.environ | threads | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"},
            )
        self._buffer = b""

    def ask(self, question: str, *, timeout_seconds: float = ANSWER_SECONDS, **arguments: Any) -> Any:
        """The side's answer.

        Raises:
            StageError: it raised, ended, or did not answer in time; names the side and its last words.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([question, arguments]).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise StageError(f"{self.kind} ended: {self._last_words()}") from error
        answer = json.loads(self._line(time.monotonic() + timeout_seconds))
        if "error" in answer:
            raise StageError(f"{self.kind}: {answer['error']}")
        return answer["value"]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> "Side":
        """Nothing more to do."""
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        """As `close`."""
        self.close()

    def _line(self, deadline: float) -> bytes:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self._process.kill()  # its late answer must not be taken for the next question's
                    self._process.wait()
                    raise StageError(f"{self.kind} did not answer in time: {self._last_words()}")
                part = os.read(self._process.stdout.fileno(), 65536)
                if not part:
                    raise StageError(f"{self.kind} ended: {self._last_words()}")
                self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _last_words(self) -> str:
        return " ".join(self._log.read_text(encoding="utf-8", errors="replace").split())[-_LAST_WORDS:]


def _serve(kind: str, directory: Path) -> None:
    """The side's own process: answers until its input ends."""
    # What a library prints must not stand between answers.
    answers_to = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    made: Mapping[str, Callable[..., Any]] | None = None
    for line in sys.stdin:
        question, arguments = json.loads(line)
        try:
            if made is None:
                module, _, name = SIDES[kind].partition(":")
                made = getattr(importlib.import_module(module), name)(directory)
            answer = {"value": made[question](**arguments)}
        except Exception as error:  # a side's boundary: its failure is an answer
            is_ours = isinstance(error, PipelineError)
            answer = {"error": str(error) if is_ours else f"{type(error).__name__}: {error}"}
        answers_to.write(json.dumps(answer) + "\n")
        answers_to.flush()


if __name__ == "__main__":
    _serve(sys.argv[1], Path(sys.argv[2]))
