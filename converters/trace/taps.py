"""Marks in a traced graph where a block of the model gave its output.

Owns the one torch operator `pipeline::tap`, and which modules are blocks. Knows nothing of programs. The one decision:
a mark is an operator put there by a forward hook, exactly where a hook on the torch model will look, so that the two
frameworks compare the same value whatever decomposition does to the graph around it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

TAP_OPERATION = "pipeline.tap.default"


@torch.library.custom_op("pipeline::tap", mutates_args=())
def _tap(value: torch.Tensor, path: str) -> torch.Tensor:
    return value.clone()


@_tap.register_fake
def _(value: torch.Tensor, path: str) -> torch.Tensor:
    return value.clone()


def blocks(module: torch.nn.Module) -> tuple[str, ...]:
    """Paths of the modules that are direct items of a ModuleList or Sequential, in their order."""
    paths: dict[str, None] = {}
    for path, owner in module.named_modules():
        if isinstance(owner, torch.nn.ModuleList | torch.nn.Sequential):
            paths.update({f"{path}.{name}" if path else name: None for name, _ in owner.named_children()})
    return tuple(paths)


@contextmanager
def marked(module: torch.nn.Module) -> Iterator[None]:
    """Inside the block every block of `module` marks the first tensor that it returns."""
    owners = dict(module.named_modules())
    handles = [owners[path].register_forward_hook(_hook(path)) for path in blocks(module)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(path: str) -> Any:
    def mark(_module: torch.nn.Module, _inputs: Any, output: Any) -> Any:
        leaves, spec = tree_flatten(output)
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                leaves[number] = _tap(leaf, path)
                return tree_unflatten(leaves, spec)
        return output

    return mark
