"""Keeps torch and jax out of each other's processes.

Owns one check, made before and after a stage's code is loaded. The one decision: a process that has both frameworks
without being declared `both` is an error, not a warning; two allocators in one process fail late and strangely.
"""

import sys

from pipeline.errors import StageError
from pipeline.stages.registry import Framework

_FORBIDDEN = {
    Framework.NONE: ("torch", "jax"),
    Framework.TORCH: ("jax",),
    Framework.JAX: ("torch",),
    Framework.BOTH: (),
}


def check_frameworks(framework: Framework, *, when: str) -> None:
    """Raise `StageError` where this process has loaded a framework the stage's kind does not declare."""
    loaded = [name for name in _FORBIDDEN[framework] if name in sys.modules]
    if loaded:
        raise StageError(
            f"{when} the stage, its process has loaded {' and '.join(loaded)}; its kind declares {framework.value!r}",
            hint="import the framework in the module that the stage's work lives in, or correct the kind's declaration",
        )
