"""Places for the nodes of a directed graph, layered from left to right.

Owns layers, order and positions. Knows nothing of stages or pictures. The one decision: the simple form of Sugiyama's
method (longest-path layers, dummy nodes for long edges, barycenter order, least-squares rows), which keeps a chain on
a straight line and is enough for some dozens of nodes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SWEEPS = 12
BEND_PULL = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """A node's place: `layer` counts from 0, `row` is its centre in units of the caller's row height."""

    layer: int
    row: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Edge:
    """`source` to `target` through `bends`, one for every layer between; `implied` where a longer way says the same."""

    source: str
    target: str
    bends: tuple[Placement, ...]
    implied: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Everything placed; rows start at 0."""

    nodes: Mapping[str, Placement]
    edges: tuple[Edge, ...]
    num_layers: int
    num_rows: float


def lay_out(needs: Mapping[str, Sequence[str]], *, bend_height: float = 0.35) -> Layout:
    """Place every node of `needs` (node to what it depends on).

    Names that are no nodes are left out, and so is an edge that closes a cycle.

    Args:
        needs: in the order in which nodes should be listed where nothing else decides.
        bend_height: room for a long edge beside a node, in row heights.
    """
    kept = _acyclic(needs)
    layer = dict.fromkeys(needs, 0)
    for name in _topological(kept):
        layer[name] = max((layer[parent] + 1 for parent in kept[name]), default=0)
    columns: list[list[str]] = [[] for _ in range(max(layer.values(), default=-1) + 1)]
    for name in needs:
        columns[layer[name]].append(name)
    links: dict[str, list[str]] = {name: [] for name in needs}
    bends: dict[tuple[str, str], list[str]] = {}
    for name, parents in kept.items():
        for parent in parents:
            chain = [f"{parent}\0{name}\0{index}" for index in range(layer[parent] + 1, layer[name])]
            bends[parent, name] = chain
            for index, bend in enumerate(chain, start=layer[parent] + 1):
                columns[index].append(bend)
                links[bend] = []
            for left, right in zip([parent, *chain], [*chain, name], strict=True):
                links[right].append(left)
    size = {bend: bend_height for chain in bends.values() for bend in chain}
    _order(columns, links)
    row = _rows(columns, links, size)
    top = min((row[name] - size.get(name, 1.0) / 2 for name in row), default=0.0)
    places = {
        name: Placement(layer=index, row=row[name] - top) for index, column in enumerate(columns) for name in column
    }
    edges = tuple(
        Edge(source=a, target=b, bends=tuple(places[bend] for bend in chain), implied=_is_implied(kept, a, b))
        for (a, b), chain in bends.items()
    )
    height = max((places[name].row + size.get(name, 1.0) / 2 for name in places), default=0.0)
    return Layout(nodes={name: places[name] for name in needs}, edges=edges, num_layers=len(columns), num_rows=height)


def _acyclic(needs: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    kept: dict[str, list[str]] = {name: [] for name in needs}
    for name, parents in needs.items():
        for parent in dict.fromkeys(parents):
            if parent in needs and parent != name and not _reaches(kept, parent, name):
                kept[name].append(parent)
    return kept


def _reaches(needs: Mapping[str, Sequence[str]], start: str, goal: str) -> bool:
    """True where `start` depends on `goal`."""
    waiting, seen = [start], set[str]()
    while waiting:
        name = waiting.pop()
        if name == goal:
            return True
        if name not in seen:
            seen.add(name)
            waiting.extend(needs[name])
    return False


def _is_implied(needs: Mapping[str, Sequence[str]], source: str, target: str) -> bool:
    return any(_reaches(needs, parent, source) for parent in needs[target] if parent != source)


def _topological(needs: Mapping[str, Sequence[str]]) -> list[str]:
    done: dict[str, None] = {}
    waiting = list(needs)
    while waiting:
        ready = [name for name in waiting if all(parent in done for parent in needs[name])]
        done |= dict.fromkeys(ready)
        waiting = [name for name in waiting if name not in done]
    return list(done)


def _order(columns: list[list[str]], links: Mapping[str, list[str]]) -> None:
    """Sort each column by the mean place of its neighbours, alternately from the left and from the right."""
    forward = {name: list(parents) for name, parents in links.items()}
    backward: dict[str, list[str]] = {name: [] for name in links}
    for name, parents in links.items():
        for parent in parents:
            backward[parent].append(name)
    for sweep in range(SWEEPS):
        neighbours = forward if sweep % 2 == 0 else backward
        for column in columns if sweep % 2 == 0 else reversed(columns):
            place = {name: index for other in columns for index, name in enumerate(other)}
            keys = {
                name: sum(place[n] for n in neighbours[name]) / len(neighbours[name])
                if neighbours[name]
                else float(place[name])
                for name in column
            }
            column.sort(key=lambda name: (keys[name], "\0" in name))


def _rows(columns: list[list[str]], links: Mapping[str, list[str]], size: Mapping[str, float]) -> dict[str, float]:
    """Centres that keep the order and the distances and are otherwise as near to the neighbours as can be."""
    neighbours: dict[str, list[str]] = {name: list(parents) for name, parents in links.items()}
    for name, parents in links.items():
        for parent in parents:
            neighbours[parent].append(name)
    row: dict[str, float] = {}
    for column in columns:
        total = sum(size.get(name, 1.0) for name in column)
        at = -total / 2
        for name in column:
            row[name] = at + size.get(name, 1.0) / 2
            at += size.get(name, 1.0)
    for sweep in range(2 * SWEEPS):
        for column in columns if sweep % 2 == 0 else reversed(columns):
            wanted = [_weighted(name, neighbours[name], row) for name in column]
            row |= zip(column, _separate(column, wanted, size), strict=True)
    return row


def _weighted(name: str, neighbours: Sequence[str], row: Mapping[str, float]) -> float:
    """Mean of the neighbours' rows; real nodes pull harder than bends, so that a chain stays straight."""
    if not neighbours:
        return row[name]
    weights = [BEND_PULL if "\0" in neighbour else 1.0 for neighbour in neighbours]
    return sum(w * row[n] for w, n in zip(weights, neighbours, strict=True)) / sum(weights)


def _separate(column: Sequence[str], wanted: Sequence[float], size: Mapping[str, float]) -> list[float]:
    """The positions nearest to `wanted` (weighted least squares) that do not overlap: pool adjacent violators."""
    offsets, at = [], 0.0
    for index, name in enumerate(column):
        if index:
            at += (size.get(column[index - 1], 1.0) + size.get(name, 1.0)) / 2
        offsets.append(at)
    pools: list[tuple[float, float, int]] = []
    for name, value in zip(column, (w - o for w, o in zip(wanted, offsets, strict=True)), strict=True):
        mean, weight, count = value, BEND_PULL if "\0" in name else 1.0, 1
        while pools and pools[-1][0] > mean:
            before, heavy, number = pools.pop()
            mean = (before * heavy + mean * weight) / (heavy + weight)
            weight, count = heavy + weight, number + count
        pools.append((mean, weight, count))
    flat = [mean for mean, _, count in pools for _ in range(count)]
    return [value + offset for value, offset in zip(flat, offsets, strict=True)]
