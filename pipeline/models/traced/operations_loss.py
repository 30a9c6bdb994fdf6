"""ATen losses and similarities.

Owns what training graphs compute last. Knows nothing of programs. The one decision: a reduction is torch's number (0
none, 1 mean, 2 sum), and ignored or weighted classes change the mean's divisor as torch defines it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp


def reduced(x: jax.Array, reduction: int) -> jax.Array:
    """Each element's loss, their mean or their sum."""
    return (x, jnp.mean(x), jnp.sum(x))[reduction] if reduction else x


def mse_loss(x: jax.Array, target: jax.Array, reduction: int = 1) -> jax.Array:
    """Squared difference."""
    return reduced(jnp.square(x - target), reduction)


def l1_loss(x: jax.Array, target: jax.Array, reduction: int = 1) -> jax.Array:
    """Absolute difference."""
    return reduced(jnp.abs(x - target), reduction)


def smooth_l1_loss(x: jax.Array, target: jax.Array, reduction: int = 1, beta: float = 1.0) -> jax.Array:
    """Squared below beta, absolute beyond."""
    apart = jnp.abs(x - target)
    return reduced(jnp.where(apart < beta, 0.5 * apart**2 / (beta or 1.0), apart - 0.5 * beta), reduction)


def huber_loss(x: jax.Array, target: jax.Array, reduction: int = 1, delta: float = 1.0) -> jax.Array:
    """As `smooth_l1_loss`, scaled by delta."""
    apart = jnp.abs(x - target)
    return reduced(jnp.where(apart <= delta, 0.5 * apart**2, delta * (apart - 0.5 * delta)), reduction)


def binary_cross_entropy(
    x: jax.Array, target: jax.Array, weight: jax.Array | None = None, reduction: int = 1
) -> jax.Array:
    """Of probabilities; logarithms are kept above -100, as torch does."""
    loss = -(target * jnp.maximum(jnp.log(x), -100) + (1 - target) * jnp.maximum(jnp.log1p(-x), -100))
    return reduced(loss if weight is None else loss * weight, reduction)


def binary_cross_entropy_with_logits(
    x: jax.Array,
    target: jax.Array,
    weight: jax.Array | None = None,
    pos_weight: jax.Array | None = None,
    reduction: int = 1,
) -> jax.Array:
    """Of logits."""
    share = 1.0 if pos_weight is None else 1 + (pos_weight - 1) * target
    loss = (1 - target) * x + share * jax.nn.softplus(-x)
    return reduced(loss if weight is None else loss * weight, reduction)


def kl_div(x: jax.Array, target: jax.Array, reduction: int = 1, *, log_target: bool = False) -> jax.Array:
    """Divergence of log probabilities from the target."""
    if log_target:
        return reduced(jnp.exp(target) * (target - x), reduction)
    return reduced(jnp.where(target > 0, target * (jnp.log(jnp.where(target > 0, target, 1)) - x), 0), reduction)


def nll_loss_forward(
    x: jax.Array, target: jax.Array, weight: jax.Array | None, reduction: int, ignore_index: int
) -> tuple[jax.Array, jax.Array]:
    """Minus the log probability of the target class (dim 1, or dim 0 without a batch), and the weight that counted."""
    dim = 1 if x.ndim > 1 else 0
    counted = target != ignore_index
    safe = jnp.where(counted, target, 0)
    picked = jnp.squeeze(jnp.take_along_axis(x, jnp.expand_dims(safe, dim), axis=dim), dim)
    weights = jnp.where(counted, 1.0 if weight is None else weight[safe], 0).astype(x.dtype)
    loss, total = -picked * weights, jnp.sum(weights)
    if reduction == 0:
        return loss, jnp.zeros((), x.dtype)
    return (jnp.sum(loss) / total if reduction == 1 else jnp.sum(loss)), total


def nll_loss(
    x: jax.Array, target: jax.Array, weight: jax.Array | None = None, reduction: int = 1, ignore_index: int = -100
) -> jax.Array:
    """The loss alone."""
    return nll_loss_forward(x, target, weight, reduction, ignore_index)[0]


def cross_entropy_loss(
    x: jax.Array,
    target: jax.Array,
    weight: jax.Array | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> jax.Array:
    """Of logits, with class indices or class probabilities as target."""
    dim = 1 if x.ndim > 1 else 0
    logs = jax.nn.log_softmax(x, axis=dim)
    by_class = jnp.ones((x.shape[dim],), x.dtype) if weight is None else weight
    shaped = by_class.reshape((-1,) + (1,) * (x.ndim - 1 - dim))
    if jnp.issubdtype(target.dtype, jnp.floating):
        smooth = target * (1 - label_smoothing) + label_smoothing / x.shape[dim]
        loss = -jnp.sum(logs * smooth * shaped, axis=dim)
        return jnp.sum(loss) / max(loss.size, 1) if reduction == 1 else reduced(loss, reduction)
    hard, total = nll_loss_forward(logs, target, weight, reduction, ignore_index)
    if label_smoothing == 0:
        return hard
    even = jnp.where(target != ignore_index, -jnp.sum(logs * shaped, axis=dim), 0)
    spread = even if reduction == 0 else jnp.sum(even) / (total if reduction == 1 else 1)
    return (1 - label_smoothing) * hard + label_smoothing / x.shape[dim] * spread


def cosine_similarity(x: jax.Array, y: jax.Array, dim: int = 1, eps: float = 1e-8) -> jax.Array:
    """Of directions along a dim; each length is at least eps."""
    lengths = [jnp.sqrt(jnp.maximum(jnp.sum(jnp.square(part), axis=dim, keepdims=True), eps * eps)) for part in (x, y)]
    return jnp.sum(x / lengths[0] * (y / lengths[1]), axis=dim)


def pairwise_distance(
    x: jax.Array, y: jax.Array, order: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> jax.Array:
    """Norm of `x - y + eps` along the last dim."""
    return jnp.sum(jnp.abs(x - y + eps) ** order, axis=-1, keepdims=keepdim) ** (1 / order)


LOSS: Mapping[str, Callable[..., Any]] = {
    "aten.mse_loss.default": mse_loss,
    "aten.l1_loss.default": l1_loss,
    "aten.smooth_l1_loss.default": smooth_l1_loss,
    "aten.huber_loss.default": huber_loss,
    "aten.binary_cross_entropy.default": binary_cross_entropy,
    "aten.binary_cross_entropy_with_logits.default": binary_cross_entropy_with_logits,
    "aten.kl_div.default": kl_div,
    "aten.nll_loss_forward.default": nll_loss_forward,
    "aten.nll_loss2d_forward.default": nll_loss_forward,
    "aten.nll_loss.default": nll_loss,
    "aten.nll_loss_nd.default": nll_loss,
    "aten.cross_entropy_loss.default": cross_entropy_loss,
    "aten.cosine_similarity.default": cosine_similarity,
    "aten.pairwise_distance.default": pairwise_distance,
}
