"""What a decoder's largest executables take beside parameters and cache.

Owns the question to the compiler, asked on shapes alone: nothing is loaded or allocated for it. The one decision: the
figure is the compiler's own, for the device that will run it, and not a formula that has to be kept true.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pipeline.models.decoders.model import Decoder, fuse_projections
from pipeline.serving.accelerator.mesh import ServingMesh
from pipeline.serving.engine.buckets import Buckets
from pipeline.serving.engine.scheduler import Limits
from pipeline.serving.engine.step_arguments import idle_decode, idle_prefill
from pipeline.serving.engine.step_functions import StepFunctions


def temporary_bytes(compiled: Any) -> int:
    """Of one compiled executable; 0 where the backend does not tell."""
    analysis = compiled.memory_analysis()
    return 0 if analysis is None else int(analysis.temp_size_in_bytes)


def largest_temporaries(model: Decoder, *, limits: Limits, buckets: Buckets, device: Any, dtype: str) -> int:
    """The larger of the largest decode and the largest prefill executable; compiles both.

    With XLA's own products and attention, which copy what they read of the cache: where those of
    `pipeline.models.packed` serve, this is more than is taken.

    Args:
        model: abstract, as it is before projections are fused.
        limits: slots, context and steps.
        buckets: for these limits.
        device: that will run them; of several, one that would hold everything.
        dtype: that is computed in.
    """
    mesh = ServingMesh.of(device)
    fused = nnx.eval_shape(fuse_projections, model)
    graph, state = nnx.split(fused)
    leaves, tree = jax.tree.flatten(state)

    def placed(leaf: Any) -> jax.ShapeDtypeStruct:
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jax.ShapeDtypeStruct(leaf.shape, dtype if is_float else leaf.dtype, sharding=mesh.whole)

    functions = StepFunctions(
        rebuild=lambda leaves: nnx.merge(graph, jax.tree.unflatten(tree, leaves)),
        whole=mesh.on_every_device,
        context=limits.context,
        decode_steps=limits.decode_steps,
    )
    given = [placed(leaf) for leaf in leaves]
    cache = jax.tree.map(
        placed,
        jax.eval_shape(
            lambda: mesh.empty_cache(fused.config, slots=limits.slots, positions=limits.context, dtype=dtype)
        ),
    )
    batch, chunk = buckets.decode_batches[-1], buckets.chunks[-1]
    steps = (
        (functions.decode, idle_decode(batch), buckets.decode_attention[-1]),
        (functions.prefill, idle_prefill(chunk), buckets.prefill_attention[-1]),
    )
    found = []
    for function, arguments, length in steps:
        jitted = jax.jit(lambda *given, f=function, n=length: f(*given, attention_length=n), donate_argnums=1)
        found.append(temporary_bytes(jitted.lower(given, cache, *arguments).compile()))
    return max(found)
