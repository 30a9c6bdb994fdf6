"""`python -m pipeline.training JOB.yaml`: one rank of a training without Ray.

torchrun --nproc-per-node 2 -m pipeline.training job.yaml
srun --ntasks 8 python -m pipeline.training job.yaml
"""

import argparse
import importlib
import os
import sys
from pathlib import Path

from pipeline.errors import PipelineError
from pipeline.training.launch.launched import run_job

READER = "converters.starting_weights:open_weights"
"""What reads the weights of `initial`; a dotted string, because training takes a reader as a value and imports none."""


def main() -> int:
    """Exit code 0, or that of the error's class; rank 0's reports are lines of JSON on standard output."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.training", description=__doc__)
    parser.add_argument("job", type=Path, help="YAML with dataset, workspace and the fields of train.fsdp")
    given = parser.parse_args()
    module, _, name = READER.partition(":")
    reader = getattr(importlib.import_module(module), name)
    try:
        run_job(given.job, environment=os.environ, stream=sys.stdout, open_weights=reader)
    except PipelineError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
