"""From values to positions, and the ticks between.

Owns linear and logarithmic scales, tick placement and how a number is written on an axis. Pure. The one decision: a
log scale over values that are not all positive shows the positive ones; it never silently becomes linear.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

MAX_TICKS = 6
LARGEST, SMALLEST = 1e100, 1e-100
"""Sizes beyond which a value is not drawn: differences and powers of it would overflow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Maps `low..high` to `start..end` (SVG units; `end` may be smaller than `start`)."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """The position of a value."""
        low, high, value = (
            (math.log10(v) for v in (self.low, self.high, value))
            if self.log
            else (
                self.low,
                self.high,
                value,
            )
        )
        return self.start + (self.end - self.start) * (value - low) / (high - low)

    def ticks(self) -> list[float]:
        """Round values inside the scale, few enough to read."""
        return _log_ticks(self.low, self.high) if self.log else _linear_ticks(self.low, self.high)

    def shows(self, value: float) -> bool:
        """True where the value is finite (below 1e100 in size) and, on a log scale, positive (above 1e-100)."""
        return _drawable(value, log=self.log)


def fit(values: Sequence[float], *, start: float, end: float, log: bool = False, zero: bool = False) -> Scale:
    """A scale over the finite values with a little room; one value alone sits in the middle; none gives 0..1.

    Args:
        values: may hold NaN and infinities.
        start: position of the low end.
        end: position of the high end.
        log: logarithmic; only positive values count.
        zero: include 0 (bars start there).
    """
    shown = [value for value in values if _drawable(value, log=log)]
    if not shown:
        return Scale(low=1.0 if log else 0.0, high=10.0 if log else 1.0, start=start, end=end, log=log)
    low, high = min(shown), max(shown)
    if log:
        if high / low < 1.0001:
            low, high = low / 2, high * 2
        room = (high / low) ** 0.04
        return Scale(low=low / room, high=high * room, start=start, end=end, log=True)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-12 * max(abs(low), abs(high), SMALLEST):
        half = abs(high) / 2 if abs(high) > SMALLEST else 0.5
        low, high = low - half, high + half
    room = 0.04 * (high - low)
    return Scale(
        low=low if zero and low == 0 else low - room,
        high=high if zero and high == 0 else high + room,
        start=start,
        end=end,
    )


def fit_bars(values: Sequence[float], *, start: float, end: float, log: bool = False) -> Scale:
    """A scale with room for half a bar's slot on either side."""
    shown = sorted({value for value in values if _drawable(value, log=log)})
    plain = fit(shown, start=start, end=end, log=log)
    if log and shown:
        slot = min((b / a for a, b in pairwise(shown)), default=1.0) ** 0.6
        return replace(plain, low=min(plain.low, shown[0] / slot), high=max(plain.high, shown[-1] * slot))
    room = 0.6 * min((b - a for a, b in pairwise(shown)), default=0.0)
    return Scale(
        low=min(plain.low, shown[0] - room) if shown else plain.low,
        high=max(plain.high, shown[-1] + room) if shown else plain.high,
        start=start,
        end=end,
    )


def bar_distance(values: Sequence[float], scale: Scale) -> float:
    """The smallest distance between two bars' places; all the width where there is one."""
    places = sorted({scale.at(value) for value in values if scale.shows(value)})
    return min((b - a for a, b in pairwise(places)), default=abs(scale.end - scale.start))


def _drawable(value: float, *, log: bool) -> bool:
    return abs(value) < LARGEST and (not log or value > SMALLEST)


def _linear_ticks(low: float, high: float) -> list[float]:
    step = 10.0 ** math.floor(math.log10((high - low) / MAX_TICKS))
    step = next(step * factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= MAX_TICKS)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    decades = [10.0**power for power in range(first, last + 1) if low <= 10.0**power <= high]
    if len(decades) >= 3:
        return decades[:: math.ceil(len(decades) / MAX_TICKS)]
    fine = [factor * 10.0**power for power in range(first, last + 1) for factor in (1, 2, 5)]
    ticks = [tick for tick in fine if low <= tick <= high]
    return ticks if len(ticks) >= 2 else [low, high]


def tick_texts(ticks: Sequence[float]) -> list[str]:
    """The ticks of one axis in one notation: `1e-3` where any is below 0.001, `20.5k` and `3M` from 10,000 on."""
    largest = max((abs(tick) for tick in ticks), default=0.0)
    if any(0 < abs(tick) < 0.999e-3 for tick in ticks) or largest >= 1e12:
        return [_power_text(tick) for tick in ticks]
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if largest >= size and largest >= 1e4:
            return [f"{tick / size:.4g}{letter}" if tick else "0" for tick in ticks]
    return [f"{tick:.6g}" for tick in ticks]


def _power_text(value: float) -> str:
    if not value:
        return "0"
    mantissa, exponent = f"{value:.3e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def number_text(value: float, *, digits: int = 4) -> str:
    """A number for a person: `12,500`, `0.0123`, `3.1e-06`, `NaN`, `inf`."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if value == 0:
        return "0"
    size = abs(value)
    if float(value).is_integer() and size < 1e12:
        return f"{int(value):,}"
    if size >= 1e9 or size < 1e-3:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    if size >= 1000:
        decimals = max(0, digits - len(str(int(size))))
        text = f"{value:,.{decimals}f}"
        return text.rstrip("0").rstrip(".") if decimals else text
    return f"{value:.{digits}g}"
