"""The rules of one torch layer: how its tensors become the leaves of the Flax layer.

Owns the kernel layouts. Knows no family. The one decision: a layout belongs to the kind of layer and is written once,
because a wrong one has the right shape wherever two sizes happen to agree.
"""

from converters.operations import Transpose
from converters.rules import Rule

LINEAR = Transpose((1, 0))
"""torch Linear keeps [out, in], the Flax kernel is [in, out]."""
CONV1D = Transpose((2, 1, 0))
"""torch Conv1d keeps [out, in, time], the Flax kernel is [time, in, out]."""
CONV2D = Transpose((2, 3, 1, 0))
"""torch Conv2d keeps [out, in, height, width], the Flax kernel is [height, width, in, out]."""
KERNEL_LAYOUTS = {"linear": "in, out", "conv1d": "time, in, out", "conv2d": "height, width, in, out"}


def linear(source: str, target: str, *, has_bias: bool = True) -> list[Rule]:
    """The rules of a Linear."""
    return _kernel(source, target, LINEAR, has_bias=has_bias)


def conv1d(source: str, target: str) -> list[Rule]:
    """The rules of a Conv1d with a bias."""
    return _kernel(source, target, CONV1D, has_bias=True)


def conv2d(source: str, target: str, *, has_bias: bool = True) -> list[Rule]:
    """The rules of a Conv2d."""
    return _kernel(source, target, CONV2D, has_bias=has_bias)


def layer_norm(source: str, target: str, *, parts: tuple[str, str] = ("weight", "bias")) -> list[Rule]:
    """The rules of a LayerNorm, whose tensors have the names `parts`."""
    weight, bias = parts
    return [Rule.one(f"{source}.{weight}", f"{target}.scale"), Rule.one(f"{source}.{bias}", f"{target}.bias")]


def batch_norm(source: str, target: str) -> list[Rule]:
    """The rules of a BatchNorm: running statistics are leaves; its counter of batches is carried."""
    leaves = {"weight": "scale", "bias": "bias", "running_mean": "mean", "running_var": "var"}
    return [Rule.one(f"{source}.{theirs}", f"{target}.{ours}") for theirs, ours in leaves.items()]


def embedding(source: str, target: str) -> Rule:
    """The rule of an Embedding."""
    return Rule.one(f"{source}.weight", f"{target}.embedding")


def _kernel(source: str, target: str, layout: Transpose, *, has_bias: bool) -> list[Rule]:
    rules = [Rule.one(f"{source}.weight", f"{target}.kernel", layout)]
    return rules + ([Rule.one(f"{source}.bias", f"{target}.bias")] if has_bias else [])
