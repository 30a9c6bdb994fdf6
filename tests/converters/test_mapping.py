"""Nothing is left over on either side, and every complaint comes in one message."""

from dataclasses import replace

import numpy as np
import pytest

from converters.families.table import FamilyTable, Tie
from converters.mapping import plan_mapping, reverse_steps
from converters.operations import Concatenate, Transpose
from converters.rules import Rule, render
from converters.source import TensorHeader
from pipeline.errors import ConversionError

TABLE = FamilyTable(
    family="test",
    facts={},
    rules=(
        Rule.one("embed.weight", "embed.table"),
        Rule.one("layers.{layer}.up.weight", "layers.{layer}.up.kernel", Transpose((1, 0))),
        Rule(
            sources=("layers.{layer}.q", "layers.{layer}.k"),
            targets=("layers.{layer}.qk",),
            operations=(Concatenate(0, (2, 1)),),
        ),
    ),
    ignored=("layers.{layer}.inv_freq",),
    ties=(Tie(tensor="head.weight", same_as="embed.weight"),),
    hints={"layers.{layer}.up.kernel": "look at the config"},
)
TARGETS = {"embed.table": (5, 3), "layers.0.up.kernel": (3, 4), "layers.0.qk": (3, 2)}
GOOD = {"embed.weight": (5, 3), "layers.0.up.weight": (4, 3), "layers.0.q": (2, 2), "layers.0.k": (1, 2)}


def headers(shapes, **dtypes):
    return {
        name: TensorHeader(name=name, shape=shape, dtype=dtypes.get(name, "float32")) for name, shape in shapes.items()
    }


def plan(shapes, *, targets=TARGETS, dtype="keep", **dtypes):
    return plan_mapping(headers(shapes, **dtypes), table=TABLE, targets=targets, dtype=dtype)


def complaint(shapes, **given):
    with pytest.raises(ConversionError) as caught:
        plan(shapes, **given)
    return str(caught.value)


def test_everything_is_accounted_for():
    made = plan({**GOOD, "layers.0.inv_freq": (2,), "head.weight": (5, 3)})
    assert {target for step in made.steps for target in step.targets} == set(TARGETS)
    assert made.ignored == ("layers.0.inv_freq",)
    assert made.tied == {"head.weight": "embed.weight"}


def test_every_complaint_comes_at_once():
    text = complaint({"embed.weight": (6, 3), "layers.0.upp.weight": (4, 3), "layers.0.q": (2, 2), "extra": (1,)})
    assert "5 complaints" in text
    assert "embed.weight (6, 3) float32: gives embed.table the shape (6, 3), expected (5, 3)" in text
    assert "layers.0.upp.weight: no rule takes it and it is not ignored by name; found (4, 3) float32" in text
    assert "nearest rule: layers.{layer}.up.weight -> layers.{layer}.up.kernel" in text
    assert "layers.0.up.kernel: nothing fills it (shape (3, 4)); the checkpoint lacks layers.0.up.weight" in text
    assert "look at the config" in text
    assert "layers.0.qk: nothing fills it (shape (3, 2)); the checkpoint lacks layers.0.k" in text
    assert "extra: no rule takes it" in text


def test_layer_the_model_does_not_have_is_named():
    text = complaint({**GOOD, "layers.1.up.weight": (4, 3)})
    assert "would fill layers.1.up.kernel, which the model built from config.json does not have" in text


def test_leaf_no_rule_leads_to_is_named():
    assert "bias: nothing fills it (shape (3,)); no rule" in complaint(GOOD, targets={**TARGETS, "bias": (3,)})


def test_rank_that_does_not_fit_an_operation_is_named():
    assert "layers.0.up.weight (4, 3, 1) float32: Transpose" in complaint({**GOOD, "layers.0.up.weight": (4, 3, 1)})


def test_unknown_dtype_is_named_c14():
    text = complaint(GOOD, **{"embed.weight": "float8_e4m3fn"})
    assert "embed.weight: dtype float8_e4m3fn is none this converter reads; allowed: float32" in text


def test_joined_tensors_need_one_dtype():
    assert "tensors that are joined need one dtype" in complaint(GOOD, **{"layers.0.q": "bfloat16"})


def test_two_rules_for_one_tensor_are_an_error():
    table = FamilyTable(family="t", facts={}, rules=(Rule.one("a.{i}", "b.{i}"), Rule.one("a.{j}", "c.{j}")))
    with pytest.raises(ConversionError, match="several rules take it"):
        plan_mapping(headers({"a.0": (1,)}), table=table, targets={"b.0": (1,)}, dtype="keep")


def test_tied_tensor_of_another_shape_is_an_error():
    assert "head.weight: config.json ties it to embed.weight" in complaint({**GOOD, "head.weight": (4, 3)})


def test_dtype_policy_casts_and_records():
    steps = plan(GOOD, dtype="bfloat16", **{"embed.weight": "float16"}).steps
    cast = next(step.casts[0] for step in steps if step.targets == ("embed.table",))
    assert (cast.before, cast.after) == ("float16", "bfloat16")
    kept = plan(GOOD, **{"embed.weight": "float16"}).steps
    assert all(step.casts[0].before == step.casts[0].after for step in kept)


def found(leaves):
    return {path: (leaf.shape, str(leaf.dtype)) for path, leaf in leaves.items()}


def test_leaves_go_back():
    arrays = {name: np.random.default_rng(1).normal(size=shape).astype(np.float32) for name, shape in GOOD.items()}
    leaves = {}
    for step in plan(GOOD).steps:
        leaves.update(zip(step.targets, step.rule.apply([arrays[name] for name in step.sources]), strict=True))
    back = {}
    for rule, captures in reverse_steps(found(leaves), table=TABLE, targets=TARGETS):
        made = rule.apply([leaves[render(path, captures)] for path in rule.sources])
        back.update(zip((render(name, captures) for name in rule.targets), made, strict=True))
    assert back.keys() == arrays.keys()
    assert all((back[name] == arrays[name]).all() for name in arrays)


def test_leaves_that_do_not_fit_are_all_named():
    leaves = {"embed.table": np.zeros((5, 4), np.float32), "surplus": np.zeros(1, np.float32)}
    with pytest.raises(ConversionError) as caught:
        reverse_steps(found(leaves), table=TABLE, targets=TARGETS)
    text = str(caught.value)
    assert "embed.table: expected shape (5, 3), found (5, 4)" in text
    assert "layers.0.qk: expected shape (3, 2), found no leaf" in text
    assert "surplus: the model has no such leaf" in text


def test_checkpoint_of_the_base_model_has_the_prefix_less():
    table = FamilyTable(family="t", facts={}, rules=(Rule.one("model.{i}.w", "{i}.w"),), prefixes=("model.",))
    for stored in ("model.0.w", "0.w", "_orig_mod.0.w"):
        found = plan_mapping(headers({stored: (2,)}), table=table, targets={"0.w": (2,)}, dtype="keep")
        assert found.stored == {"model.0.w": stored}


def test_a_transposed_shape_is_called_so():
    text = complaint({**GOOD, "layers.0.up.weight": (3, 4)})
    assert "gives layers.0.up.kernel the shape (4, 3), expected (3, 4)" in text
    assert "it has the transposed shape" in text
    assert "transposed" not in complaint({**GOOD, "layers.0.up.weight": (4, 5)})


@pytest.mark.parametrize(
    ("rows", "advice"),
    [
        (7, "the checkpoint's vocabulary was padded by 2: set vocab_size to 7 in config.json, which keeps every row"),
        (4, "the checkpoint's vocabulary is shorter: set vocab_size to 4 in config.json if that is right"),
    ],
)
def test_a_padded_vocabulary_is_explained(rows, advice):
    table = replace(TABLE, facts={"vocab_size": 5}, ties=())
    with pytest.raises(ConversionError) as caught:
        plan_mapping(headers({**GOOD, "embed.weight": (rows, 3)}), table=table, targets=TARGETS, dtype="keep")
    assert f"gives embed.table the shape ({rows}, 3), expected (5, 3)" in str(caught.value)
    assert advice in str(caught.value)


def test_a_tied_tensor_that_is_there_alone_stands_for_the_other():
    alone = {name: shape for name, shape in GOOD.items() if name != "embed.weight"} | {"head.weight": (5, 3)}
    made = plan(alone)
    assert made.tied == {}
    assert made.stored["embed.weight"] == "head.weight"


def test_counters_keep_their_dtype_and_fill_only_counters():
    table = replace(TABLE, rules=(*TABLE.rules, Rule.one("count", "count")), carried=("steps",))
    given = headers({**GOOD, "count": (), "steps": ()}, count="int64", steps="int64")
    targets = {**TARGETS, "count": ()}
    dtypes = dict.fromkeys(TARGETS, "float32") | {"count": "int32"}
    made = plan_mapping(given, table=table, targets=targets, dtype="bfloat16", target_dtypes=dtypes)
    casts = {step.targets[0]: step.casts[0] for step in made.steps}
    assert (casts["count"].before, casts["count"].after) == ("int64", "int64")
    assert casts["embed.table"].after == "bfloat16"
    assert made.carried == ("steps",)
    with pytest.raises(
        ConversionError, match=r"embed.weight: gives embed.table numbers of dtype int64, expected float32"
    ):
        plan_mapping(
            headers({**GOOD, "count": ()}, count="int64", **{"embed.weight": "int64"}),
            table=table,
            targets=targets,
            dtype="keep",
            target_dtypes=dtypes,
        )
