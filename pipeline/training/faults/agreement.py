"""The one place where ranks agree on what happens at a step boundary.

Owns the agreement word, its process group, and how often it is exchanged. Knows nothing of what its bits lead to. The
one decision: the word is a bit-wise or over all ranks on a CPU group of its own, sent when a step begins and read when
it ends, so it travels while the step computes.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pipeline.training.faults.requests import Flag
from pipeline.training.worker import WorkerContext


@dataclass(kw_only=True)
class Agreement:
    """One rank's side; every method is called by all ranks together."""

    group: Any
    """A gloo group of all ranks."""
    every_steps: int
    """Steps between words."""
    _word: torch.Tensor | None = None
    _work: Any = None

    @classmethod
    def open(cls, worker: WorkerContext, *, every_steps: int) -> "Agreement":
        """Make the group; called by all ranks."""
        timeout = timedelta(seconds=worker.collective_timeout_seconds)
        return cls(group=dist.new_group(backend="gloo", timeout=timeout), every_steps=every_steps)

    def begin(self, flags: Flag, *, step: int) -> None:
        """Send this rank's bits, if the step is one with a word; training goes on meanwhile."""
        if step % self.every_steps:
            return
        self._word = torch.tensor(int(flags), dtype=torch.int64)
        self._work = dist.all_reduce(self._word, op=dist.ReduceOp.BOR, group=self.group, async_op=True)

    def finish(self) -> Flag:
        """What the ranks asked for together; nothing where no word was sent."""
        if self._work is None or self._word is None:
            return Flag(0)
        self._work.wait()
        word, self._word, self._work = self._word, None, None
        return Flag(int(word))

    def agree(self, flags: Flag) -> Flag:
        """Exchange a word now, outside of steps."""
        self.begin(flags, step=0)
        return self.finish()

    def gather(self, text: str) -> list[str]:
        """What each rank says, by rank."""
        texts = [""] * dist.get_world_size()
        dist.all_gather_object(texts, text, group=self.group)
        return texts
