"""Attention over the cache where it lies, as an XLA custom call on CPUs.

Owns the call and which models it is for. Knows nothing of compilers or devices. The one decision: what is read is what
a sequence has, not what its bucket holds. XLA's own attention first copies the bucket's positions of every slot. The
call also rotates and writes: between operations of their own, XLA computes the cosines again for every layer and head.

Shape suffixes: B batch, T tokens, N query heads, H head_dim, S slots, K key-value heads, P cached positions, F half of
the numbers that turn.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.models.decoders.attention import View
from pipeline.models.decoders.config import DecoderConfig, Layer
from pipeline.models.decoders.model import Decoder
from pipeline.models.packed.calls import support

_LANES = 16
"""Of a head at once; a smaller or uneven head keeps XLA's attention."""


def read_cache_in_place(model: Decoder) -> Decoder:
    """Let every layer read its cache in place, and return `model`; one that `can_read_in_place` is false of stays."""
    if can_read_in_place(model.config):
        for block in model.layers:
            block.attention.over_cache = attend_in_place
    return model


def can_read_in_place(config: DecoderConfig) -> bool:
    """False of a model with a softcap or with heads that are no multiple of 16 wide: it keeps XLA's attention."""
    return config.attention_softcap is None and config.head_dim % _LANES == 0


def attend_in_place(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    keys_SKPH: jax.Array,
    values_SKPH: jax.Array,
    *,
    layer: Layer,
    view: View,
    softcap: float | None,
    in_float32: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `attend_over_copy`; a row at or beyond the cache's size, which fills up a batch, gives zeros.

    A number of the result depends neither on the other rows nor on the attention's length nor on the threads.

    Raises:
        RuntimeError: this machine cannot; ask `support` first.
    """
    target = support().attention
    if target is None:
        raise RuntimeError(f"the cache cannot be read in place here: {support().reason}")
    num_batch, num_tokens, num_heads, head_dim = q_BTNH.shape
    slots_B = jnp.arange(num_batch) if view.slots_B is None else view.slots_B
    none_BT1F = jnp.zeros((num_batch, num_tokens, 1, 0))
    cos_BT1F, sin_BT1F = (none_BT1F, none_BT1F) if layer.rotary is None else view.turns[layer.rotary]
    forms = [jax.ShapeDtypeStruct(made.shape, jnp.float32) for made in (q_BTNH, keys_SKPH, values_SKPH)]
    mixed_BTNH, keys_SKPH, values_SKPH = jax.ffi.ffi_call(target, forms, input_output_aliases={3: 1, 4: 2})(
        q_BTNH,
        k_BTKH,
        v_BTKH,
        keys_SKPH,
        values_SKPH,
        jnp.broadcast_to(slots_B.astype(jnp.int32)[:, None], view.positions_BT.shape),
        view.positions_BT.astype(jnp.int32),
        cos_BT1F,
        sin_BT1F,
        scale=np.float32(layer.scale),
        window=np.int64(layer.window or 0),
    )
    return mixed_BTNH.reshape(num_batch, num_tokens, num_heads * head_dim), keys_SKPH, values_SKPH
