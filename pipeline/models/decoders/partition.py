"""Which mesh axis each dimension of a decoder's leaves lies on, and which mesh sizes a model allows.

Owns the rules from a leaf's path to mesh axes, as values. Loads no framework, so a deployment is judged before a
process starts; knows nothing of devices. The one decision: a device gets whole heads and a stretch of the feed-forward
network, so each layer exchanges exactly two sums (after `o_proj` and after `down_proj`), as in Megatron-LM (Shoeybi et
al., 2019, https://arxiv.org/abs/1909.08053); what does not divide evenly is kept whole on every device.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeline.models.decoders.config import DecoderConfig

TENSOR = "tensor"
"""The axis along which one model is divided."""
Axes = tuple[str | None, ...]
"""A mesh axis or None for each dimension; dimensions that are not named are whole."""

_COLUMNS = re.compile(r"\.(q|k|v|qkv|gate|up|gate_up)_proj\.(kernel|kernel_scale|bias)$")
_ROWS = re.compile(r"\.(o|down)_proj\.kernel$")
_HEADS = re.compile(r"\.attention\.[qk]_norm\.(scale|bias)$")
_TABLE = re.compile(r"(^|\.)embed_tokens\.embedding$")
_OUTPUT = re.compile(r"(^|\.)lm_head\.(kernel|kernel_scale|bias)$")
_KEY_VALUE = re.compile(r"\.attention\.([kv]_proj\.(kernel|kernel_scale|bias)|k_norm\.(scale|bias))$")


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshSize:
    """How many devices one replica computes on, and how."""

    tensor: int = 1
    """Devices that hold one copy of the model together."""
    data: int = 1
    """Copies of the model, each with its share of the slots."""
    hosts: int = 1
    """Machines over which the devices are spread, the same number on each."""

    @property
    def num_devices(self) -> int:
        """Of all hosts together."""
        return self.tensor * self.data

    @property
    def devices_per_host(self) -> int:
        """Of one actor."""
        return self.num_devices // self.hosts


def leaf_axes(path: str, shape: Sequence[int], *, config: DecoderConfig, tensor: int) -> Axes:
    """The axes of the leaf at a dotted path.

    Args:
        path: as in a checkpoint, or of the fused projections of serving.
        shape: of the leaf as it is placed.
        config: `widened` already.
        tensor: size of the axis.
    """
    if tensor == 1:
        return ()
    last = (*(None,) * (len(shape) - 1), TENSOR)
    if _COLUMNS.search(path) or (_HEADS.search(path) and config.qk_norm == "full"):
        return last if shape[-1] % tensor == 0 else ()
    if _ROWS.search(path):  # experts are stacked in front of [in, out]
        return (*(None,) * (len(shape) - 2), TENSOR) if shape[-2] % tensor == 0 else ()
    if _TABLE.search(path):
        return (TENSOR,) if shape[0] % tensor == 0 else ()
    if _OUTPUT.search(path):
        return last if shape[-1] % tensor == 0 else ()
    return ()


def cache_axes(*, tensor: int) -> Axes:
    """The axes of keys or values [slots, heads, positions, head_dim]."""
    return () if tensor == 1 else (None, TENSOR)


def num_copies_of_heads(config: DecoderConfig, *, tensor: int) -> int:
    """How often each key-value head is laid down, so that every device has one of its own."""
    return max(1, tensor // config.num_key_value_heads)


def widened(config: DecoderConfig, *, tensor: int) -> DecoderConfig:
    """The config of the model as it is placed: with as many key-value heads as devices where it has fewer."""
    copies = num_copies_of_heads(config, tensor=tensor)
    return config if copies == 1 else replace(config, num_key_value_heads=copies * config.num_key_value_heads)


def is_key_value(path: str, *, config: DecoderConfig) -> bool:
    """True for a leaf whose last dimension is key-value heads times head_dim."""
    match = _KEY_VALUE.search(path)
    return match is not None and ("proj" in match[1] or config.qk_norm == "full")


def allowed_tensor_sizes(config: DecoderConfig, *, largest: int = 64) -> tuple[int, ...]:
    """Every size of the tensor axis, up to `largest`, that gives each device its own heads and feed-forward stretch."""
    return tuple(size for size in range(1, largest + 1) if not _undivided(config, size))


def why_not(config: DecoderConfig, mesh: MeshSize, *, slots: int | None) -> list[str]:
    """All that keeps a model from being served on a mesh, in words; empty where nothing does."""
    complaints = []
    undivided = _undivided(config, mesh.tensor)
    if undivided:
        allowed = ", ".join(str(size) for size in allowed_tensor_sizes(config))
        complaints.append(
            f"mesh.tensor is {mesh.tensor}, which does not divide {', '.join(undivided)} of this {config.family}; "
            f"allowed: {allowed}"
        )
    if slots is not None and slots % mesh.data:
        complaints.append(
            f"mesh.data is {mesh.data}, which does not divide the {slots} slots; use slots: "
            f"{max(1, slots // mesh.data) * mesh.data}"
        )
    if mesh.num_devices % mesh.hosts:
        complaints.append(
            f"mesh.hosts is {mesh.hosts}, which does not divide the {mesh.num_devices} devices (tensor x data)"
        )
    if mesh.hosts > 1 and mesh.data > 1:
        complaints.append(
            f"mesh.data is {mesh.data} with {mesh.hosts} hosts; copies of a model that spans hosts are replicas: use "
            f"mesh.data: 1 and replicas: {mesh.data}"
        )
    return complaints


def _undivided(config: DecoderConfig, tensor: int) -> list[str]:
    heads = config.num_key_value_heads
    sizes = {"the {} query heads": config.num_attention_heads}
    if config.experts is None or not all(layer.has_experts for layer in config.layers):
        sizes["the feed-forward size {}"] = config.intermediate_size
    if config.experts is not None:
        sizes["the experts' feed-forward size {}"] = config.experts.intermediate_size
    found = [text.format(size) for text, size in sizes.items() if size % tensor]
    if heads % tensor and tensor % heads:
        found.append(f"the {heads} key-value heads (nor is it a multiple of them)")
    return found
