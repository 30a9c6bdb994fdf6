"""Parameters of `train.fsdp` that say what is trained on top of weights that exist.

Owns their names, types, defaults and ranges. Knows nothing of how adapters work. The one decision: `enabled` is a
parameter of its own, so one flow trains with adapters or without by one value.
"""

from pydantic import Field

from pipeline.stages.parameter_fields import Parameters


class LoraParameters(Parameters):
    """Adapters of low rank beside linear layers (LoRA): they alone are trained, and merged at the end."""

    enabled: bool = Field(True, description="false trains all parameters, as without `lora`; for a parameter to say.")
    rank: int = Field(8, ge=1, description="Width of an adapter.")
    alpha: float = Field(16.0, gt=0.0, description="An adapter's output counts alpha / rank.")
    dropout: float = Field(0.0, ge=0.0, lt=1.0, description="Of an adapter's input, while training.")
    targets: list[str] = Field(
        default_factory=list,
        description="Ends of the names of the linear layers that get one, such as `q_proj`; all but the head when "
        "empty.",
    )
