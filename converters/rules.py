"""The rule language: which source tensors become which target leaves, and how.

Owns name templates, rules and their inversion. Knows nothing of any model family, file format or framework. The one
decision: a rule is data. A family's table can be read and reviewed by eye, planned on shapes alone, and run backwards.

    Rule.one("model.layers.{layer}.mlp.up_proj.weight", "layers.{layer}.mlp.up_proj.kernel", Transpose((1, 0)))

`{name}` matches a whole number without leading zeros, `{name:word}` one name without dots. A template matches a full
name or not at all.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from converters.operations import Array, Operation, Shape

_FIELD = re.compile(r"\{([a-z_]+)(?::(word))?\}")
_NUMBER = r"(?:0|[1-9][0-9]*)"
_WORD = r"[^.]+"


@lru_cache(maxsize=4096)
def _pattern(template: str) -> re.Pattern[str]:
    pieces: list[str] = []
    seen: set[str] = set()
    end = 0
    for field in _FIELD.finditer(template):
        pieces.append(re.escape(template[end : field.start()]))
        name = field[1]
        pieces.append(f"(?P={name})" if name in seen else f"(?P<{name}>{_WORD if field[2] else _NUMBER})")
        seen.add(name)
        end = field.end()
    pieces.append(re.escape(template[end:]))
    return re.compile("".join(pieces))


def match(template: str, name: str) -> dict[str, str] | None:
    """The captures of `name` under `template`, or None where it does not match in full."""
    found = _pattern(template).fullmatch(name)
    return found.groupdict() if found else None


def render(template: str, captures: Mapping[str, str]) -> str:
    """The name that `template` stands for with these captures.

    Raises:
        KeyError: a capture of the template is missing.
    """
    return _FIELD.sub(lambda field: captures[field[1]], template)


def fields(template: str) -> frozenset[str]:
    """The capture names of a template."""
    return frozenset(field[1] for field in _FIELD.finditer(template))


def _listed(names: Sequence[str]) -> str:
    """All of a few names; the ends of many (experts)."""
    return " + ".join(names) if len(names) <= 4 else f"{names[0]} + ... + {names[-1]} ({len(names)} tensors)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Source tensors, target leaves, and the operations between them, in order.

    All templates of a rule have the same captures: otherwise the way back would have to guess.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    operations: tuple[Operation, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a rule that cannot be reversed.

        Raises:
            ValueError: the templates have different captures.
        """
        if len({fields(template) for template in (*self.sources, *self.targets)}) != 1:
            raise ValueError(f"{self}: every template of a rule needs the same captures, or it has no inverse")

    @classmethod
    def one(cls, source: str, target: str, *operations: Operation) -> "Rule":
        """A rule from one tensor to one leaf."""
        return cls(sources=(source,), targets=(target,), operations=operations)

    def __str__(self) -> str:
        return f"{_listed(self.sources)} -> {_listed(self.targets)}"

    def inverted(self) -> "Rule":
        """The rule that leads back; `rule.inverted().inverted() == rule`."""
        return Rule(
            sources=self.targets,
            targets=self.sources,
            operations=tuple(operation.inverted() for operation in reversed(self.operations)),
        )

    def apply(self, arrays: Sequence[Array]) -> list[Array]:
        """Run the operations on the sources' arrays, in the order of `sources`.

        Returns:
            One array a target, in the order of `targets`; they may be views of the sources.
        """
        current = list(arrays)
        for operation in self.operations:
            current = operation.apply(current)
        return current

    def shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """The shapes `apply` would give.

        Raises:
            ValueError: an operation does not take these shapes, or the number of results is not that of `targets`.
        """
        current = [tuple(shape) for shape in shapes]
        for operation in self.operations:
            try:
                current = operation.shapes(current)
            except ValueError as error:
                raise ValueError(f"{operation}: {error}") from None
        if len(current) != len(self.targets):
            raise ValueError(f"makes {len(current)} tensors for {len(self.targets)} targets")
        return current
