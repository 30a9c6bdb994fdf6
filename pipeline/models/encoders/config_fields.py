"""Reading the fields of a transformers config, all complaints at once.

Owns what every encoder's config asks alike: sizes, choices, the head that `architectures` names, the number of labels.
Loads no framework and knows no family. The one decision: a field that is missing takes the default of transformers, a
field that the module cannot compute is refused, and nothing is refused before everything has been read.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.errors import ParameterError, nearest_name

ACTIVATIONS = (
    "gelu",
    "gelu_fast",
    "gelu_new",
    "gelu_python",
    "gelu_pytorch_tanh",
    "quick_gelu",
    "relu",
    "silu",
    "swish",
    "tanh",
)
"""The names of transformers that the modules compute; `activations.py` has the functions."""
POOLER_KEY = "add_pooling_layer"
"""In `config.json` of a base model that was saved without its pooler; transformers takes it as an argument."""
DEFAULT_NUM_LABELS = 2


class ConfigFields:
    """The fields of one config; ask for each, then call `check`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self.complaints: list[str] = []
        if config.get("quantization_config"):
            self.complaints.append("quantization_config is set: dequantize the checkpoint first")

    def part(self, *names: str) -> "ConfigFields":
        """The config inside this one under the first of `names` that is there; empty where none is."""
        for name in names:
            value = self._config.get(name)
            if isinstance(value, Mapping) and value:
                return ConfigFields(value)
            if value:
                self.complaints.append(f"{name} is {value!r}, must be a mapping")
        return ConfigFields({})

    def size(self, name: str, default: int) -> int:
        """A number of at least 1."""
        value = self._config.get(name)
        value = default if value is None else value
        if type(value) is int and value >= 1:
            return value
        self.complaints.append(f"{name} is {value!r}, must be a whole number of at least 1")
        return 1

    def heads(self, name: str, default: int, *, of: str, size: int) -> int:
        """A number of heads that divides the hidden `size`, whose key is `of`."""
        num = self.size(name, default)
        self.require(size % num == 0, f"{of} {size} is no multiple of {name} {num}")
        return num

    def sizes(self, name: str, default: Sequence[int]) -> tuple[int, ...]:
        """Several numbers of at least 1."""
        value = self._config.get(name)
        value = default if value is None else value
        found = tuple(value) if isinstance(value, list | tuple) else ()
        if found and all(type(size) is int and size >= 1 for size in found):
            return found
        self.complaints.append(f"{name} is {value!r}, must be a list of whole numbers of at least 1")
        return (1,)

    def pair(self, name: str, default: int) -> tuple[int, int]:
        """Height and width; one number means both."""
        value = self._config.get(name)
        value = default if value is None else value
        found = tuple(value) if isinstance(value, list | tuple) else (value, value)
        if len(found) == 2 and all(type(size) is int and size >= 1 for size in found):
            return found[0], found[1]
        self.complaints.append(f"{name} is {value!r}, must be a number of at least 1 or two of them")
        return 1, 1

    def number(self, name: str, default: float) -> float:
        """A number."""
        value = self._config.get(name)
        try:
            return float(default if value is None else value)
        except (TypeError, ValueError, OverflowError):
            self.complaints.append(f"{name} is {value!r}, must be a number")
            return default

    def flag(self, name: str, *, default: bool) -> bool:
        """True or false."""
        value = self._config.get(name)
        return default if value is None else bool(value)

    def token(self, name: str, default: int) -> int:
        """A token id."""
        value = self._config.get(name)
        try:
            return default if value is None else int(value)
        except (TypeError, ValueError, OverflowError):
            self.complaints.append(f"{name} is {value!r}, must be one token id")
            return default

    def choice(self, name: str, allowed: Sequence[str], *, default: str) -> str:
        """One of `allowed`."""
        value = self._config.get(name)
        found = default if value is None else str(value)
        if found not in allowed:
            guess = nearest_name(found, allowed)
            self.complaints.append(
                f"{name} is {found!r}; allowed: {', '.join(allowed)}" + (f"; did you mean {guess!r}?" if guess else "")
            )
        return found

    def activation(self, name: str, *, default: str) -> str:
        """An activation that the modules compute."""
        return self.choice(name, ACTIVATIONS, default=default)

    def architecture(self, allowed: Sequence[str]) -> str:
        """The one class that `architectures` names: it decides the head."""
        names = self._config.get("architectures")
        names = names if isinstance(names, list | tuple) else ()
        found = str(names[0]) if names else ""
        if found not in allowed:
            guess = nearest_name(found, allowed)
            self.complaints.append(
                f"architectures is {list(names)!r}; its first name decides the head and must be one of "
                f"{', '.join(allowed)}" + (f"; did you mean {guess!r}?" if guess else "")
            )
        return found

    def num_labels(self) -> int:
        """Classes of a classifier: transformers keeps their names, and neither names nor number where there are two."""
        names = self._config.get("id2label")
        return len(names) if isinstance(names, Mapping) and names else self.size("num_labels", DEFAULT_NUM_LABELS)

    def refuse(self, name: str, *, unless: Sequence[Any], why: str) -> None:
        """Complain where the field asks for something else than these values."""
        value = self._config.get(name)
        if value is not None and value not in unless:
            self.complaints.append(f"{name} is {value!r}: {why}")

    def require(self, holds: bool, complaint: str) -> None:
        """Complain where the condition does not hold."""
        if not holds:
            self.complaints.append(complaint)

    def check(self) -> None:
        """Raise every complaint at once.

        Raises:
            ParameterError: there is one.
        """
        if self.complaints:
            raise ParameterError("model config: " + "; ".join(self.complaints))
