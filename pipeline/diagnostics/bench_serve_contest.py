"""The sides of `pipeline bench serve` while it runs, and what a group of rows is.

Owns which process holds which model. The one decision: a side is started when it is first asked and lives to the end,
so a model is loaded once, and a side that cannot start fails only the rows that need it.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.diagnostics.bench_serve_material import Material
from pipeline.diagnostics.bench_serve_side import Side
from pipeline.diagnostics.bench_turns import Measure, RowSpec

_DIRECTORIES: Mapping[str, Callable[[Material], Path]] = {
    "ours": lambda material: material.flax_decoder,
    "ours_products": lambda material: material.flax_decoder,
    "ours_start": lambda material: material.flax_decoder,
    "ours_embeddings": lambda material: material.flax_encoder,
    "transformers": lambda material: material.decoder,
    "torch_embeddings": lambda material: material.encoder,
    "onnxruntime": lambda material: material.onnx_encoder,
    "llama_cpp": lambda material: material.gguf_decoder,
}

_REST_SECONDS = 0.15
"""Threads of the side before look out for work for up to 0.04 s (onnxruntime), on the cores of the next one."""


@dataclass(kw_only=True)
class Contest:
    """The running sides."""

    material: Material
    stack: ExitStack
    _sides: dict[str, Side] = field(default_factory=dict)
    _ports: dict[str, int] = field(default_factory=dict)
    _asked: str = ""

    def ask(self, kind: str, question: str, **arguments: Any) -> Any:
        """The answer of a side, which is started where it does not run.

        Raises:
            PipelineError: the side, or what it needs, cannot be had.
        """
        if kind not in self._sides:
            self._sides[kind] = self.stack.enter_context(self.fresh(kind))
        if kind != self._asked:
            time.sleep(_REST_SECONDS)
            self._asked = kind
        return self._sides[kind].ask(question, **arguments)

    def port(self, kind: str) -> int:
        """Of the side's HTTP server, which is started where it does not run."""
        if kind not in self._ports:
            self._ports[kind] = int(self.ask(kind, "listen"))
        return self._ports[kind]

    def fresh(self, kind: str) -> Side:
        """A side of its own, to be closed by the caller."""
        return Side(kind, directory=_DIRECTORIES[kind](self.material), log=self.material.work / f"{kind}.log")


@dataclass(frozen=True, kw_only=True)
class Group:
    """Rows that are measured together."""

    name: str
    rows: tuple[RowSpec, ...]
    sides: Callable[[Contest], Mapping[str, Measure]]
    most_rounds: int = 5
    warm_up: bool = True
