"""Durations and numbers as words."""

import pytest

from pipeline.cli.text import STYLES, duration, number
from pipeline.tracking.view import RunStatus, StageStatus


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, "-"),
        (0.42, "0.4 s"),
        (12.4, "12 s"),
        (59.9, "60 s"),
        (185, "3 min 05 s"),
        (7800, "2 h 10 min"),
    ],
)
def test_durations(seconds: float | None, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [(3.0, "3"), (7867776, "7,867,776"), (1.0967e-05, "1.097e-05"), (6.0689, "6.069"), (12345.6, "12,346")],
)
def test_numbers(value: float, words: str) -> None:
    assert number(value) == words


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_none_are_shown(value: float) -> None:
    assert number(value) in ("nan", "inf", "-inf")


def test_every_status_has_a_style() -> None:
    assert {status.value for status in (*RunStatus, *StageStatus)} == set(STYLES)
