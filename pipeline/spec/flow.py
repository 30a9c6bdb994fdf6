"""A flow as typed values.

Owns the shapes that everything below `spec/` reads. Knows nothing of YAML text or stage kinds. The one decision: what
a kind will judge (`with:`) stays a positioned tree, so that its errors can point at the line the user wrote.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.errors import Position
from pipeline.spec.gate import Gate
from pipeline.spec.grammar import ResourcesSpec, RetryPolicy
from pipeline.spec.params import Param
from pipeline.spec.scalar import Scalar
from pipeline.spec.template import StageReference, parse_template
from pipeline.spec.tree import MapNode, walk_scalars


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenReference:
    """A reference to a stage's output and where it stands."""

    path: str
    """Below the stage, for example `with.evidence.0`."""
    stage: str
    output: str
    position: Position


@dataclass(frozen=True, kw_only=True, slots=True)
class FallbackSpec:
    """One hop of `fallback:` as written."""

    on: tuple[str, ...]
    """Failure classes it is for."""
    keep: str | None
    """`champion` where the stage ends with what was there before."""
    stage: "StageSpec"
    """The stage as it is after this hop; the hop changes the stage as written, not the hop before it."""
    changed: Mapping[str, MapNode]
    """What `with` and `resources` of the hop say."""
    position: Position


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSpec:
    """One stage as written."""

    name: str
    uses: str
    with_: MapNode
    resources: ResourcesSpec = field(default_factory=ResourcesSpec)
    gates: tuple[Gate, ...] = ()
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    timeout_seconds: float | None = None
    description: str = ""
    fallback: tuple[FallbackSpec, ...] = ()
    positions: Mapping[str, Position] = field(default_factory=dict)
    """Dotted path below the stage to where its value stands; the empty path is the stage's name."""

    def position(self, path: str = "") -> Position:
        """Where the value at a dotted path below the stage stands; of the nearest thing above it where it is absent."""
        while path and path not in self.positions:
            path = path.rpartition(".")[0]
        return self.positions[path]

    def references(self) -> Iterator[WrittenReference]:
        """Every well-formed reference to an output in `with`, in file order."""
        for path, node in walk_scalars(self.with_, path="with"):
            for part in parse_template(node.text).parts:
                if isinstance(part, StageReference):
                    yield WrittenReference(path=path, stage=part.stage, output=part.output, position=node.position)


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowSpec:
    """One flow as written, with its parameters resolved."""

    name: str
    description: str
    file: Path
    """Absolute."""
    shown_file: str
    """The file as the user named it; `Position.file` of every problem in it."""
    project_root: Path
    """Directory that relative paths of the flow start from."""
    text: str
    declarations: Mapping[str, Param]
    stages: tuple[StageSpec, ...]
    overrides: tuple[str, ...] = ()

    @property
    def params(self) -> Mapping[str, Scalar]:
        """The value of each parameter, typed as declared."""
        return {name: param.value for name, param in self.declarations.items()}

    def stage(self, name: str) -> StageSpec:
        """The stage of that name.

        Raises:
            KeyError: there is none.
        """
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(name)
