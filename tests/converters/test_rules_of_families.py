"""Every rule of every family's table runs backwards bit for bit, on any shape that fits it (C6: nothing is folded)."""

from functools import partial

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_every_family import OTHERS
from test_exporting import FAMILIES, made

from converters.families.registry import TABLES, table_for
from converters.list_operations import Each, Stack
from converters.operations import Concatenate, DeinterleaveRope, InterleaveRope, Pad, Reshape, Split, Transpose, Unpad
from converters.readers import open_source
from converters.rules import match, render

DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Config and shapes by case, as `save_pretrained` writes them; every table is reached."""
    found = {}
    root = tmp_path_factory.mktemp("families")
    models = {case: partial(made, case) for case in FAMILIES}
    models |= {f"{case} as a whole": make for case, make in OTHERS.items()}
    for case, make in models.items():
        make().save_pretrained(root / case)
        source = open_source(root / case)
        found[case] = (source.config(), {name: header.shape for name, header in source.headers.items()})
    assert {TABLES[config["model_type"]] for config, _ in found.values()} == set(TABLES.values())
    return found


def bits(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def random_bits(shape, dtype, seed):
    """Any bits but not-a-numbers, which hardware may quiet."""
    random = np.random.default_rng(seed)
    array = random.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8).reshape(-1).view(dtype).reshape(shape)
    return np.where(np.isnan(array.astype(np.float32)), dtype.type(1.5), array).astype(dtype)


@settings(deadline=None, max_examples=5)
@given(seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from(DTYPES))
def test_every_rule_of_every_table_is_undone_bit_for_bit(checkpoints, seed, dtype):
    for case, (config, shapes) in checkpoints.items():
        table = table_for(config, names=tuple(shapes))
        reached = set()
        for rule in table.rules:
            captures = next((c for name in shapes if (c := match(rule.sources[0], name)) is not None), None)
            if captures is None:
                continue
            names = [render(source, captures) for source in rule.sources]
            arrays = [random_bits(shapes[name], dtype, seed + number) for number, name in enumerate(names)]
            leaves = rule.apply(arrays)
            assert [leaf.shape for leaf in leaves] == rule.shapes([array.shape for array in arrays]), (case, rule)
            back = rule.inverted().apply([np.asarray(leaf, order="C") for leaf in leaves])
            for before, after in zip(arrays, back, strict=True):
                assert before.shape == after.shape, (case, rule)
                assert np.array_equal(bits(before), bits(after)), (case, rule)
            reached.add(rule)
        assert reached == set(table.rules), case


sizes = st.integers(1, 5)


@st.composite
def operations_with_shapes(draw):
    """An operation and shapes that it takes."""
    first, second, third = draw(sizes), draw(sizes), draw(sizes)
    axis = draw(st.integers(0, 2))
    shape = (first, second, third)
    pieces = tuple(draw(st.lists(sizes, min_size=1, max_size=4)))
    joined = (*shape[:axis], sum(pieces), *shape[axis + 1 :])
    heads, half = draw(sizes), draw(sizes)
    return draw(
        st.sampled_from(
            [
                (Transpose(tuple(draw(st.permutations(range(3))))), [shape]),
                (Reshape(shape, (first * second, third)), [shape]),
                (Split(axis, pieces), [joined]),
                (Concatenate(axis, pieces), [(*shape[:axis], size, *shape[axis + 1 :]) for size in pieces]),
                (Pad(axis, first), [shape]),
                (InterleaveRope(heads), [(heads * 2 * half, third)]),
                (DeinterleaveRope(heads), [(heads * 2 * half, third)]),
            ]
        )
    )


@settings(deadline=None)
@given(case=operations_with_shapes(), seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from(DTYPES))
def test_every_operation_is_undone_bit_for_bit_on_random_shapes(case, seed, dtype):
    operation, shapes = case
    arrays = [random_bits(shape, dtype, seed + number) for number, shape in enumerate(shapes)]
    made_arrays = operation.apply(arrays)
    assert [array.shape for array in made_arrays] == operation.shapes(shapes)
    back = operation.inverted().apply(made_arrays)
    assert len(back) == len(arrays)
    assert all(np.array_equal(bits(before), bits(after)) for before, after in zip(arrays, back, strict=True))
    assert operation.inverted().inverted() == operation


def test_unpad_refuses_what_is_no_padding():
    with pytest.raises(ValueError, match="are not zero padding"):
        Unpad(0, 1).apply([np.ones((3, 2), np.float32)])


def test_bfloat16_weights_survive_where_folding_would_change_them_c6(checkpoints):
    """A query scale folded in and out changes 22 of the 128 mantissas at head size 128."""
    mantissas = np.arange(128, 256, dtype=np.uint16) | 0x3F00
    values = mantissas.view(ml_dtypes.bfloat16)
    scale = ml_dtypes.bfloat16(128**-0.5)
    folded = ((values * scale).astype(ml_dtypes.bfloat16) / scale).astype(ml_dtypes.bfloat16)
    assert np.count_nonzero(folded != values) > 0
    operations = {
        type(step)
        for config, shapes in checkpoints.values()
        for rule in table_for(config, names=tuple(shapes)).rules
        for operation in rule.operations
        for step in (operation.operations if isinstance(operation, Each) else (operation,))
    }
    assert operations == {Transpose, Reshape, Split, Stack}
