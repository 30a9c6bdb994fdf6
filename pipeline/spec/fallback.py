"""A hop of `fallback:` laid over the stage it belongs to.

Owns which keys a hop changes and how. Knows nothing of stage kinds. The one decision: a hop changes the stage as it is
written, not the hop before it, so each can be read by itself; keys of `with` and `resources` are replaced one by one.
"""

from pipeline.spec.tree import Entry, MapNode

_MERGED = ("with", "resources")
_REPLACED = ("timeout_seconds",)


def overlaid(stage: MapNode, hop: MapNode) -> MapNode:
    """The stage's mapping with what the hop says, and without `fallback`."""
    entries = {entry.name: entry for entry in stage.entries if entry.name != "fallback"}
    for entry in hop.entries:
        if entry.name in _REPLACED:
            entries[entry.name] = entry
        elif entry.name in _MERGED and isinstance(entry.value, MapNode):
            entries[entry.name] = _merged(entries.get(entry.name), entry)
    return MapNode(entries=tuple(entries.values()), position=stage.position)


def why_no_hop(hop: MapNode, *, is_last: bool) -> str | None:
    """What is wrong with a hop as a whole, or None."""
    empty = [
        entry.name
        for entry in hop.entries
        if entry.name in _MERGED and not (isinstance(entry.value, MapNode) and entry.value.entries)
    ]
    if empty:
        return f"{', '.join(empty)} of a hop says what changes, as a mapping"
    names = {entry.name for entry in hop.entries}
    changes = names & {*_MERGED, *_REPLACED}
    if "keep" in names and changes:
        return f"a hop that keeps what is there changes nothing; it has {', '.join(sorted(changes))} too"
    if "keep" in names and not is_last:
        return "a hop that keeps what is there always works; it is the last one"
    if "keep" not in names and not changes:
        return f"a hop changes something: {', '.join((*_MERGED, *_REPLACED))}, or keep"
    return None


def _merged(before: Entry | None, hop: Entry) -> Entry:
    if before is None or not isinstance(before.value, MapNode) or not isinstance(hop.value, MapNode):
        return hop
    values = {entry.name: entry for entry in before.value.entries} | {entry.name: entry for entry in hop.value.entries}
    return Entry(
        name=before.name,
        position=before.position,
        value=MapNode(entries=tuple(values.values()), position=before.value.position),
    )
