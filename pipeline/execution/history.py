"""Runs of the past, and the truth about those whose driver died.

Owns the reaping of dead runs. The one decision: every verb that shows runs reaps first: a run that says RUNNING and
whose lease nobody holds is CRASHED, and that is written down once.
"""

from collections.abc import Callable

from pipeline.artifacts.store import Store
from pipeline.errors import UsageError
from pipeline.execution.journal import Journal, list_runs, read_run
from pipeline.execution.leases import Leases
from pipeline.tracking.view import RunStatus, RunView

CRASH_MESSAGE = "the process that ran it died; `pipeline rerun` takes it up from what was committed"


def load_runs(
    store: Store, *, leases: Leases, now: float, on_crash: Callable[[RunView], None], limit: int | None = None
) -> list[RunView]:
    """All runs, newest first; dead ones are marked CRASHED and told to `on_crash` once."""
    ids = list(reversed(list_runs(store)))[:limit]
    return [load_run(store, run_id, leases=leases, now=now, on_crash=on_crash, series=False) for run_id in ids]


def load_run(
    store: Store, run_id: str, *, leases: Leases, now: float, on_crash: Callable[[RunView], None], series: bool
) -> RunView:
    """One run; `run_id` may be a unique beginning or end of an id, or `latest`.

    Raises:
        UsageError: no run, or several, match.
    """
    found = match_run(store, run_id)
    view = read_run(store, found, series=series)
    if view.status is not RunStatus.RUNNING:
        return view
    lease = leases.newest(f"runs/{found}")
    if lease is not None and lease.is_held(now=now):
        return view
    Journal(store, found).run_event(RunStatus.CRASHED, time=now, error=CRASH_MESSAGE)
    view = read_run(store, found, series=series)
    on_crash(view)
    return view


def match_run(store: Store, text: str) -> str:
    """The id that `text` means."""
    ids = list_runs(store)
    if text == "latest" and ids:
        return ids[-1]
    matches = [run_id for run_id in ids if run_id == text] or [
        run_id for run_id in ids if run_id.startswith(text) or run_id.endswith(text)
    ]
    if len(matches) == 1:
        return matches[0]
    known = ", ".join((matches or ids)[-5:]) or "none yet"
    found = f"{len(matches)} runs match" if matches else "no run matches"
    raise UsageError(
        f"{found} {text!r}; {'they are' if matches else 'the newest are'}: {known}", hint="see `pipeline runs`"
    )
