"""Where a replica computes and in which dtype, with the reason.

Owns the two `auto` choices of a deployment. The one decision: `auto` always records what it chose and why, and an
explicit wish that cannot be had is an error, never another device or dtype.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pipeline.cluster.ledger import gib
from pipeline.errors import ParameterError
from pipeline.models.decoders.config import DecoderConfig
from pipeline.models.decoders.quantized import at_once
from pipeline.serving.accelerator.weight_bytes import INT8, compute_dtype, weights_bytes

_PLATFORM_OF_DEVICE = {"cpu": "cpu", "cuda": "gpu"}
MOST_OF_LIMIT = 0.9
"""Weights beyond this share of the allocator's limit leave no cache worth serving."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The chosen device and dtype."""

    device: str
    device_reason: str
    dtype: str
    """Of the weights: float32, bfloat16 or int8."""
    dtype_reason: str
    compute_dtype: str
    """Of activations, cache and what is not int8."""
    warnings: tuple[str, ...] = ()


def choose_placement(*, device: str, dtype: str, config: DecoderConfig | None = None) -> tuple[Any, Placement]:
    """The jax device and what to record of the choice.

    Args:
        device: `auto`, `cpu` or `cuda`.
        dtype: `auto`, `float32`, `bfloat16` or `int8`.
        config: of a decoder, the only kind that is served in int8.

    Raises:
        ParameterError: the device does not exist here, or the model is not served in int8.
    """
    chosen, name, reason = _device(device)
    picked, dtype_reason, warnings = choose_dtype(
        dtype,
        device=name,
        config=config,
        limit=allocator_room(chosen),
        rebuilds=lambda: config is not None and rebuilds_weight(chosen, config),
    )
    return chosen, Placement(
        device=name,
        device_reason=reason,
        dtype=picked,
        dtype_reason=dtype_reason,
        compute_dtype=compute_dtype(picked, device=name),
        warnings=warnings,
    )


def choose_dtype(
    asked: str, *, device: str, config: DecoderConfig | None, limit: int | None, rebuilds: Callable[[], bool]
) -> tuple[str, str, tuple[str, ...]]:
    """Dtype of the weights, the reason, and warnings.

    Args:
        asked: by the flow.
        device: `cpu` or `cuda`.
        config: of a decoder; None for another model.
        limit: bytes that the allocator may still take; None where it has no limit of its own.
        rebuilds: whether the device rebuilds the float weight at each product with an int8 one; may compile.

    Raises:
        ParameterError: int8 is asked for a model that is not served in it.
    """
    has_int8 = config is not None and config.experts is None
    if asked == INT8:
        if not has_int8:
            what = "a model of experts" if config is not None else "no decoder of a family"
            raise ParameterError(
                f"dtype: int8 was asked for, but this is {what}, and only the projections of decoders are quantized",
                hint="use dtype: auto, float32 or bfloat16",
            )
        return INT8, "asked for", _int8_warnings(device, rebuilds=rebuilds)
    if asked != "auto":
        return asked, "asked for", ()
    if device == "cpu":
        return (
            "float32",
            "auto: bfloat16 products on XLA:CPU are 10 to 40 times slower than float32; int8 takes a quarter of the "
            "memory for projections but is no faster (29.7 ms a token against 25.3 with SmolLM2-135M), and less exact",
            (),
        )
    half = "auto: half the bytes of float32 at each decode step"
    if config is None or not has_int8 or limit is None:
        return "bfloat16", half, ()
    wide, narrow = (weights_bytes(config, dtype=dtype, device=device) for dtype in ("bfloat16", INT8))
    most = MOST_OF_LIMIT * limit
    if wide <= most or narrow > most:
        return "bfloat16", half, ()
    return (
        INT8,
        f"auto: {gib(wide)} of bfloat16 weights leave no room in the {gib(limit)} that this process may take; "
        f"{gib(narrow)} of int8 weights do",
        _int8_warnings(device, rebuilds=rebuilds),
    )


def allocator_room(device: Any) -> int | None:
    """Bytes that this process may still take of `device`, by its own allocator; None where it has no limit (a CPU).

    Never what the device shows as free: that is what other processes have left for the moment.
    """
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))


def rebuilds_weight(device: Any, config: DecoderConfig) -> bool:
    """Whether a product with an int8 weight of this size makes a float copy of it first, by the compiled memory use."""
    num_in, num_out = config.hidden_size, config.intermediate_size
    dtype = jnp.float32 if device.platform == "cpu" else jnp.bfloat16
    sharding = jax.sharding.SingleDeviceSharding(device)
    x = jax.ShapeDtypeStruct((1, num_in), dtype, sharding=sharding)
    kernel = jax.ShapeDtypeStruct((num_in, num_out), jnp.int8, sharding=sharding)
    compiled = jax.jit(at_once).lower(x, kernel).compile()
    copied = num_in * num_out * jnp.dtype(dtype).itemsize
    return bool(compiled.memory_analysis().temp_size_in_bytes >= copied)


def _int8_warnings(device: str, *, rebuilds: Callable[[], bool]) -> tuple[str, ...]:
    if device == "cpu":
        return ("int8 on a CPU saves memory, not time: converting weights takes as long as reading float32 ones",)
    if rebuilds():
        return (
            "int8 saves memory here, not time: this device rebuilds the float weight at each product, as the compiled "
            "memory use shows",
        )
    return ()


def _device(device: str) -> tuple[Any, str, str]:
    found = jax.local_devices()
    platform = found[0].platform
    if device == "auto":
        name = "cpu" if platform == "cpu" else "cuda"
        return found[0], name, f"auto: jax sees {len(found)} {found[0].device_kind} device(s) first"
    matching = [one for one in found if one.platform == _PLATFORM_OF_DEVICE[device]]
    if not matching and device == "cpu":
        matching = jax.local_devices(backend="cpu")
    if not matching:
        raise ParameterError(
            f"device: {device} was asked for, but this replica's jax sees only {platform} ({found[0].device_kind})",
            hint="give the stage a GPU (resources: gpus) and install jax[cuda12], or use device: auto",
        )
    return matching[0], device, f"asked for; it is {matching[0].device_kind}"
