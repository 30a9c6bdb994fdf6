"""Parameters to Orbax, leaf by leaf, in the order in which they become ready.

Owns the writing of `params/` in bounded memory. Knows nothing of models, torch or conversion rules. The one decision:
Orbax asks for a whole tree at once, so it is given a tree of announcements (shape and dtype), and the handler of that
leaf type takes the arrays from a row of work, making the next while the last are written. Orbax's own handler of numpy
arrays writes them, so what lies on disk is an Orbax checkpoint like any other.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from numpy.typing import NDArray

from pipeline.errors import ArtifactError
from pipeline.models import heap

Array = NDArray[Any]

BUFFER_BYTES = 64 * 2**20
"""Held at once while small leaves are written; a larger piece of work is held alone."""
CHUNK_BYTES = 2 * 2**20
"""A leaf is stored in tiles of at most this size, so that who needs a stretch of it reads little else: 237 MB in 25
leaves are read as fast as when each is one piece (0.5 s), and written with 0.8 instead of 0.6 s of the processor."""
_BATCH_BYTES = 24 * 2**20
"""Small pieces are written together: each commit of Orbax costs a thread and a few flushed files. SmolLM2's 272 leaves
one by one took 0.4 s more of the processor than in batches, of 2.7 s in all."""


@dataclass(frozen=True, slots=True)
class AnnouncedLeaf:
    """A leaf that will come."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Work that gives one leaf, or a few that are made together."""

    leaves: tuple[str, ...]
    """Dotted paths."""
    num_bytes: int
    """The most that the work and then the writing of its leaves hold; writing holds a leaf and its encoded form."""
    make: Callable[[], Sequence[Array]]
    """Gives the leaves in order; called once, in another thread, never two at a time."""


def write_parameters(
    directory: Path,
    *,
    announced: Mapping[str, AnnouncedLeaf],
    pieces: Iterable[Piece],
    buffer_bytes: int = BUFFER_BYTES,
) -> None:
    """Write an Orbax checkpoint of the leaves that `pieces` give.

    Holds at most the largest piece, or `buffer_bytes` where that is more.

    Args:
        directory: must not exist yet.
        announced: every leaf by dotted path; every dtype is kept as it is.
        pieces: give every announced leaf once, in any order.
        buffer_bytes: see above.

    Raises:
        ArtifactError: the directory exists, or a leaf is not as announced, missing or surplus.
        OSError: the disk refuses. What `make` raises comes through as it is.
    """
    if directory.exists():
        raise ArtifactError(f"{directory}: exists already; parameters are never overwritten")
    handler = _StreamingHandler(pieces, buffer_bytes=buffer_bytes)
    arrays = ocp.type_handlers.ArrayHandler()  # never used, but Orbax warns where it is not there
    registry = ocp.type_handlers.create_type_handler_registry((AnnouncedLeaf, handler), (jax.Array, arrays))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=registry)) as checkpointer:
        chunked = {path: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for path in announced}
        checkpointer.save(directory.resolve(), args=ocp.args.PyTreeSave(_nested(announced), save_args=_nested(chunked)))


class _StreamingHandler(ocp.type_handlers.NumpyHandler):
    """Orbax's handler of numpy arrays, given them a batch at a time."""

    def __init__(self, pieces: Iterable[Piece], *, buffer_bytes: int) -> None:
        super().__init__(deepcopy_host_arrays=False)
        self._batches = _batched(pieces)
        self._buffer_bytes = buffer_bytes

    async def serialize(self, values: Sequence[AnnouncedLeaf], infos: Sequence[Any], args: Any = None) -> list[Any]:
        """Make and write every leaf; nothing is left to wait for afterwards."""
        wanted = {info.name: (value, info, arg) for value, info, arg in zip(values, infos, args, strict=True)}
        writing: deque[tuple[asyncio.Task[None], int]] = deque()
        held = 0
        try:
            for batch in self._batches:
                num_bytes = sum(piece.num_bytes for piece in batch)
                while writing and held + num_bytes > self._buffer_bytes:
                    await writing[0][0]
                    held -= writing.popleft()[1]
                    heap.give_back()
                arrays = await asyncio.to_thread(_make, batch)
                leaves = [(array, *_claim(path, array, wanted)) for path, array in arrays]
                del arrays
                writing.append((asyncio.create_task(self._write(leaves)), num_bytes))
                del leaves
                held += num_bytes
            for task, _ in writing:
                await task
        finally:
            # Orbax writes in threads, which nothing stops: whoever deletes the directory must not meet them.
            await asyncio.gather(*(task for task, _ in writing), return_exceptions=True)
        heap.give_back()
        if wanted:
            raise ArtifactError(f"announced, but never made: {', '.join(sorted(wanted))}")
        return []

    async def _write(self, leaves: list[tuple[Array, Any, Any]]) -> None:
        arrays, infos, args = zip(*leaves, strict=True)
        commits = await super().serialize(arrays, infos, args)
        del arrays
        leaves.clear()
        for commit in commits:
            try:
                await asyncio.to_thread(commit.result)
            except (ValueError, RuntimeError) as error:  # how TensorStore's errors arrive, a full disk among them
                raise OSError(str(error).strip().splitlines()[0]) from error


def _batched(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces in their order; small ones together, a large one alone."""
    batch: list[Piece] = []
    num_bytes = 0
    for piece in pieces:
        if batch and num_bytes + piece.num_bytes > _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(piece)
        num_bytes += piece.num_bytes
    if batch:
        yield batch


def _make(batch: list[Piece]) -> list[tuple[str, Array]]:
    return [made for piece in batch for made in zip(piece.leaves, piece.make(), strict=True)]


def _claim(path: str, array: Array, wanted: dict[str, tuple[AnnouncedLeaf, Any, Any]]) -> tuple[Any, Any]:
    """What Orbax needs to write the leaf.

    Raises:
        ArtifactError: it is not as announced, or was never announced.
    """
    if path not in wanted:
        raise ArtifactError(f"{path}: made twice, or never announced")
    announced, info, arg = wanted.pop(path)
    if (array.shape, array.dtype) != (announced.shape, announced.dtype):
        raise ArtifactError(
            f"{path}: announced as {announced.shape} {announced.dtype}, made as {array.shape} {array.dtype}"
        )
    return info, arg


def _nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, name = path.split(".")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[name] = leaf
    return tree
