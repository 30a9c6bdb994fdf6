"""Names of ATen overloads.

Owns the spelling of a table's keys for a function that serves several overloads. Knows no operation. The one decision:
a table names every overload it serves; what is not named is not supported.
"""

from collections.abc import Callable
from typing import Any


def overloads(name: str, function: Callable[..., Any], *kinds: str) -> dict[str, Callable[..., Any]]:
    """`function` under each of the overloads `kinds` of `aten.name`."""
    return {f"aten.{name}.{kind}": function for kind in kinds}
