"""Names match in full or not at all, and a rule runs backwards."""

import numpy as np
import pytest

from converters.operations import Reshape, Split, Transpose
from converters.rules import Rule, match, render


def test_template_matches_the_full_name_only():
    template = "layers.{layer}.mlp.{name:word}.weight"
    assert match(template, "layers.12.mlp.up.weight") == {"layer": "12", "name": "up"}
    assert match(template, "model.layers.12.mlp.up.weight") is None
    assert match(template, "layers.12.mlp.up.weight.extra") is None
    assert match(template, "layers.12.mlp.up.down.weight") is None
    assert match(template, "layersX12.mlp.up.weight") is None


@pytest.mark.parametrize("number", ["01", "-1", "1a", ""])
def test_layer_numbers_are_whole_and_plain(number):
    """`layers.01` and `layers.1` would be one leaf."""
    assert match("layers.{layer}.w", f"layers.{number}.w") is None


def test_capture_used_twice_must_agree():
    assert match("a.{i}.b.{i}", "a.3.b.3") == {"i": "3"}
    assert match("a.{i}.b.{i}", "a.3.b.4") is None


def test_render_is_the_inverse_of_match():
    captures = match("a.{i}.{w:word}", "a.7.q")
    assert render("b.{w:word}.{i}", captures) == "b.q.7"


def test_rule_with_a_lost_capture_is_refused():
    with pytest.raises(ValueError, match="same captures"):
        Rule.one("layers.{layer}.w", "w")


def fused_heads() -> Rule:
    """GPT-NeoX order, 2 heads of size 1: rows [q0, k0, v0, q1, k1, v1]."""
    return Rule(
        sources=("qkv",),
        targets=("q", "k", "v"),
        operations=(Reshape((6, 1), (2, 3, 1)), Transpose((1, 0, 2)), Reshape((3, 2, 1), (6, 1)), Split(0, (2, 2, 2))),
    )


def test_fused_heads_are_split_head_by_head_c1():
    rows = np.arange(6, dtype=np.float32)[:, None]
    q, k, v = fused_heads().apply([rows])
    assert (q.ravel().tolist(), k.ravel().tolist(), v.ravel().tolist()) == ([0, 3], [1, 4], [2, 5])


def test_rule_runs_backwards():
    rule = fused_heads()
    rows = np.arange(6, dtype=np.float32)[:, None]
    (back,) = rule.inverted().apply(rule.apply([rows]))
    assert (back == rows).all()
    assert rule.inverted().inverted() == rule
    assert rule.inverted().shapes([(2, 1)] * 3) == [(6, 1)]


def test_grouped_queries_are_split_by_group_c2():
    """4 query heads, 2 key-value heads: rows [q0, q1, k0, v0, q2, q3, k1, v1]."""
    rule = Rule(
        sources=("qkv",),
        targets=("q", "k", "v"),
        operations=(Reshape((8, 1), (2, 4, 1)), Split(1, (2, 1, 1))),
    )
    q, k, v = rule.apply([np.arange(8, dtype=np.float32)[:, None]])
    assert (q.ravel().tolist(), k.ravel().tolist(), v.ravel().tolist()) == ([0, 1, 4, 5], [2, 6], [3, 7])


def test_wrong_number_of_results_is_refused():
    rule = Rule(sources=("a",), targets=("b", "c"))
    with pytest.raises(ValueError, match="makes 1 tensors for 2 targets"):
        rule.shapes([(2,)])


def test_shape_complaint_names_the_operation():
    with pytest.raises(ValueError, match=r"Transpose\(axes=\(1, 0\)\): axes"):
        Rule.one("a", "b", Transpose((1, 0))).shapes([(2,)])
