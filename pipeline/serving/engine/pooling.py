"""From hidden states of tokens to one vector a text.

Owns what the files of sentence-transformers beside a model say of its pooling, and the formulas. Knows nothing of
requests. The one decision: a module that these files name and that is not computed here is a refusal, never left out;
where there are no such files a text is the mean of its tokens.

Shape suffixes: B batch, T tokens, D hidden size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pipeline.errors import ArtifactError, ParameterError
from pipeline.models.json_file import read_json

MODULES_FILE = "modules.json"
LENGTH_FILE = "sentence_bert_config.json"
_POOLING = "1_Pooling"
_MODES = ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens")
"""Those computed here, in the order in which sentence-transformers joins them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pooling:
    """How a text's vector is made."""

    modes: tuple[str, ...] = ("mean_tokens",)
    is_normalized: bool = False
    """To length 1."""
    max_tokens: int | None = None
    """Longest text the model was trained for, where the files say."""
    reason: str = f"no {MODULES_FILE}: the mean of the tokens"

    @classmethod
    def read(cls, directory: Path) -> "Pooling":
        """What the model directory says.

        Raises:
            ArtifactError: a file is malformed.
            ParameterError: it asks for a module or a mode that is not computed here; lists all.
        """
        path = directory / MODULES_FILE
        if not path.is_file():
            return cls(max_tokens=_max_tokens(directory))
        complaints: list[str] = []
        modes: tuple[str, ...] = ()
        is_normalized = False
        try:
            for module in _json(path):
                kind = str(module["type"]).rpartition(".")[2]
                if kind == "Pooling":
                    modes = _modes(_json(directory / (module["path"] or _POOLING) / "config.json"), complaints)
                elif kind == "Normalize":
                    is_normalized = True
                elif kind != "Transformer":
                    complaints.append(f"the module {module['type']}")
        except (KeyError, TypeError, AttributeError) as error:
            raise ArtifactError(f"{path}: not a list of modules: {type(error).__name__}: {error}") from error
        if not modes and not complaints:
            complaints.append("no pooling")
        if complaints:
            raise ParameterError(
                f"{directory}: its embeddings ask for {', '.join(complaints)}, which is not computed here",
                hint=f"computed are the pooling modes {', '.join(_MODES)} and Normalize",
            )
        return cls(
            modes=modes,
            is_normalized=is_normalized,
            max_tokens=_max_tokens(directory),
            reason=f"as {MODULES_FILE} says",
        )

    def __call__(self, hidden_BTD: jax.Array, mask_BT: jax.Array) -> jax.Array:
        """float32 [B, D * modes] of hidden states and a mask of ones where a token counts."""
        hidden_BTD = hidden_BTD.astype(jnp.float32)
        weights_BT1 = mask_BT.astype(jnp.float32)[..., None]
        count_B1 = jnp.maximum(weights_BT1.sum(axis=1), 1e-9)
        sum_BD = (hidden_BTD * weights_BT1).sum(axis=1)
        made = {
            "cls_token": lambda: hidden_BTD[:, 0],
            "mean_tokens": lambda: sum_BD / count_B1,
            "max_tokens": lambda: jnp.where(weights_BT1 > 0, hidden_BTD, -jnp.inf).max(axis=1),
            "mean_sqrt_len_tokens": lambda: sum_BD / jnp.sqrt(count_B1),
        }
        vectors_BD = jnp.concatenate([made[mode]() for mode in self.modes], axis=-1)
        if self.is_normalized:
            # As torch.nn.functional.normalize does.
            vectors_BD /= jnp.maximum(jnp.linalg.norm(vectors_BD, axis=-1, keepdims=True), 1e-12)
        return vectors_BD


def _modes(config: Mapping[str, Any], complaints: list[str]) -> tuple[str, ...]:
    """The modes of a pooling config: `pooling_mode_mean_tokens: true`, or `pooling_mode: mean` in newer files."""
    asked = [
        name.removeprefix("pooling_mode_")
        for name, value in config.items()
        if name.startswith("pooling_mode_") and value
    ]
    short = {mode.removesuffix("_tokens").removesuffix("_token"): mode for mode in _MODES}
    if isinstance(config.get("pooling_mode"), str):
        asked += [short.get(name, name) for name in config["pooling_mode"].split("+")]
    complaints += [f"the pooling mode {name}" for name in asked if name not in _MODES]
    return tuple(mode for mode in _MODES if mode in asked)


def _max_tokens(directory: Path) -> int | None:
    path = directory / LENGTH_FILE
    if not path.is_file():
        return None
    config = _json(path)
    if not isinstance(config, dict):
        raise ArtifactError(f"{path}: must be a JSON object, found {type(config).__name__}")
    value = config.get("max_seq_length")
    return value if isinstance(value, int) and value > 0 else None


def _json(path: Path) -> Any:
    try:
        return read_json(path)
    except ValueError as error:
        raise ArtifactError(f"{path}: cannot be read: {error}") from error
