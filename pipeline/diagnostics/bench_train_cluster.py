"""The rows on Ray: start of a gang, and recovery of one.

Owns the Ray head of the bench, which lives as long as these rows. The one decision: what imports Ray is loaded after
the head is up, because Ray reads the head's token when it is imported.
"""

import importlib
import os
from collections.abc import Callable

from pipeline.cluster.head import start_head, stop_head
from pipeline.cluster.serve_environment import serve_environment
from pipeline.diagnostics.bench_train_material import Material, Measured
from pipeline.diagnostics.bench_train_recovery import FAILPOINT
from pipeline.training.faults.failpoints import VARIABLE

_ON_RAY = "pipeline.diagnostics.ray_bench_train:measure"
_NUM_CPUS = 4


def measure(material: Material) -> Measured:
    """Start a head, measure on it, end it."""
    directory = material.work / "head"
    head = start_head(
        directory,
        num_cpus=_NUM_CPUS,
        # What starts with the head has its variables: ranks meet the failpoint at a step that only one row reaches.
        environment=lambda private: serve_environment(directory=private) | {VARIABLE: FAILPOINT},
        die_with_parent=True,
    )
    try:
        os.environ.update(head.client_environment)
        module, _, name = _ON_RAY.partition(":")
        on_ray: Callable[..., Measured] = getattr(importlib.import_module(module), name)
        return on_ray(material, address=head.address)
    finally:
        stop_head(directory)
