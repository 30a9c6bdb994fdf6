"""LoRA: adapters beside the linear layers of a frozen model (Hu et al., "LoRA", 2021).

Owns where adapters go, their first values, their way back into the weights and the files that peft reads. Knows nothing
of sharding or steps. The one decision: peft's own layers train, and merging is the formula of the paper on one tensor
at a time, so a model of any size is merged without being loaded.

`W' = W + alpha / rank * B A`, with A [rank, in] and B [out, rank].

Imported by name, where a run has adapters: peft takes 2.7 s to import.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.numpy import save_file
from torch import nn

from pipeline.errors import ParameterError, nearest_name
from pipeline.training.config import Lora
from pipeline.training.parallel.tied_parameters import tied_names
from pipeline.training.start.weights import base_name, is_adapter

ADAPTER_DIRECTORY = "adapter"
_NAME = "default"
"""peft's name of the only adapter; it is no part of the names that it stores."""
_PREFIX = "base_model.model."
"""Before every name that peft stores."""


def add_adapters(model: nn.Module, lora: Lora) -> tuple[str, ...]:
    """Put an adapter beside each target, in place, and freeze everything else.

    Returns:
        The layers that have one.

    Raises:
        ParameterError: as of `target_layers`.
    """
    layers = target_layers(model, lora)
    inject_adapter_in_model(_config(lora, layers), model)
    return layers


def target_layers(model: nn.Module, lora: Lora) -> tuple[str, ...]:
    """Names of the linear layers that get an adapter: those that end in a target, or all but the head's.

    Raises:
        ParameterError: a target is the end of no linear layer's name, or is a head tied to the embedding; names all.
    """
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    get_head = getattr(model, "get_output_embeddings", lambda: None)
    head = get_head()
    if not lora.targets:
        inner = [name for name in linear if model.get_submodule(name) is not head]
        if not inner:
            raise ParameterError("lora: the model has no linear layer that could have an adapter")
        return tuple(inner)
    ends = {name: [target for target in lora.targets if f".{name}".endswith(f".{target}")] for name in linear}
    matched = {target for targets in ends.values() for target in targets}
    wrong = [target for target in lora.targets if target not in matched]
    if wrong:
        allowed = sorted({name.rpartition(".")[2] for name in linear})
        guesses = [f"{target!r} (did you mean {nearest_name(target, allowed)!r}?)" for target in wrong]
        raise ParameterError(
            f"lora.targets: no linear layer's name ends in {', '.join(guesses)}",
            hint=f"allowed: {', '.join(allowed)}; leave `targets` out for all but the head",
        )
    tied = [name for name, targets in ends.items() if targets and _is_tied(model, name)]
    if tied:
        raise ParameterError(
            f"lora.targets: {', '.join(tied)} has the weight of the embedding (tie_word_embeddings: true); an adapter "
            "would change the head and not the embedding, and no plain model has both under one name",
            hint=f"leave {', '.join(tied)} out of `targets`",
        )
    return tuple(name for name, targets in ends.items() if targets)


def _is_tied(model: nn.Module, layer: str) -> bool:
    """True where another module has the layer's weight too."""
    tied = tied_names(model)
    return f"{layer}.weight" in {*tied, *tied.values()}


def draw_adapter(name: str, shape: tuple[int, ...], *, seed: int) -> torch.Tensor:
    """The first value of an adapter's parameter: B is zero, A uniform as `nn.Linear` draws it (peft's own choice).

    Depends on `seed` and the name alone, so neither on the world size nor on which layers have adapters.
    """
    if ".lora_B." in name:
        return torch.zeros(shape)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
    return nn.init.kaiming_uniform_(torch.empty(shape), a=math.sqrt(5), generator=generator)


def adapter_pairs(names: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """(A, B) by the name of the weight that they change, of the parameters of a trained model."""
    ends = (f".lora_A.{_NAME}.weight", f".lora_B.{_NAME}.weight")
    layers = [name.removesuffix(ends[0]) for name in names if name.endswith(ends[0])]
    return {f"{layer}.weight": (layer + ends[0], layer + ends[1]) for layer in layers}


def merge(
    weight: npt.NDArray[np.float32], *, a: npt.NDArray[np.float32], b: npt.NDArray[np.float32], lora: Lora
) -> npt.NDArray[np.float32]:
    """`weight` [out, in] with its adapter A [rank, in], B [out, rank] in it; float32."""
    return weight + np.float32(lora.alpha / lora.rank) * (b @ a)


def write_adapter(directory: Path, tensors: Mapping[str, npt.NDArray[np.float32]], lora: Lora, *, base: str) -> None:
    """Write what `peft.PeftModel.from_pretrained` loads onto the base model.

    Args:
        directory: exists.
        tensors: the parameters of all adapters, by their names in the trained model.
        lora: how they were made.
        base: where the base model came from, for a reader.
    """
    layers = {name.rpartition(".lora_A.")[0] for name in tensors if ".lora_A." in name}
    config = _config(lora, lora.targets or {layer.rpartition(".")[2] for layer in layers})
    config.base_model_name_or_path = base
    config.inference_mode = True
    config.save_pretrained(directory)
    described = directory / "adapter_config.json"
    values = json.loads(described.read_text())
    values["target_modules"] = sorted(values["target_modules"])  # peft keeps a set, whose order differs by process
    described.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
    stored = {
        _PREFIX + base_name(name).replace(f".{_NAME}.", "."): np.ascontiguousarray(value)
        for name, value in tensors.items()
        if is_adapter(name)
    }
    save_file(stored, directory / "adapter_model.safetensors", metadata={"format": "pt"})


def _config(lora: Lora, targets: Iterable[str]) -> LoraConfig:
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(targets),
        bias="none",
        task_type="CAUSAL_LM",
    )
