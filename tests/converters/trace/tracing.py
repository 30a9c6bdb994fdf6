"""A torch module beside the program it became."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from converters.trace.export import Trace, trace_module
from pipeline.models.traced.description import TracedModel
from pipeline.models.traced.module import TracedModule


@dataclass(frozen=True, kw_only=True)
class Pair:
    torch_module: torch.nn.Module
    trace: Trace
    described: TracedModel
    module: TracedModule

    def error(self, *args: Any, **kwargs: Any) -> float:
        """The largest difference of any output, relative to its largest value."""
        with torch.no_grad():
            wanted = self.torch_module(*args, **kwargs)
        given_args, given_kwargs = as_arrays(tuple(args)), as_arrays(dict(kwargs))
        found = nnx.jit(lambda module, args, kwargs: module(*args, **kwargs))(self.module, given_args, given_kwargs)
        theirs = [leaf for leaf in torch.utils._pytree.tree_leaves(wanted) if isinstance(leaf, torch.Tensor)]
        ours = jax.tree.leaves(found)
        assert len(theirs) == len(ours)
        return max(relative_error(one, other) for one, other in zip(theirs, ours, strict=True))


def pair(
    module: torch.nn.Module,
    *args: Any,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    rngs: nnx.Rngs | None = None,
    names: Sequence[str] = (),
    **kwargs: Any,
) -> Pair:
    trace = trace_module(module, args=args, kwargs=kwargs, dynamic=dynamic, names=names)
    described = TracedModel(program=trace.program, constants=trace.constants)
    state = module.state_dict(keep_vars=True)
    leaves = {name: state[name].detach().clone().numpy() for name in trace.program.leaves}
    return Pair(torch_module=module, trace=trace, described=described, module=described.module(leaves, rngs=rngs))


def as_arrays(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf.numpy()) if isinstance(leaf, torch.Tensor) else leaf, tree)


def relative_error(wanted: torch.Tensor, found: Any) -> float:
    theirs, ours = wanted.detach().float().numpy(), np.asarray(found, np.float32)
    assert theirs.shape == ours.shape
    return float(np.abs(theirs - ours).max(initial=0) / max(np.abs(theirs).max(initial=0), 1e-9))
