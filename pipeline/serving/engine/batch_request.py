"""What a client asks of the micro-batcher and what comes back.

Owns the values that cross between HTTP, batcher and executor. Pure. The one decision: a request is a number of rows
that do not see each other, so rows of several requests share a forward pass and long requests are cut.

Shapes: inputs of a row have no batch axis.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One example, or one text."""

    inputs: Arrays
    length: int = 0
    """Tokens of a text; 0 where every row has the same shape."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRequest:
    """Rows of one client."""

    request_id: str
    rows: Sequence[Row]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchAnswer:
    """All rows of a request, in its order; or why there are none."""

    request_id: str
    rows: Sequence[Arrays] = field(default_factory=tuple)
    error: str = ""
    version: str = ""
    """Of the parameters that computed them."""

    def stacked(self) -> dict[str, NDArray[Any]]:
        """Outputs by name, [rows, ...]."""
        return {name: np.stack([row[name] for row in self.rows]) for name in self.rows[0]}


Sink = Callable[[BatchAnswer], None]
"""Called by the batcher's thread."""
