"""What is never compiled, whoever asks: constraints that are too long or too deep.

Owns the two limits. Pure. The one decision: what can be refused by counting characters is refused before any compiler
reads it; what looks small and is costly is left to a process that can be ended (`structured_trial.py`).
"""

import re
from collections.abc import Mapping

from pipeline.serving.grammar.response_format import Constraint

MAX_CHARACTERS: Mapping[str, int] = {"json_object": 0, "json_schema": 128 * 2**10, "regex": 4096, "grammar": 16 * 2**10}
MAX_DEPTH = 64
"""Objects and arrays inside each other in a schema; llguidance's reader ends at 128."""
_CALLED: Mapping[str, str] = {"json_schema": "schema", "regex": "expression", "grammar": "grammar"}
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]')


def why_too_large(constraint: Constraint) -> str | None:
    """The limit that a constraint breaks, or None."""
    kind, text = constraint.kind, constraint.text
    if len(text) > MAX_CHARACTERS[kind]:
        return f"the {_CALLED[kind]} has {len(text)} characters, {MAX_CHARACTERS[kind]} are allowed"
    if kind == "json_schema" and (depth := _depth(text)) > MAX_DEPTH:
        return f"the schema is {depth} levels deep, {MAX_DEPTH} are allowed; move parts into $defs"
    return None


def _depth(text: str) -> int:
    depth = deepest = 0
    for match in _BRACKETS.finditer(text):
        found = match[0]
        depth += (found in "[{") - (found in "]}")
        deepest = max(deepest, depth)
    return deepest
