"""Every error a user can meet, and the exit code it ends with.

Owns the exception tree. Knows nothing of YAML, Ray, MLflow or any framework. The one decision: a failure has a
*class*, and the class alone decides whether it is retried and which exit code the command ends with.

    PipelineError
    |-- UsageError              config   the command line is wrong
    |-- SpecError               config   the flow is wrong; carries every problem found, with its position
    |-- ParameterError          config   a stage found that its parameters cannot work here (no such device, ...)
    |-- StageError              user     code of a stage raised
    |-- ConversionError         user     a checkpoint cannot become the other framework's parameters
    |-- GateError               gate     a condition on metrics does not hold
    |-- ArtifactError           infra    an artifact is missing, truncated or altered
    |-- CheckpointError         infra    a training checkpoint cannot be read or committed
    |-- StoreError              infra    the store cannot be read or written
    |-- ClusterError            infra    Ray is away, or cannot give what was asked for
    |-- LeaseError              infra    another process owns the run or the fingerprint
    |-- TrackingError           infra    the tracking server refused what only it can do (the model registry)
    |-- PreemptedError          infra    training was asked to make way; exit code 75, and a repetition resumes
    `-- Interrupted             --       the user pressed Ctrl-C; exit code 130
"""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class FailureClass(StrEnum):
    """Why something failed; decides retries and the exit code."""

    CONFIG = "config"
    USER = "user"
    INFRA = "infra"
    GATE = "gate"


EXIT_CODE_BY_CLASS = {FailureClass.CONFIG: 2, FailureClass.USER: 1, FailureClass.GATE: 1, FailureClass.INFRA: 3}
EXIT_CODE_PREEMPTED = 75
"""EX_TEMPFAIL of sysexits.h: a scheduler that starts the same command again loses nothing."""
EXIT_CODE_INTERRUPTED = 130


class PipelineError(Exception):
    """Base of every error that is shown to a user without a traceback.

    Args:
        message: where it happened, what was found, what is allowed.
        hint: what to do about it; shown on a line of its own.
    """

    failure_class: FailureClass = FailureClass.INFRA

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        """Keep `hint` when the error crosses a process boundary."""
        return (_rebuild, (type(self), self.message, self.hint))

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message

    @property
    def exit_code(self) -> int:
        """The exit code of a command that ends with this error."""
        return EXIT_CODE_BY_CLASS[self.failure_class]


def _rebuild(kind: type[PipelineError], message: str, hint: str) -> PipelineError:
    return kind(message, hint=hint)


class UsageError(PipelineError):
    """The command line names something that does not exist or does not fit."""

    failure_class = FailureClass.CONFIG


class ParameterError(PipelineError):
    """A stage's parameters are well-formed but cannot work on this machine or with these inputs."""

    failure_class = FailureClass.CONFIG


class StageError(PipelineError):
    """Code of a stage raised."""

    failure_class = FailureClass.USER


class ConversionError(PipelineError):
    """Source tensors and target leaves do not match; the message lists every complaint."""

    failure_class = FailureClass.USER


class GateError(PipelineError):
    """A gate does not hold; what depends on the stage does not start."""

    failure_class = FailureClass.GATE


class ArtifactError(PipelineError):
    """A committed artifact is missing, truncated or altered."""


class CheckpointError(PipelineError):
    """A training checkpoint cannot be read or committed."""


class StoreError(PipelineError):
    """The store cannot be read or written."""


class ClusterError(PipelineError):
    """Ray is away, or the cluster cannot give what was asked for."""


class LeaseError(PipelineError):
    """Another process owns the run or the fingerprint."""


class TrackingError(PipelineError):
    """The tracking server refused what only it can do."""


class PreemptedError(PipelineError):
    """Training was asked to make way, and ended at a step boundary."""

    @property
    def exit_code(self) -> int:
        """75, which no other error has."""
        return EXIT_CODE_PREEMPTED


class Interrupted(PipelineError):  # noqa: N818 - named after what the user did
    """The user pressed Ctrl-C."""

    @property
    def exit_code(self) -> int:
        """130, as shells expect after SIGINT."""
        return EXIT_CODE_INTERRUPTED


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """A place in a file; line and column count from 1."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One thing that is wrong with a flow."""

    position: Position
    path: str
    """Dotted path in the flow, for example `stages.train.with.steps`."""
    code: str
    """Stable kebab-case name, for example `unknown-key`."""
    found: str
    """What is wrong, naming what was found."""
    allowed: tuple[str, ...] = ()
    nearest: str | None = None
    hint: str = ""

    def __str__(self) -> str:
        text = f"{self.position} {self.path} [{self.code}] {self.found}"
        if self.allowed:
            text += f"; allowed: {', '.join(self.allowed)}"
        if self.nearest:
            text += f"; did you mean {self.nearest!r}?"
        if self.hint:
            text += f"; {self.hint}"
        return text


class SpecError(PipelineError):
    """The flow is wrong. Carries every problem, in file order."""

    failure_class = FailureClass.CONFIG

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(
            sorted(problems, key=lambda p: (p.position.file, p.position.line, p.position.column))
        )
        num = len(self.problems)
        noun = "problem" if num == 1 else "problems"
        super().__init__(f"{num} {noun} in the flow:\n" + "\n".join(f"  {problem}" for problem in self.problems))

    def __reduce__(self) -> tuple[object, ...]:
        """Rebuild from the problems, not from the rendered text."""
        return (SpecError, (self.problems,))


def nearest_name(name: str, allowed: Sequence[str]) -> str | None:
    """The allowed name that looks most like `name`, or None where nothing is close."""
    matches = difflib.get_close_matches(name, allowed, n=1, cutoff=0.6)
    return matches[0] if matches else None
