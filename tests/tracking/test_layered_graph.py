from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.tracking.layered_graph import lay_out

CHAIN_TOLERANCE_ROWS = 0.1
"""Long edges beside a chain pull it a little: at most 0.05 rows (4 pixels) in the README's flow."""


@st.composite
def graphs(draw):
    size = draw(st.integers(0, 14))
    return {f"n{i}": [f"n{j}" for j in range(i) if draw(st.integers(0, 3)) == 0] for i in range(size)}


@given(graphs())
def test_edges_go_right_and_nodes_do_not_overlap(needs):
    layout = lay_out(needs)
    for edge in layout.edges:
        assert layout.nodes[edge.source].layer < layout.nodes[edge.target].layer
        assert len(edge.bends) == layout.nodes[edge.target].layer - layout.nodes[edge.source].layer - 1
    for layer in range(layout.num_layers):
        rows = sorted(place.row for place in layout.nodes.values() if place.layer == layer)
        assert all(b - a >= 1 - 1e-6 for a, b in pairwise(rows))
    assert all(0.5 - 1e-6 <= place.row <= layout.num_rows - 0.5 + 1e-6 for place in layout.nodes.values())


def test_a_chain_stays_on_one_line():
    layout = lay_out({"a": [], "b": ["a"], "c": ["b", "a"], "d": ["c", "a"]})
    rows = [place.row for place in layout.nodes.values()]
    assert max(rows) - min(rows) < CHAIN_TOLERANCE_ROWS


def test_an_edge_that_a_longer_way_implies_is_marked():
    layout = lay_out({"a": [], "b": ["a"], "c": ["a", "b"]})
    assert {(edge.source, edge.target): edge.implied for edge in layout.edges} == {
        ("a", "b"): False,
        ("b", "c"): False,
        ("a", "c"): True,
    }


@pytest.mark.parametrize("needs", [{}, {"a": ["a"]}, {"a": ["b"], "b": ["a"]}, {"a": ["gone"]}])
def test_odd_graphs_are_placed_too(needs):
    assert set(lay_out(needs).nodes) == set(needs)
