"""References inside text: `${params.steps}`, `${stages.train.outputs.checkpoint}`, and `$${` for a plain `${`.

Owns their grammar. Knows nothing of which parameters or stages exist. The one decision: everything between `${` and
`}` must be one of the two forms; anything else is an error, never text that passes through by accident.
"""

import re
from dataclasses import dataclass

_TOKEN = re.compile(r"\$\$\{|\$\{([^{}]*)\}|\$\{")
_PARAM = re.compile(r"params\.([A-Za-z][A-Za-z0-9_-]*)")
_OUTPUT = re.compile(r"stages\.([A-Za-z][A-Za-z0-9_-]*)\.outputs\.([A-Za-z][A-Za-z0-9_-]*)")
ALLOWED_FORMS = ("${params.NAME}", "${stages.STAGE.outputs.OUTPUT}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamReference:
    """`${params.NAME}`."""

    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StageReference:
    """`${stages.STAGE.outputs.OUTPUT}`."""

    stage: str
    output: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Malformed:
    """A `${` that starts neither form; `text` is what was found."""

    text: str

    @property
    def nearest(self) -> str | None:
        """The well-formed reference that was probably meant."""
        words = re.findall(r"[A-Za-z][A-Za-z0-9_-]*", self.text)
        if len(words) >= 3 and words[0].startswith("stage"):
            return f"${{stages.{words[1]}.outputs.{words[-1]}}}"
        if words and not words[0].startswith("stage") and len(words) <= 2:
            return f"${{params.{words[-1]}}}"
        return None


Part = str | ParamReference | StageReference | Malformed


@dataclass(frozen=True, kw_only=True, slots=True)
class Template:
    """A text in its parts; a text without references has at most one."""

    parts: tuple[Part, ...]

    @property
    def whole(self) -> ParamReference | StageReference | None:
        """The reference, where the text is nothing but one."""
        if len(self.parts) == 1 and isinstance(self.parts[0], ParamReference | StageReference):
            return self.parts[0]
        return None

    @property
    def malformed(self) -> tuple[Malformed, ...]:
        """What looks like a reference and is none."""
        return tuple(part for part in self.parts if isinstance(part, Malformed))

    @property
    def params(self) -> tuple[ParamReference, ...]:
        """The parameters referred to."""
        return tuple(part for part in self.parts if isinstance(part, ParamReference))

    @property
    def stages(self) -> tuple[StageReference, ...]:
        """The stage outputs referred to."""
        return tuple(part for part in self.parts if isinstance(part, StageReference))

    @property
    def is_literal(self) -> bool:
        """True where there is no reference at all."""
        return all(isinstance(part, str) for part in self.parts)


def parse_template(text: str) -> Template:
    """Split a text at its references."""
    parts: list[Part] = []
    literal = ""
    end = 0
    for token in _TOKEN.finditer(text):
        literal += text[end : token.start()]
        end = token.end()
        if token[0] == "$${":
            literal += "${"
            continue
        if literal:
            parts.append(literal)
            literal = ""
        parts.append(_reference(token))
    literal += text[end:]
    if literal:
        parts.append(literal)
    return Template(parts=tuple(parts))


def _reference(token: re.Match[str]) -> Part:
    inside = token[1]
    if inside is None:
        return Malformed(text=token.string[token.start() : token.start() + 40])
    if param := _PARAM.fullmatch(inside):
        return ParamReference(name=param[1])
    if output := _OUTPUT.fullmatch(inside):
        return StageReference(stage=output[1], output=output[2])
    return Malformed(text=token[0])
