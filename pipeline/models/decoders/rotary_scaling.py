"""Frequencies of rotary position embedding, with every scaling that a config may ask for.

Owns the reading of rope settings and the frequencies that follow from them. Loads no framework. The one decision: the
two scalings that look at the length of the input (dynamic and longrope) take that length as an argument and say up to
which length they do not depend on it, so a key-value cache is never filled with keys of two different rotations.

Shape suffixes: F dim / 2.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import nearest_name

_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
ROPE_TYPES = tuple(_REQUIRED)
_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
_STRETCHES = ("short_factor", "long_factor")
_FULL_LENGTH_IS_ORIGINAL = ("yarn", "longrope")
"""Where `original_max_position_embeddings` is absent, it is `max_position_embeddings` (transformers)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotary:
    """How positions turn queries and keys; fields below `max_positions` matter for the named `kind` alone."""

    kind: str = "default"
    theta: float = 10000.0
    dim: int
    """How many of a head's numbers are turned, from its first; the rest pass."""
    max_positions: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    attention_factor: float = 1.0
    """Cosines and sines are multiplied by it."""

    @property
    def longest_cache(self) -> int:
        """Up to which length the frequencies do not depend on the length."""
        return self.original_max_positions if self.kind == "longrope" else self.max_positions

    def frequencies(self, *, length: int) -> NDArray[np.float32]:
        """Angle per position, float32 [F].

        `theta ** (-2i / dim)`, scaled as transformers does (`modeling_rope_utils`). `length` is that of the longest
        sequence of the pass; it matters beyond `longest_cache` alone.
        """
        exponent_F = np.arange(0, self.dim, 2, dtype=np.float32) / np.float32(self.dim)
        theta = self._theta_at(length)
        plain_F = (np.float32(1.0) / np.power(np.float32(theta), exponent_F)).astype(np.float32)
        if self.kind == "linear":
            return (plain_F / np.float32(self.factor)).astype(np.float32)
        if self.kind == "llama3":
            return _llama3(plain_F, rotary=self)
        if self.kind == "yarn":
            return _yarn(plain_F, rotary=self)
        if self.kind == "longrope":
            stretch = self.long_factor if length > self.original_max_positions else self.short_factor
            return (plain_F / np.asarray(stretch, np.float32)).astype(np.float32)
        return plain_F

    def _theta_at(self, length: int) -> float:
        # NTK-aware base: https://arxiv.org/abs/2309.00071, appendix B.1.
        if self.kind != "dynamic" or length <= self.max_positions:
            return self.theta
        growth = self.factor * length / self.max_positions - (self.factor - 1)
        return float(self.theta * growth ** (self.dim / (self.dim - 2)))


def read_rotary(
    given: Mapping[str, Any], *, theta: float, dim: int, max_positions: int, complaints: list[str]
) -> Rotary:
    """The rotation that a rope settings dict describes (`rope_parameters` or `rope_scaling` of a transformers config).

    Args:
        given: may be empty.
        theta: where `given` has none.
        dim: numbers of a head that are turned.
        max_positions: `max_position_embeddings` of the config.
        complaints: what cannot be computed is appended, and an unscaled rotation returned.
    """
    kind = str(given.get("rope_type", given.get("type", "default")))
    plain = Rotary(theta=float(given.get("rope_theta") or theta), dim=dim, max_positions=max_positions)
    if kind not in _REQUIRED:
        guess = nearest_name(kind, ROPE_TYPES)
        complaints.append(
            f"rope scaling {kind!r} is not supported; allowed: {', '.join(ROPE_TYPES)}"
            + (f"; did you mean {guess!r}?" if guess else "")
        )
        return plain
    if plain.theta <= 1:
        complaints.append(f"rope_theta is {plain.theta}, must be above 1")
        return plain
    missing = [name for name in _REQUIRED[kind] if given.get(name) is None]
    if missing:
        complaints.append(f"rope scaling {kind!r} needs {', '.join(missing)}")
        return plain
    original = int(given.get("original_max_position_embeddings") or 0)
    if not original and kind in _FULL_LENGTH_IS_ORIGINAL:
        original = max_positions
    numbers: dict[str, Any] = {name: float(given[name]) for name in _NUMBERS if given.get(name)}
    stretches: dict[str, Any] = {name: tuple(map(float, given.get(name) or ())) for name in _STRETCHES}
    if kind == "longrope":
        complaints += [
            f"rope {name} has {len(values)} numbers, needs {dim // 2}"
            for name, values in stretches.items()
            if len(values) != dim // 2
        ]
        numbers.setdefault("factor", max_positions / original)
    return Rotary(
        kind=kind,
        theta=plain.theta,
        dim=dim,
        max_positions=max_positions,
        original_max_positions=original,
        truncate=bool(given.get("truncate", True)),
        attention_factor=_attention_factor(kind, given, factor=numbers.get("factor", 1.0), original=original),
        **numbers,
        **stretches,
    )


def _attention_factor(kind: str, given: Mapping[str, Any], *, factor: float, original: int) -> float:
    if kind not in ("yarn", "longrope"):
        return 1.0
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    if kind == "longrope":
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    above, below = given.get("mscale"), given.get("mscale_all_dim")
    if above and below:
        return _magnitude(factor, float(above)) / _magnitude(factor, float(below))
    return _magnitude(factor, 1.0)


def _magnitude(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _llama3(plain_F: NDArray[np.float32], *, rotary: Rotary) -> NDArray[np.float32]:
    """Long wavelengths are slowed, short ones kept, those between interpolated."""
    slowed_F = plain_F / np.float32(rotary.factor)
    wavelength_F = 2 * math.pi / plain_F
    smooth_F = (rotary.original_max_positions / wavelength_F - rotary.low_freq_factor) / (
        rotary.high_freq_factor - rotary.low_freq_factor
    )
    blended_F = (1 - smooth_F) * slowed_F + smooth_F * plain_F
    is_low = wavelength_F > rotary.original_max_positions / rotary.low_freq_factor
    is_high = wavelength_F < rotary.original_max_positions / rotary.high_freq_factor
    return np.where(is_low, slowed_F, np.where(is_high, plain_F, blended_F)).astype(np.float32)


def _yarn(plain_F: NDArray[np.float32], *, rotary: Rotary) -> NDArray[np.float32]:
    """Dimensions that turn often are kept, those that turn rarely slowed, with a linear ramp between (YaRN, eq. 13)."""

    def dimension(rotations: float) -> float:
        turns = rotary.original_max_positions / (rotations * 2 * math.pi)
        return rotary.dim * math.log(turns) / (2 * math.log(rotary.theta))

    low, high = dimension(rotary.beta_fast), dimension(rotary.beta_slow)
    if rotary.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary.dim - 1)
    width = high - low if high != low else 0.001
    ramp_F = np.clip((np.arange(rotary.dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(width), 0, 1)
    kept_F = 1 - ramp_F
    return (plain_F / np.float32(rotary.factor) * (1 - kept_F) + plain_F * kept_F).astype(np.float32)
