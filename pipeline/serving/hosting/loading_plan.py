"""How one model will be loaded and served on this device, decided before a byte of its weights is read.

Owns the order of these choices: device and dtype, speed, slots and context. Knows nothing of Ray or HTTP. The one
decision: everything that can be judged from the description alone is judged here, so what cannot fit or would run
absurdly slowly is refused in a second and not after minutes of loading.
"""

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from pipeline.cluster.ledger import gib
from pipeline.errors import ParameterError
from pipeline.models.checkpoint import load_model
from pipeline.models.decoders.config import DecoderConfig
from pipeline.models.decoders.model import Decoder
from pipeline.models.decoders.partition import widened
from pipeline.models.decoders.quantized import quantize_projections
from pipeline.models.description import ModelDescription
from pipeline.models.family import FamilyModel
from pipeline.models.packed.modules import choose_products
from pipeline.models.placement import Layout
from pipeline.models.registry import describe
from pipeline.serving.accelerator.bandwidth import SLOW_TOKENS_PER_SECOND, Speed, bandwidth_of, check_speed, speed_of
from pipeline.serving.accelerator.cache_budget import MOST_SLOTS, Budget, CacheFit, Wish, fit_cache
from pipeline.serving.accelerator.device import Placement, allocator_room, choose_placement
from pipeline.serving.accelerator.host_memory import available_bytes
from pipeline.serving.accelerator.memory import RUNTIME_BYTES
from pipeline.serving.accelerator.replica_environment import STATE
from pipeline.serving.accelerator.weight_bytes import BYTES_OF, INT8, step_bytes, weights_bytes
from pipeline.serving.engine.buckets import Buckets
from pipeline.serving.engine.scheduler import Limits
from pipeline.serving.engine.temporaries import largest_temporaries
from pipeline.serving.replica_settings import ReplicaSettings


@dataclass(frozen=True, kw_only=True)
class LoadingPlan:
    """What was decided for one model."""

    settings: ReplicaSettings
    """With slots and context, whatever the flow left open."""
    description: ModelDescription
    device: Any
    """Of jax."""
    placement: Placement
    facts: Mapping[str, Any]
    """For `/health`."""

    def load(self, directory: Path, *, layout: Layout | None = None) -> nnx.Module:
        """The module of `directory`, in the planned dtype; int8 is made leaf by leaf as the leaves are read.

        Raises:
            ArtifactError: the directory is damaged, or does not hold what its description says.
        """
        return load_as(self.placement, directory, layout=layout)


def load_as(placement: Placement, directory: Path, *, layout: Layout | None = None) -> nnx.Module:
    """A model directory in a chosen dtype, on jax's default device or in a layout.

    Raises:
        ArtifactError: as `load_model`.
    """
    if placement.dtype == INT8:
        return load_model(directory, dtype=placement.compute_dtype, layout=layout, prepared=_quantized)
    return load_model(directory, dtype=placement.compute_dtype, layout=layout)


def plan_loading(settings: ReplicaSettings, *, environment: Mapping[str, str] = os.environ) -> LoadingPlan:
    """Decide how the model of `settings` is served in this process.

    Raises:
        ArtifactError: the directory describes no model.
        ParameterError: the device or the dtype is not to be had, the model does not fit, or it would be too slow.
    """
    directory = Path(settings.model_path)
    description = describe(directory)
    parsed = description.parsed if isinstance(description, FamilyModel) else None
    config = parsed if isinstance(parsed, DecoderConfig) else None
    # A model that is divided over devices is not served in int8, and need not fit on one of them.
    judged = config if settings.mesh_tensor == 1 else None
    device, placement = choose_placement(device=settings.device, dtype=settings.dtype, config=judged)
    speed = _speed(description, config, device=device, placement=placement, environment=environment, settings=settings)
    warnings = placement.warnings + check_speed(speed, floor=settings.min_tokens_per_second)
    facts: dict[str, Any] = {
        "device": placement.device,
        "device_reason": placement.device_reason,
        "dtype": placement.dtype,
        "dtype_reason": placement.dtype_reason,
        "products_reason": choose_products(
            platform=device.platform, dtype=placement.dtype, num_devices=settings.mesh_tensor
        ).reason,
        "estimated_per_second": round(speed.per_second, 3),
        "estimate_reason": speed.reason,
    }
    if config is not None:
        fit, num_bytes, tight = _fit(settings, config, description=description, device=device, placement=placement)
        settings = replace(settings, slots=fit.slots, context=fit.context)
        facts |= {"slots": fit.slots, "memory_reason": fit.reason, "weight_bytes": num_bytes}
        warnings += tight
    return LoadingPlan(
        settings=settings,
        description=description,
        device=device,
        placement=placement,
        facts={**facts, "warnings": list(warnings)},
    )


def _speed(
    description: ModelDescription,
    config: DecoderConfig | None,
    *,
    device: Any,
    placement: Placement,
    environment: Mapping[str, str],
    settings: ReplicaSettings,
) -> Speed:
    state = environment.get(STATE)
    directory = None if state is None else Path(state)
    if config is None:
        size = BYTES_OF[placement.compute_dtype]
        num_bytes = sum(leaf.size * size for leaf in jax.tree.leaves(nnx.state(description.abstract())))
        unit = "forward passes"
    else:
        num_bytes = step_bytes(config, dtype=placement.dtype, device=placement.device)
        num_bytes //= settings.mesh.hosts if placement.device == "cpu" else settings.mesh.tensor
        unit = "tokens"
    speed = speed_of(num_bytes, bandwidth=bandwidth_of(device, directory=directory), unit=unit)
    if speed.per_second >= max(settings.min_tokens_per_second, SLOW_TOKENS_PER_SECOND):
        return speed
    # Nothing is refused or warned of for a figure that was taken while the machine was busy.
    return speed_of(num_bytes, bandwidth=bandwidth_of(device, directory=directory, again=True), unit=unit)


def _fit(
    settings: ReplicaSettings,
    config: DecoderConfig,
    *,
    description: ModelDescription,
    device: Any,
    placement: Placement,
) -> tuple[CacheFit, int, tuple[str, ...]]:
    """What fits, bytes of the weights, and warnings."""
    longest = config.longest_context
    if settings.context is not None and settings.context > longest:
        raise ParameterError(
            f"max_context_tokens is {settings.context}, but the model can be served with {longest} positions",
            hint=f"use at most {longest}",
        )
    limit, source = memory_limit(device, part=settings.memory_part)
    size = BYTES_OF[placement.compute_dtype]
    mesh = settings.mesh
    # Of one memory: devices of a processor share the host's, a GPU has its own.
    copies, parts = (mesh.data, mesh.hosts) if placement.device == "cpu" else (1, mesh.tensor)
    cache_numbers = widened(config, tensor=mesh.tensor).num_cache_numbers(slots=1, positions=1)
    budget = Budget(
        limit=limit,
        source=source,
        weights=weights_bytes(config, dtype=placement.dtype, device=placement.device) * copies // parts,
        bytes_per_token=-(-cache_numbers * size * copies // (parts * mesh.data)),
    )
    wish = Wish(
        slots=settings.slots,
        context=settings.context,
        longest_context=longest,
        most_slots=MOST_SLOTS["cpu" if placement.device == "cpu" else "gpu"],
        multiple=settings.mesh_data,
    )
    temporaries = _temporaries(settings, description, device, placement)
    if settings.slots is not None and settings.context is not None:
        return fit_cache(wish, budget=budget, temporaries=temporaries), budget.weights, ()
    # A version that is swapped in lies beside the one that serves until it takes over.
    roomy = replace(
        budget,
        limit=budget.limit - budget.weights,
        source=f"{budget.source}, less {gib(budget.weights)} for the parameters of a next version",
    )
    try:
        return fit_cache(wish, budget=roomy, temporaries=temporaries), budget.weights, ()
    except ParameterError:
        tight = "memory has no room for the parameters of a next version: it will need a process of its own to start in"
        return fit_cache(wish, budget=budget, temporaries=temporaries), budget.weights, (tight,)


def _temporaries(
    settings: ReplicaSettings, description: ModelDescription, device: Any, placement: Placement
) -> Callable[[int, int], int]:
    @functools.cache
    def measured(slots: int, context: int) -> int:
        model = description.abstract()
        model = _quantized(model) if placement.dtype == INT8 else model
        assert isinstance(model, Decoder)
        limits = limits_of(settings, slots=slots, context=context)
        return largest_temporaries(
            model,
            limits=limits,
            buckets=Buckets.for_limits(slots=slots, context=context, chunk_tokens=limits.chunk_tokens),
            device=device,
            dtype=placement.compute_dtype,
        )

    return measured


def limits_of(settings: ReplicaSettings, *, slots: int, context: int) -> Limits:
    """What the engine is held to."""
    return Limits(
        slots=slots,
        context=context,
        chunk_tokens=min(settings.prefill_chunk_tokens, context),
        decode_steps=settings.decode_steps,
        prefix_granularity=settings.prefix_cache_tokens,
        is_deterministic=settings.deterministic,
        max_logprobs=settings.max_logprobs,
    )


def memory_limit(device: Any, *, part: float) -> tuple[int, str]:
    """Bytes that this process may take for one more model, and whose limit that is.

    `part` is the model's of the process's memory where it shares the process; on a CPU nothing is divided beforehand.
    """
    room = allocator_room(device)
    if room is not None:
        own = int(part * int(device.memory_stats()["bytes_limit"]))
        if own < room:
            return own, f"{part:.2f} of the limit of this process's allocator, for it serves several models"
        return room, "what this process's allocator may still take"
    available = available_bytes()
    return max(0, available - RUNTIME_BYTES), f"available memory less {gib(RUNTIME_BYTES)} for the process"


def _quantized(model: nnx.Module) -> nnx.Module:
    assert isinstance(model, Decoder)
    return quantize_projections(model)
