"""`pipeline ui` and `pipeline down`: what runs in the background.

Owns their output. The one decision: `down` stops exactly what `pipeline run` started in this project and says so.
"""

from pathlib import Path

from rich.markup import escape

from pipeline.cli.place import find_place
from pipeline.cli.text import make_console, print_json
from pipeline.cli.trackers import default_tracking_uri
from pipeline.cluster.head import free_port, stop_head
from pipeline.tracking.mlflow_ui import serve_ui
from pipeline.tracking.redaction import scrub

UI_PORT = 5000


def ui(*, store: str | None, port: int | None, host: str) -> int:
    """Start MLflow's UI and stay until Ctrl-C."""
    place = find_place(start=Path.cwd(), store=store)
    uri = default_tracking_uri(place)
    console = make_console()
    place.state_directory.mkdir(parents=True, exist_ok=True)
    console.print(f"starting MLflow's UI on {escape(scrub(uri))}")
    return serve_ui(
        uri,
        host=host,
        port=port or free_port(start=UI_PORT),
        log_path=place.state_directory / "mlflow-ui.log",
        on_ready=lambda url: console.print(f"MLflow UI: {url} (Ctrl-C stops it)"),
    )


def down(*, store: str | None, as_json: bool) -> int:
    """Stop the local head, and with it every deployment on it."""
    place = find_place(start=Path.cwd(), store=store)
    head = stop_head(place.state_directory)
    if as_json:
        print_json({"stopped": head is not None, "address": head.address if head else None})
    elif head is None:
        make_console().print(f"nothing runs: no local head is noted in {escape(str(place.state_directory))}")
    else:
        make_console().print(f"stopped the local Ray head at {head.address} (process {head.pid}) and what it served")
    return 0
