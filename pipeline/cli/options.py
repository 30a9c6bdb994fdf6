"""Arguments and options that several verbs have, with their help.

Owns their spelling. The one decision: what means the same has the same name and the same words everywhere.
"""

from pathlib import Path
from typing import Annotated

import typer

Flow = Annotated[Path, typer.Argument(help="The flow: a YAML file.", show_default=False)]
Run = Annotated[str, typer.Argument(help="A run id, a unique part of one, or `latest`.")]
Source = Annotated[
    str, typer.Argument(help="A checkpoint: a path, an fsspec URL or models:/name@alias.", show_default=False)
]
Params = Annotated[
    list[str] | None, typer.Option("--param", "-P", help="NAME=VALUE, converted by the flow's schema; repeatable.")
]
StoreOption = Annotated[
    str | None, typer.Option("--store", help="Path or fsspec URL of the store; `.pipeline/` in the project by default.")
]
Address = Annotated[str | None, typer.Option("--address", help="host:port of an existing Ray cluster.")]
Cluster = Annotated[Path | None, typer.Option("--cluster", help="A cluster file, see configs/clusters/.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Deployment = Annotated[str, typer.Argument(help="Name of the deployment.", show_default=False)]
Reason = Annotated[str, typer.Option("--reason", help="Why; kept with the event.", show_default=False)]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show Ray's own messages and tracebacks.")]
Ephemeral = Annotated[bool, typer.Option("--ephemeral", help="Stop everything at the end, the endpoint too.")]
Force = Annotated[list[str] | None, typer.Option("--force", help="Run this stage even if it could be reused.")]
NoTracking = Annotated[bool, typer.Option("--no-tracking", help="Do not talk to MLflow.")]
