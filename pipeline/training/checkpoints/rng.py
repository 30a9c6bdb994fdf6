"""The random number generators of a rank.

Owns seeding, keeping and restoring those of every library that draws from a global one: torch on the CPU and on the
rank's device, numpy, and Python's `random`. Knows nothing of checkpoints. The one decision: a seed is a function of
(seed, step, rank), so a training that resumes with another number of ranks is deterministic too.
"""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.training.worker import WorkerContext

_NUMPY_SEEDS = 2**32


def seed_rank(worker: WorkerContext, *, seed: int, step: int) -> None:
    """Seed this rank's generators as a function of (seed, step, rank)."""
    number = _seed_of(worker, seed=seed, step=step)
    torch.manual_seed(number)
    np.random.seed(number % _NUMPY_SEEDS)
    random.seed(number)


def has_drawn(worker: WorkerContext, *, seed: int) -> bool:
    """True where this rank has drawn random numbers of torch since it was seeded for step 0, as dropout does."""
    current = torch.cuda.get_rng_state(worker.torch_device) if worker.device == "cuda" else torch.get_rng_state()
    fresh = torch.Generator(worker.torch_device).manual_seed(_seed_of(worker, seed=seed, step=0))
    return not torch.equal(current, fresh.get_state())


def rng_state(worker: WorkerContext) -> dict[str, Any]:
    """State of every generator, as tensors and plain values; a copy."""
    drawn: dict[str, Any] = np.random.get_state(legacy=False)
    inner = drawn["state"]
    state = {
        "cpu": torch.get_rng_state(),
        "python": random.getstate(),
        # As a tensor: what is loaded again is data alone, and an array would need numpy's own unpickling.
        "numpy": {**drawn, "state": {**inner, "key": torch.from_numpy(inner["key"].astype(np.int64))}},
    }
    if worker.device == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(worker.torch_device)
    return state


def set_rng_state(worker: WorkerContext, state: Mapping[str, Any]) -> None:
    """Go on where `state` was taken, by a rank of the same number on the same kind of device."""
    torch.set_rng_state(state["cpu"])
    random.setstate(state["python"])
    drawn = state["numpy"]
    key = drawn["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state({**drawn, "state": {**drawn["state"], "key": key}})
    if worker.device == "cuda":
        torch.cuda.set_rng_state(state["cuda"], worker.torch_device)


def restore_rng(worker: WorkerContext, path: Path | None, *, seed: int, step: int) -> None:
    """Go on as the file says that this rank wrote, or from a seed where there is none: ranks were others then."""
    if path is None:
        seed_rank(worker, seed=seed, step=step)
    else:
        set_rng_state(worker, torch.load(path, weights_only=True))


def _seed_of(worker: WorkerContext, *, seed: int, step: int) -> int:
    return (seed * 1_000_003 + step) * 65_537 + worker.rank
