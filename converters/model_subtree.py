"""Which part of a nested training state is the model.

Owns the names under which training code keeps a model's state dict, and a moving average of it. Knows no format. The
one decision: a part is taken when exactly one has such a name; where several have, or none, the checkpoint is refused
with what it holds. Where a training of ours has kept an average, that is what the model hands on.
"""

from collections.abc import Iterable

from pipeline.errors import CheckpointError

MODEL_KEYS = ("model", "state_dict", "model_state_dict")
"""Ours and torchtitan's, Lightning's, and that of torch's own tutorial."""
WRAPPER_KEYS = ("app",)
"""torch.distributed.checkpoint's examples put the whole of a training into one stateful object of this name."""

KeyPath = tuple[str, ...]
AVERAGE: KeyPath = ("extras", "ema")
"""Where `train.fsdp` keeps the moving average of what it trains, by name in the model."""


def model_subtree(paths: Iterable[KeyPath], *, where: str) -> KeyPath:
    """The path of the model's state dict among the paths of all tensors; `()` where they are a bare state dict.

    Raises:
        CheckpointError: several parts could be it, or none; `where` names the checkpoint.
    """
    paths = list(paths)
    if all(len(path) == 1 for path in paths):
        return ()
    found = {prefix for path in paths if (prefix := _prefix(path)) is not None}
    if len(found) == 1:
        return found.pop()
    held = ", ".join(sorted({path[0] for path in paths}))
    if found:
        shown = ", ".join(repr(".".join(prefix)) for prefix in sorted(found))
        raise CheckpointError(
            f"{where}: several parts could be the model: {shown}; it holds: {held}",
            hint="save the state dict of the one that is meant in a checkpoint of its own",
        )
    raise CheckpointError(
        f"{where}: no tensor under {', '.join(map(repr, MODEL_KEYS))}; it holds: {held}",
        hint="save {'model': model.state_dict(), ...}, or the model's state dict alone",
    )


def _prefix(path: KeyPath) -> KeyPath | None:
    depth = 0
    while depth < len(path) - 1 and path[depth] in WRAPPER_KEYS:
        depth += 1
    return path[: depth + 1] if depth < len(path) - 1 and path[depth] in MODEL_KEYS else None
