"""Reading a transformers config without guessing.

Owns how a value is looked up, checked and complained about, in the spellings of transformers 4 and 5. Loads no
framework; knows no family. The one decision: every complaint is gathered before one error is raised, and two spellings
of one fact that contradict each other are a complaint, never a choice.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pipeline.errors import ParameterError
from pipeline.models.decoders.config import Activation
from pipeline.models.decoders.rotary_scaling import Rotary, read_rotary

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}
"""By the name in transformers: erf and tanh forms of GELU are not one function."""
LAYER_TYPES = ("full_attention", "sliding_attention")
LayerType = Literal["full_attention", "sliding_attention"]


class ConfigReading:
    """One config being read.

    Args:
        config: of transformers.
        defaults: what the family's class in transformers has where a key is absent.
        renames: the family's own name of a key, by its usual name.
    """

    def __init__(
        self, config: Mapping[str, Any], *, defaults: Mapping[str, Any], renames: Mapping[str, str] | None = None
    ) -> None:
        self._config = config
        self._defaults = defaults
        self._renames = renames or {}
        self.complaints: list[str] = []
        if config.get("quantization_config"):
            self.complaints.append("quantization_config is set: dequantize the checkpoint first")
        for usual, own in self._renames.items():
            said = [config[key] for key in (own, usual) if config.get(key) is not None]
            if len(said) == 2 and said[0] != said[1]:
                self.complaints.append(f"{own} is {said[0]} beside {usual} {said[1]}")

    def value(self, name: str) -> Any:
        """The config's value under the family's own name or the usual one, else the default, else None."""
        for key in (self._renames.get(name, name), name):
            if key in self._config:
                return self._config[key]
        return self._defaults.get(name)

    def flag(self, name: str) -> bool:
        """A truth value; absent is False."""
        return bool(self.value(name))

    def sizes(self, *names: str) -> tuple[int, ...]:
        """Whole numbers of at least 1.

        Raises:
            ParameterError: one is missing, so nothing else can be judged; all missing ones are named.
        """
        missing = [self._renames.get(name, name) for name in names if self.value(name) is None]
        if missing:
            raise ParameterError(f"model config: missing {', '.join(missing)}")
        self.complaints += [
            f"{self._renames.get(name, name)} is {self.value(name)}, must be at least 1"
            for name in names
            if int(self.value(name)) < 1
        ]
        return tuple(max(1, int(self.value(name))) for name in names)

    def optional(self, name: str) -> float | None:
        """A number, or None where the config says null or nothing."""
        found = self.value(name)
        return None if found is None else float(found)

    def refuse(self, **why: str) -> None:
        """Complain about every named key that is set, with the reason."""
        self.complaints += [
            f"{name} is {self.value(name)!r}: {reason}" for name, reason in why.items() if self.value(name)
        ]

    def activation(self, name: str = "hidden_act") -> Activation:
        """The activation under the key `name`."""
        found = self.value(name)
        if found not in ACTIVATIONS:
            self.complaints.append(f"{name} is {found!r}; allowed: {', '.join(ACTIVATIONS)}")
            return "silu"
        return ACTIVATIONS[found]

    def window(self) -> int | None:
        """`sliding_window`, or None."""
        found = self.value("sliding_window")
        if found is not None and int(found) < 1:
            self.complaints.append(f"sliding_window is {found}, must be at least 1 or null")
        return None if found is None else int(found)

    def layer_types(self, otherwise: Sequence[LayerType]) -> tuple[LayerType, ...]:
        """`layer_types`, or `otherwise` where the config has none."""
        found = self._config.get("layer_types")
        if found is None:
            return tuple(otherwise)
        unknown = sorted({str(kind) for kind in found} - set(LAYER_TYPES))
        if unknown:
            self.complaints.append(f"layer_types has {', '.join(unknown)}; allowed: {', '.join(LAYER_TYPES)}")
        if len(found) != len(otherwise):
            self.complaints.append(f"layer_types has {len(found)} entries for {len(otherwise)} layers")
        if unknown or len(found) != len(otherwise):
            return tuple(otherwise)
        return tuple(found)

    def rope_settings(self) -> dict[str, Any]:
        """`rope_parameters` (transformers 5) or `rope_scaling` (before); empty where neither says anything."""
        new, old = (self._config.get(key) for key in ("rope_parameters", "rope_scaling"))
        if new and old and new != old:
            self.complaints.append(f"rope_parameters {new} and rope_scaling {old} contradict each other")
        return dict(new or old or {})

    def rotary(
        self,
        *,
        head_dim: int,
        max_positions: int,
        settings: Mapping[str, Any] | None = None,
        theta_key: str = "rope_theta",
    ) -> Rotary:
        """The rotation of a model whose layers all turn alike, or of the layers that `settings` is for.

        Args:
            head_dim: numbers of a head.
            max_positions: `max_position_embeddings`.
            settings: in place of `rope_settings()`.
            theta_key: where the config itself had theta before transformers 5.
        """
        given = dict(self.rope_settings() if settings is None else settings)
        theta = self._agreed(given, "rope_theta", key=theta_key)
        share = self._agreed(given, "partial_rotary_factor", key="partial_rotary_factor")
        dim = int(head_dim * (1.0 if share is None else float(share)))
        if not 0 < dim <= head_dim:
            self.complaints.append(f"partial_rotary_factor is {share}, must be above 0 and at most 1")
        elif dim % 2:
            self.complaints.append(
                f"{dim} of a head's {head_dim} numbers would turn, which is odd; rotary embedding needs pairs"
            )
        return read_rotary(
            given,
            theta=float(theta),
            dim=max(2, dim - dim % 2),
            max_positions=max_positions,
            complaints=self.complaints,
        )

    def _agreed(self, given: Mapping[str, Any], name: str, *, key: str) -> Any:
        """From the rope settings or from the config itself; a contradiction is a complaint."""
        outside = next((self._config[k] for k in (self._renames.get(key, key), key) if k in self._config), None)
        if given.get(name) is None:
            return self._defaults.get(key) if outside is None else outside
        if outside is not None and float(outside) != float(given[name]):
            self.complaints.append(f"{key} is {outside} beside {given[name]} in the rope settings")
        return given[name]

    def raise_complaints(self) -> None:
        """Raise what was gathered.

        Raises:
            ParameterError: there is a complaint.
        """
        if self.complaints:
            raise ParameterError(
                "model config: " + "; ".join(dict.fromkeys(self.complaints)),
                hint="convert by tracing (`via: trace`), or a checkpoint whose config asks for none of this",
            )
