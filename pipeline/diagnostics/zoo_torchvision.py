"""torchvision's classifiers, where torchvision is installed.

Owns their names and how they are built. Knows nothing of tracing. The one decision: where torchvision does not import
beside this torch there is one row that says so, for a missing package is no pass.
"""

import importlib
from collections.abc import Iterator
from typing import Any

import torch

from pipeline.diagnostics.trace_zoo import BuildError, ZooModel
from pipeline.diagnostics.zoo_random import randomize

GROUP = "torchvision"
ABSENT = "torchvision"
"""The name of the one row where the package is missing or does not import."""
BATCH = 3
IMAGE_SIZE = 75
"""The least that Inception takes; the transformers get what their patches divide."""
_FIXED_SIZES = {"vit": 224, "swin": 64, "maxvit": 224}


def names() -> Iterator[tuple[str, str]]:
    """Name and group of every classifier."""
    try:
        models = _models()
    except BuildError:
        yield ABSENT, GROUP
        return
    for name in models.list_models(module=models):
        yield f"{GROUP}:{name}", GROUP


def build(name: str) -> ZooModel:
    """Build one, with every parameter and statistic random.

    Raises:
        BuildError: torchvision is missing or does not import beside this torch.
    """
    models = _models()
    torch.manual_seed(0)
    kind = name.partition(":")[2]
    module = models.get_model(kind, weights=None).eval()
    randomize(module)
    size = next((size for prefix, size in _FIXED_SIZES.items() if kind.startswith(prefix)), IMAGE_SIZE)
    return ZooModel(module=module, inputs={"x": torch.randn(BATCH, 3, size, size)})


def _models() -> Any:
    try:
        return importlib.import_module("torchvision.models")
    except (ImportError, RuntimeError) as error:
        raise BuildError(f"torchvision does not import beside torch {torch.__version__}: {error}") from error
