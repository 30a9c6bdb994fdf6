"""What each precision means, and which device computes it.

Owns the table of precisions, the mixed precision policy of each, and refusing what a device cannot do. Knows nothing of
models. The one decision: parameters, gradients and the optimizer are float32 in every precision and reductions are made
in it, so a precision is the dtype that products are computed in and nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from pipeline.errors import ParameterError
from pipeline.training.config import Precision

Capability = tuple[int, int]
"""CUDA compute capability: major, minor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionSupport:
    """One row of the table."""

    gathered: torch.dtype | None
    """What parameters are sent and computed in; None where that is what they are."""
    not_on_cpu: str | None
    """Why a CPU over gloo does not train in it; None where it does."""
    smallest_capability: Capability
    """Of a GPU."""
    scales_loss: bool = False
    """True where small gradients would become zero in it."""


SUPPORT: Mapping[Precision, PrecisionSupport] = {
    "float32": PrecisionSupport(gathered=None, not_on_cpu=None, smallest_capability=(0, 0)),
    "bfloat16": PrecisionSupport(
        gathered=torch.bfloat16,
        not_on_cpu="gloo does not reduce bfloat16 and CPU matrix products in it are slower",
        smallest_capability=(8, 0),
    ),
    # Every operator of the Llama family and every gloo collective that FSDP uses has a float16 form on the CPU: tested.
    "float16": PrecisionSupport(gathered=torch.float16, not_on_cpu=None, smallest_capability=(5, 3), scales_loss=True),
    "float8": PrecisionSupport(
        gathered=torch.bfloat16,
        not_on_cpu="no CPU multiplies float8 matrices",
        smallest_capability=(8, 9),
    ),
}
"""Capabilities: NVIDIA CUDA C++ programming guide, table of features by compute capability."""


def check_precision(
    precision: Precision, *, device: Literal["cpu", "cuda"], capability: Capability | None = None
) -> None:
    """Refuse what the device cannot compute.

    Args:
        precision: of the run.
        device: of the ranks.
        capability: of this rank's GPU; None where it is not known here, and for CPUs.

    Raises:
        ParameterError: the device does not compute in it; says which do.
    """
    row = SUPPORT[precision]
    if device == "cpu" and row.not_on_cpu is not None:
        others = " or ".join(name for name, other in SUPPORT.items() if other.not_on_cpu is None)
        raise ParameterError(
            f"precision: {precision} needs CUDA; {row.not_on_cpu}",
            hint=f"set `precision: {others}`, or train on a GPU",
        )
    if device == "cuda" and capability is not None and capability < row.smallest_capability:
        wanted, found = (".".join(map(str, each)) for each in (row.smallest_capability, capability))
        others = " or ".join(name for name, other in SUPPORT.items() if other.smallest_capability <= capability)
        raise ParameterError(
            f"precision: {precision} needs a GPU of compute capability {wanted} or more; this one has {found}",
            hint=f"set `precision: {others}`",
        )


def capability_of(device: torch.device) -> Capability | None:
    """Compute capability of this rank's GPU; None for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def mixed_precision(precision: Precision) -> MixedPrecisionPolicy:
    """FSDP's policy: parameters cast before they are gathered, gradients reduced in float32."""
    gathered = SUPPORT[precision].gathered
    return (
        MixedPrecisionPolicy()
        if gathered is None
        else MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=torch.float32)
    )
