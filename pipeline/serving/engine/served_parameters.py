"""The parameters of a served decoder: fused, cast, placed, and exchanged for others of the same shapes.

Owns the leaves that the executables take as arguments. Knows nothing of caches or requests. The one decision: new
parameters must have exactly the names, shapes and dtypes of the old ones, because these are what was compiled; whatever
differs is named, and nothing is changed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from pipeline.errors import ParameterError
from pipeline.models.checkpoint import model_leaves
from pipeline.models.decoders.layout import widen
from pipeline.models.decoders.model import Decoder, fuse_projections
from pipeline.models.decoders.quantized import is_quantized
from pipeline.models.packed.attention import read_cache_in_place
from pipeline.models.packed.modules import choose_products, pack_projections
from pipeline.models.quantization import SCALE_SUFFIX
from pipeline.serving.accelerator.mesh import ServingMesh

_MAX_COMPLAINTS = 5


def is_packed(model: Decoder, *, mesh: ServingMesh, dtype: str) -> bool:
    """Whether `model` is served with the custom calls of `pipeline.models.packed`."""
    products = choose_products(platform=mesh.platform, dtype=dtype, num_devices=mesh.tensor)
    return products.is_packed and not is_quantized(model)


class ServedParameters:
    """Names, arrays, and the way back to a module."""

    def __init__(self, model: Decoder, *, mesh: ServingMesh, dtype: str) -> None:
        """Fuse, cast and place `model`, which is taken over."""
        self._mesh = mesh
        self._dtype = dtype
        graph, state = nnx.split(self._fused(model))
        leaves, tree = jax.tree.flatten(state)
        self._names = tuple(model_leaves(nnx.merge(graph, state)))
        assert len(self._names) == len(leaves)
        shardings = [
            mesh.leaf(name, leaf.shape, config=model.config) for name, leaf in zip(self._names, leaves, strict=True)
        ]
        self.arrays: list[jax.Array] = jax.device_put(
            [self._cast(name, leaf) for name, leaf in zip(self._names, leaves, strict=True)], shardings
        )
        self.rebuild: Callable[[Sequence[Any]], Decoder] = lambda leaves: nnx.merge(
            graph, jax.tree.unflatten(tree, leaves)
        )

    def leaves_of(self, model: Decoder) -> dict[str, Any]:
        """What `model`, which is taken over, would be served with; compiles where shapes are new to the process."""
        return {name: self._cast(name, leaf) for name, leaf in model_leaves(self._fused(model)).items()}

    def placed(self, leaves: Mapping[str, Any]) -> list[jax.Array]:
        """`leaves` (of `leaves_of` or `on_host`) laid out as the arrays in use; these stay in use.

        Raises:
            ParameterError: names, shapes or dtypes differ; says the first that do.
        """
        complaints = list(self._complaints(leaves))
        if complaints:
            shown = complaints[:_MAX_COMPLAINTS]
            if len(complaints) > len(shown):
                shown.append(f"... and {len(complaints) - len(shown)} more")
            raise ParameterError(
                f"the new parameters differ from those that are served in {len(complaints)} leaves:\n"
                + "\n".join(f"  {line}" for line in shown),
                hint="a model of other shapes or dtype needs an executor of its own",
            )
        shardings = [array.sharding for array in self.arrays]
        placed: list[jax.Array] = jax.device_put([leaves[name] for name in self._names], shardings)
        return jax.block_until_ready(placed)

    def on_host(self, arrays: Sequence[jax.Array]) -> dict[str, NDArray[Any]]:
        """Arrays of `placed`, or those that were in use before, by name in the host's memory."""
        return dict(zip(self._names, map(np.asarray, arrays), strict=True))

    def _fused(self, model: Decoder) -> Decoder:
        # On a CPU the head is kept as [D, V] beside a tied embedding: 23 instead of 26 ms a token at SmolLM2-135M. Who
        # asks for int8 wants the memory.
        materialize = self._mesh.platform == "cpu" and not is_quantized(model)
        packed = is_packed(model, mesh=self._mesh, dtype=self._dtype)
        model = widen(model, tensor=self._mesh.tensor)
        fused = fuse_projections(model, materialize_head=materialize, shards=self._mesh.tensor)
        return read_cache_in_place(pack_projections(fused)) if packed else fused

    def _cast(self, name: str, leaf: Any) -> jax.Array:
        """In the dtype that is computed in; int8 weights and their scales stay as they are."""
        is_cast = jnp.issubdtype(leaf.dtype, jnp.floating) and not name.endswith(SCALE_SUFFIX)
        return jnp.asarray(leaf, self._dtype) if is_cast else jnp.asarray(leaf)

    def _complaints(self, found: Mapping[str, Any]) -> list[str]:
        wanted = dict(zip(self._names, self.arrays, strict=True))
        lines = [f"missing: {name} {_shown(wanted[name])}" for name in self._names if name not in found]
        lines += [f"surplus: {name} {_shown(leaf)}" for name, leaf in found.items() if name not in wanted]
        for name in self._names:
            if name in found and _shown(found[name]) != _shown(wanted[name]):
                lines.append(f"{name} is {_shown(found[name])}, must be {_shown(wanted[name])}")
        return lines


def _shown(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"
