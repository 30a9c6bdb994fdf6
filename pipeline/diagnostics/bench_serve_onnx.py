"""The onnxruntime side of `pipeline bench serve`: the exported encoder, float32, two threads.

Owns the session. Runs in a process of its own, without torch and jax.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from pipeline.diagnostics.bench_serve_embedder import make_embedder, mean_of_tokens
from pipeline.diagnostics.bench_serve_side import THREADS

MODEL_FILE = "model.onnx"


def answers(directory: Path) -> Mapping[str, Callable[..., Any]]:
    """Of a text encoder."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    session = onnxruntime.InferenceSession(
        str(directory / MODEL_FILE), sess_options=options, providers=["CPUExecutionProvider"]
    )
    names = [item.name for item in session.get_inputs()]

    def forward(arrays: Mapping[str, NDArray[np.int64]]) -> NDArray[np.float32]:
        given = {**arrays, "token_type_ids": np.zeros_like(arrays["input_ids"])}
        (hidden, *_) = session.run(None, {name: given[name] for name in names})
        return mean_of_tokens(hidden, arrays["attention_mask"])

    return {"embed": make_embedder(directory, forward=forward)}
