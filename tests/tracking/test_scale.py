import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.tracking.scale import fit, number_text, tick_texts

FINITE = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e12, max_value=1e12)


@given(st.lists(st.floats(), max_size=20), st.booleans())
def test_any_values_fit_between_start_and_end(values, log):
    scale = fit(values, start=10, end=110, log=log)
    for value in values:
        if scale.shows(value) and abs(value) < 1e300 and (value == 0 or abs(value) > 1e-300):
            assert 10 - 1e-6 <= scale.at(value) <= 110 + 1e-6
    assert len(scale.ticks()) <= 12


@given(FINITE, FINITE)
def test_ticks_lie_inside_and_ascend(a, b):
    scale = fit([a, b], start=0, end=1)
    ticks = scale.ticks()
    assert ticks == sorted(ticks)
    assert all(-1e-6 <= scale.at(tick) <= 1 + 1e-6 for tick in ticks)


def test_a_log_scale_ignores_what_is_not_positive():
    scale = fit([0.0, -3.0, 1e-6, 1e-2, math.nan], start=0, end=100, log=True)
    assert not scale.shows(0.0)
    assert scale.ticks() == pytest.approx([1e-6, 1e-5, 1e-4, 1e-3, 1e-2])


def test_one_value_sits_in_the_middle():
    assert fit([5.0], start=0, end=100).at(5.0) == pytest.approx(50)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (12_500.0, "12,500"),
        (21_240.4, "21,240"),
        (0.0123456, "0.01235"),
        (3.1e-6, "3.1e-6"),
        (1.0, "1"),
        (math.nan, "NaN"),
        (-math.inf, "-inf"),
        (8_131_840.0, "8,131,840"),
    ],
)
def test_numbers_are_written_for_people(value, text):
    assert number_text(value) == text


@pytest.mark.parametrize(
    ("ticks", "texts"),
    [
        ([0.0, 2e-4, 1e-3], ["0", "2e-4", "1e-3"]),
        ([20_000.0, 20_500.0], ["20k", "20.5k"]),
        ([0.0, 2e6], ["0", "2M"]),
        ([0.5, 1.0], ["0.5", "1"]),
        ([], []),
    ],
)
def test_the_ticks_of_an_axis_share_one_notation(ticks, texts):
    assert tick_texts(ticks) == texts
