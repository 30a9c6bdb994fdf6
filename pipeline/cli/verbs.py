"""Which code each verb of the command line is.

Owns that table. The one decision: a verb's code is a dotted string that is loaded when the verb is called, so that
`--help` loads no framework and answers at once.
"""

import importlib
import sys
from collections.abc import Mapping
from typing import Any

import typer

from pipeline.errors import Interrupted

VERBS: Mapping[str, str] = {
    "run": "pipeline.cli.run:run",
    "rerun": "pipeline.cli.run:rerun",
    "plan": "pipeline.cli.plan:plan",
    "validate": "pipeline.cli.plan:validate",
    "schema": "pipeline.cli.plan:schema",
    "runs": "pipeline.cli.runs:runs",
    "show": "pipeline.cli.runs:show",
    "logs": "pipeline.cli.runs:logs",
    "ui": "pipeline.cli.services:ui",
    "down": "pipeline.cli.services:down",
    "deployments": "pipeline.cli.deployments:deployments",
    "promote": "pipeline.cli.deployments:promote",
    "rollback": "pipeline.cli.deployments:rollback",
    "convert": "pipeline.cli.conversion:convert",
    "diff": "pipeline.cli.agreement:diff",
    "parity": "pipeline.cli.agreement:parity",
    "verify-resume": "pipeline.cli.verify_resume:run",
    "estimate": "pipeline.cli.estimate:run",
    "bench": "pipeline.cli.bench:bench",
}


def call(verb: str, **arguments: Any) -> None:
    """Load and run a verb, and end with its exit code."""
    module, _, name = VERBS[verb].partition(":")
    try:
        code = getattr(importlib.import_module(module), name)(**arguments)
    except KeyboardInterrupt:  # typer would end without a word
        raise Interrupted("interrupted") from None
    raise typer.Exit(code or 0)


def explain_click(error: Exception) -> int:
    """Show an error of the command line itself; its exit code. Raises what is none."""
    show = getattr(error, "show", None)
    if show is None:
        raise error
    show()
    return int(getattr(error, "exit_code", 2))


def complain(text: str) -> None:
    """Say what went wrong, on standard error."""
    sys.stderr.write(f"error: {text}\n")
