"""The rows of memory: what a rank holds at its peak, against the arithmetic.

Owns the model of these rows and how resident memory is read. The bar is on what lies between two presets: what the
allocator and the libraries hold besides is in both. The one decision: a rank's figure is the most that was
resident while it stepped, less what was resident after the same steps of a model of two layers and no size, so that
what torch, gloo and transformers load when they are first used is in neither side.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.diagnostics.bench_result import BenchRow
from pipeline.diagnostics.bench_train_material import Material, Measured
from pipeline.stages.reporting import BufferedReporter
from pipeline.training.config import Parallel
from pipeline.training.launch.spawn import spawn
from pipeline.training.loop import advance
from pipeline.training.observation import make_state
from pipeline.training.session import TrainJob, make_task, open_session
from pipeline.training.tasks.memory_count import count_memory
from pipeline.training.tasks.memory_sizes import estimate_of
from pipeline.training.worker import WorkerContext, joined

BAR = 0.85
"""The smaller of measured and computed over the larger: within 15 %."""
PRESETS: tuple[Parallel, ...] = ("zero3", "ddp")
MODEL: Mapping[str, Any] = {
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 640,
    "intermediate_size": 1728,
    "num_hidden_layers": 8,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
"""42 M parameters: 635 MB of state in float32, beside which a few MB of the interpreter do not count."""
_TINY = {"hidden_size": 10, "intermediate_size": 10, "num_hidden_layers": 2, "head_dim": 2}
_SEQUENCE_LENGTH = 128
_STEPS = 2
_TIMEOUT_SECONDS = 300.0


def measure(material: Material) -> Measured:
    """Peak resident bytes of a rank, of each preset, and what lies between the presets."""
    details: list[Mapping[str, str]] = []
    small = replace(material, work=material.work / "memory", sequence_length=_SEQUENCE_LENGTH, micro_batch_sequences=1)
    small = replace(small, global_batch_tokens=_SEQUENCE_LENGTH * material.world_size)
    measured: dict[Parallel, int] = {}
    computed: dict[Parallel, int] = {}
    for preset in PRESETS:
        job = small.job(preset, model=dict(MODEL), parallel=preset)
        task, mesh, plan = make_task(job, world_size=material.world_size)
        first = WorkerContext(rank=0, world_size=1, local_rank=0, device="cpu", device_reason="nothing is computed")
        size = count_memory(task, job.config, plan, worker=first)
        estimate = estimate_of(size, job.config, mesh=mesh, batch=plan, on_gloo=True, keeps_snapshot=False)
        tiny = small.job(f"tiny-{preset}", model={**MODEL, **_TINY}, parallel=preset)
        ranks = spawn(_resident, tiny, job, world_size=material.world_size, timeout_seconds=_TIMEOUT_SECONDS)
        measured[preset] = max(most - base for base, most in ranks)
        computed[preset] = estimate.peak_bytes
        parts: dict[str, int] = {"before the model": ranks[0][0], "measured above it": measured[preset]}
        parts |= {"computed": computed[preset]} | {str(kind): part for kind, part in estimate.by_kind.items()}
        details += [
            {"row": f"memory, {preset}", "part": part, "figure": f"{value / 1e6:.0f} MB"}
            for part, value in parts.items()
        ]
    between = [figures["ddp"] - figures["zero3"] for figures in (measured, computed)]
    rows = [_row("memory, what zero3 saves of ddp", *between, bar=BAR)]
    rows += [_row(f"memory, {preset}", measured[preset], computed[preset], bar=None) for preset in PRESETS]
    return Measured(rows=tuple(rows), details=tuple(details))


def _row(name: str, measured: int, computed: int, *, bar: float | None) -> BenchRow:
    """The smaller of the two over the larger, whichever it is."""
    is_below = measured <= computed
    return BenchRow(
        name=f"{name} ({'measured' if is_below else 'computed'})",
        unit="MB",
        ours=min(measured, computed) / 1e6,
        peer_name="computed" if is_below else "measured",
        peer=max(measured, computed) / 1e6,
        bar=bar,
    )


def _resident(worker: WorkerContext, tiny: TrainJob, job: TrainJob) -> tuple[int, int]:
    """Bytes after steps of the tiny model, and the most while those of the other ran."""
    with joined(worker):
        _step(worker, tiny)
        base = _status("VmRSS")
        _step(worker, job)
        return base, _status("VmHWM")


def _step(worker: WorkerContext, job: TrainJob) -> None:
    session = open_session(worker, job)
    state = make_state(session, step=0, train_loss=0.0, validation={"validation_loss": 0.0}, initial=0.0)
    advance(session, BufferedReporter(), state=state, until=_STEPS)


def _status(name: str) -> int:
    """A figure of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise AssertionError(f"/proc/self/status has no {name}")
