"""The parameters of `train.fsdp` that say how a model is cut over ranks: `mesh`.

Owns names, types, defaults and ranges. Knows nothing of meshes. The one decision: none of them is identity, because a
step is the same step however its products are spread.
"""

from typing import Literal

from pydantic import Field

from pipeline.stages.parameter_fields import Parameters


class MeshParameters(Parameters):
    """`mesh` of `train.fsdp`: axes that cut the model itself."""

    tensor: int = Field(
        default=1,
        ge=1,
        description="Ranks of one node that compute each block together; it divides heads, widths and vocabulary.",
    )
    context: int = Field(default=1, ge=1, description="Ranks that hold each row together; twice of it divides the row.")
    pipeline: int = Field(default=1, ge=1, description="Ranks that hold consecutive blocks.")
    schedule: Literal["1f1b", "gpipe", "interleaved"] = Field(
        default="1f1b",
        description="Order of micro-batches in a pipeline: 1f1b keeps at most one of each stage, gpipe all of a step, "
        "interleaved has two stages a rank and waits less.",
    )
