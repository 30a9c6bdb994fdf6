"""A condition on a metric, as written in a flow: `max_abs_logit_difference: "<= 1e-3"`.

Owns parsing and evaluation. Pure. The one decision: a metric that is missing or not a number fails its gate; a gate
never passes for lack of evidence.
"""

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    "==": operator.eq,
}
_CONDITION = re.compile(r"^\s*(<=|>=|==|<|>)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(%?)\s*$")
CONDITION_FORM = 'an operator (<=, >=, <, >, ==) and a number, for example "<= 1e-3" or ">= 99%"'


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """`metric` must stand in `comparison` to `limit`."""

    metric: str
    comparison: str
    limit: float

    @classmethod
    def parse(cls, metric: str, condition: str) -> "Gate":
        """Read a condition such as `<= 1e-3`; a percent sign divides by 100.

        Raises:
            ValueError: the condition has another form.
        """
        match = _CONDITION.match(condition)
        if match is None:
            raise ValueError(f"{condition!r} is not {CONDITION_FORM}")
        limit = float(match[2]) / (100.0 if match[3] else 1.0)
        return cls(metric=metric, comparison=match[1], limit=limit)

    def judge(self, metrics: Mapping[str, float]) -> "GateVerdict":
        """Hold the gate against a stage's metrics."""
        value = metrics.get(self.metric)
        holds = value is not None and not math.isnan(value) and _OPERATORS[self.comparison](float(value), self.limit)
        return GateVerdict(
            metric=self.metric, comparison=self.comparison, limit=self.limit, value=value, holds=bool(holds)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GateVerdict:
    """A gate and the value it was held against; `value` is None where the stage reported no such metric."""

    metric: str
    comparison: str
    limit: float
    value: float | None
    holds: bool

    def __str__(self) -> str:
        shown = "missing" if self.value is None else f"{self.value:.6g}"
        return f"{self.metric} = {shown} {'holds' if self.holds else 'FAILS'} {self.comparison} {self.limit:.6g}"
