"""What a parity check found, as data.

Owns the three levels of evidence (tensors, blocks, outputs), the limits they are held against, and the sentences that
say where one is passed. Knows nothing of frameworks and files. The one decision: a level that fails is told in words
that name the first thing that is wrong, because a wrong layer makes every later one look wrong too.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REPORT_FILE = "parity.json"
_NAMED_TENSORS = 5
_NAMED_BLOCKS = 8
"""Names that fit below an axis."""
_SMALLEST_DRAWN = 1e-9
"""An error of exactly zero has no place on a log scale and is drawn here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityLimits:
    """Above these (below, for what should agree) a level does not hold."""

    block_relative_error: float = 1e-5
    """Of one block's output: `max |flax - torch| / max |torch|`. Sums in another order reach 4.3e-6 (a pooler of
    RoBERTa; 4.2e-6 after 30 layers of SmolLM2). The other variant of GELU gives 9e-5 or more; an eps of 1e-6 for 1e-5
    gives 5e-6 to 4e-4, by the size of what is normalised."""
    output_relative_error: float = 1e-4
    """Of one named output, the same formula."""
    max_kl: float = 1e-6
    """Of the next-token distribution at any position, in nats."""
    greedy_match: float = 1.0
    """Share of continued tokens that agree before the first that differs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorAgreement:
    """The Flax leaves, mapped back, held against the checkpoint bit for bit."""

    num_tensors: int
    num_identical: int
    rounded: tuple[str, ...]
    """Tensors that a declared cast changed."""
    differing: tuple[str, ...]
    """Tensors that differ and should not."""

    @property
    def share_identical(self) -> float:
        """Between 0 and 1."""
        return self.num_identical / self.num_tensors if self.num_tensors else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockAgreement:
    """The output of one module on both sides."""

    name: str
    """Path of the Flax module."""
    torch_name: str
    shape: tuple[int, ...]
    max_relative: float
    """`max |flax - torch| / max |torch|`; infinite where the Flax side is not finite."""
    mean_relative: float
    """`mean |flax - torch| / mean |torch|`."""
    torch_rounding: float | None = None
    """Where torch was run in float64 to decide, how far torch's own float32 is from that; both errors above are then
    those of Flax from torch in float64. None where float32 decided."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputAgreement:
    """One named output on both sides."""

    name: str
    shape: tuple[int, ...]
    max_abs: float
    max_relative: float
    """`max |flax - torch| / max |torch|`; infinite where the Flax side is not finite."""
    mean_kl: float | None = None
    """Of logits: `KL(softmax(torch) || softmax(flax))` in nats."""
    max_kl: float | None = None
    top1_agreement: float | None = None
    """Of logits: share of positions with the same largest logit."""
    topk_overlap: float | None = None
    """Of logits: share of the ten largest that are among the other side's ten largest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ContinuedPrompt:
    """One prompt, continued greedily by both sides."""

    reference: tuple[int, ...]
    candidate: tuple[int, ...]
    matched: int
    """Tokens that agree before the first that differs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityReport:
    """Everything that was found."""

    source: str
    model: str
    name: str
    """The family's `model_type`, or `traced`."""
    kind: str
    road: str
    inputs: Mapping[str, str]
    """Shape and dtype of what both sides were given, by name."""
    limits: ParityLimits
    tensors: TensorAgreement
    blocks: tuple[BlockAgreement, ...]
    outputs: tuple[OutputAgreement, ...]
    not_compared: tuple[str, ...]
    """Outputs that torch gives and the Flax model does not."""
    continuations: tuple[ContinuedPrompt, ...]

    @property
    def max_block_relative_error(self) -> float:
        """Of the worst block; 0 where there are none."""
        return max((block.max_relative for block in self.blocks), default=0.0)

    @property
    def first_block_over_limit(self) -> BlockAgreement | None:
        """In the order in which blocks run."""
        limit = self.limits.block_relative_error
        return next((block for block in self.blocks if not block.max_relative <= limit), None)

    @property
    def judged_in_float64(self) -> bool:
        """Whether float32 passed the limit and torch in float64 decided."""
        return any(block.torch_rounding is not None for block in self.blocks)

    @property
    def greedy_match(self) -> float | None:
        """Share of continued tokens that agree; None where nothing was continued."""
        total = sum(len(continued.reference) for continued in self.continuations)
        return sum(continued.matched for continued in self.continuations) / total if total else None

    @property
    def failures(self) -> tuple[str, ...]:
        """What does not hold, a sentence each, the earliest level first."""
        return (*self._tensor_failures(), *self._block_failures(), *self._output_failures())

    @property
    def passed(self) -> bool:
        """Every level holds."""
        return not self.failures

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers a gate may name; those of logits and continuations only where there are any."""
        found: dict[str, float] = {
            "tensors_identical": self.tensors.share_identical,
            "max_block_relative_error": self.max_block_relative_error,
            "max_abs_output_difference": max((output.max_abs for output in self.outputs), default=0.0),
            "max_rel_output_difference": max((output.max_relative for output in self.outputs), default=0.0),
        }
        logits = [output for output in self.outputs if output.max_kl is not None]
        if logits:
            found |= {
                "max_abs_logit_difference": max(output.max_abs for output in logits),
                "max_rel_logit_difference": max(output.max_relative for output in logits),
                "mean_kl": max(output.mean_kl or 0.0 for output in logits),
                "max_kl": max(output.max_kl or 0.0 for output in logits),
                "top1_agreement": min(_or_one(output.top1_agreement) for output in logits),
                "topk_overlap": min(_or_one(output.topk_overlap) for output in logits),
            }
        if self.greedy_match is not None:
            found["greedy_match"] = self.greedy_match
        return found

    def to_json(self) -> dict[str, Any]:
        """JSON values; a number that is not finite is the text `inf` or `nan`."""
        value = _plain(asdict(self))
        first = self.first_block_over_limit
        return {
            "passed": self.passed,
            "failures": list(self.failures),
            "metrics": _plain(self.metrics),
            "first_block_over_limit": first.name if first else None,
            **value,
        }

    def write(self, directory: Path) -> Path:
        """Write `parity.json` into `directory`; gives its path."""
        path = directory / REPORT_FILE
        path.write_text(json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        return path

    def charts(self) -> dict[str, Mapping[str, Any]]:
        """The pictures of the report, by name, as `Reporter.figure` takes them; none where there are no blocks."""
        if not self.blocks:
            return {}
        names = [block.name for block in self.blocks]
        are_few = len(names) <= _NAMED_BLOCKS
        positions = list(range(len(names)))
        limit = self.limits.block_relative_error
        lines = {
            "largest": [block.max_relative for block in self.blocks],
            "mean": [block.mean_relative for block in self.blocks],
            "limit": [limit] * len(self.blocks),
        }
        return {
            "block_relative_error": {
                "title": "Relative error of each block, in the order in which they run",
                "kind": "lines",
                "x_label": "block" if are_few else f"block, from {names[0]} to {names[-1]}",
                "y_label": "relative error",
                "x_scale": "linear",
                "y_scale": "log",
                "series": [
                    {
                        "name": name,
                        "x": names if are_few else positions,
                        "y": [_plain(max(value, _SMALLEST_DRAWN)) for value in values],
                    }
                    for name, values in lines.items()
                ],
            }
        }

    def _tensor_failures(self) -> list[str]:
        tensors = self.tensors
        if tensors.num_tensors == 0:
            return ["tensors: there are none to compare"]
        if not tensors.differing:
            return []
        shown = ", ".join(tensors.differing[:_NAMED_TENSORS])
        more = len(tensors.differing) - _NAMED_TENSORS
        return [
            f"tensors: {len(tensors.differing)} of {tensors.num_tensors} do not come back bit for bit: {shown}"
            + (f" and {more} more" if more > 0 else "")
        ]

    def _block_failures(self) -> list[str]:
        first = self.first_block_over_limit
        if first is None:
            return []
        over = sum(not block.max_relative <= self.limits.block_relative_error for block in self.blocks)
        return [
            f"blocks: {first.name} (torch: {first.torch_name}) is the first whose relative error passes the limit: "
            f"{first.max_relative:.2e} > {self.limits.block_relative_error:.0e}; {over} of {len(self.blocks)} do"
        ]

    def _output_failures(self) -> list[str]:
        if not self.outputs:
            return ["outputs: there are none to compare"]
        limits = self.limits
        texts = []
        for output in self.outputs:
            if not output.max_relative <= limits.output_relative_error:
                texts.append(
                    f"outputs: {output.name} differs by {output.max_abs:.2e}, relative "
                    f"{output.max_relative:.2e} > {limits.output_relative_error:.0e}"
                )
            if output.max_kl is not None and not output.max_kl <= limits.max_kl:
                texts.append(f"outputs: KL of {output.name} is {output.max_kl:.2e} nats > {limits.max_kl:.0e}")
        if self.greedy_match is not None and not self.greedy_match >= limits.greedy_match:
            texts.append(f"continuations: {self.greedy_match:.1%} of tokens agree < {limits.greedy_match:.0%}")
        return texts


def _or_one(value: float | None) -> float:
    return 1.0 if value is None else value


def _plain(value: Any) -> Any:
    """Tuples to lists, and numbers that JSON does not have to text."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value
