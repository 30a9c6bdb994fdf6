"""Which operations a program may use, and what they are in JAX.

Owns the one registry. Knows nothing of programs. The one decision: an operation is one function with the arguments of
torch's schema, found by its overload's name; those that draw or call graphs are in tables of their own, because they
are given more.
"""

from collections.abc import Callable, Mapping
from typing import Any

from pipeline.models.traced.operations_activation import ACTIVATION
from pipeline.models.traced.operations_attention import ATTENTION
from pipeline.models.traced.operations_control import CONTROL
from pipeline.models.traced.operations_convolution import CONVOLUTION
from pipeline.models.traced.operations_creation import CREATION
from pipeline.models.traced.operations_fft import FFT
from pipeline.models.traced.operations_indexing import INDEXING
from pipeline.models.traced.operations_interpolation import INTERPOLATION
from pipeline.models.traced.operations_linear import LINEAR
from pipeline.models.traced.operations_loss import LOSS
from pipeline.models.traced.operations_normalization import NORMALIZATION
from pipeline.models.traced.operations_padding import PADDING
from pipeline.models.traced.operations_pointwise import POINTWISE
from pipeline.models.traced.operations_pooling import POOLING
from pipeline.models.traced.operations_random import RANDOM
from pipeline.models.traced.operations_recurrent import RECURRENT
from pipeline.models.traced.operations_reduction import REDUCTION
from pipeline.models.traced.operations_shape import SHAPE
from pipeline.models.traced.operations_sorting import SORTING
from pipeline.models.traced.operations_symbolic import SYMBOLIC

PURE: Mapping[str, Callable[..., Any]] = {
    **POINTWISE,
    **ACTIVATION,
    **CREATION,
    **REDUCTION,
    **SHAPE,
    **PADDING,
    **LINEAR,
    **CONVOLUTION,
    **POOLING,
    **NORMALIZATION,
    **INDEXING,
    **SORTING,
    **INTERPOLATION,
    **FFT,
    **LOSS,
    **SYMBOLIC,
}
"""Functions of their arguments."""
DRAWING: Mapping[str, Callable[..., Any]] = {**RANDOM, **RECURRENT, **ATTENTION}
"""Functions of `draw` and their arguments."""
CALLING: Mapping[str, Callable[..., Any]] = CONTROL
"""Functions of `call` and their arguments."""


def is_supported(operation: str) -> bool:
    """Whether a program may use it."""
    return operation in PURE or operation in DRAWING or operation in CALLING
