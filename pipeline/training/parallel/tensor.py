"""Blocks that several ranks compute together: tensor and sequence parallelism of the Llama family.

Owns the plan: which weights are cut along which dim, and where activations are cut by heads or by tokens. Knows nothing
of FSDP, which cuts the pieces further. The one decision: between a block's products activations are cut by tokens, so
norms and residuals cost memory and time once a group (Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", 2022), and the loss is taken of logits that stay cut by vocabulary.
"""

from collections.abc import Collection

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from pipeline.training.parallel.tied_parameters import tie, tied_names

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types of transformers whose modules have the names that the plan and the stages of a pipeline know."""
_TOKENS, _HEADS = 1, 2
"""Dims of [B, T, ...] and [B, T, heads, head size]."""


def parallelize(
    model: nn.Module, mesh: DeviceMesh, *, takes_whole: Collection[int], gives_whole: Collection[int]
) -> None:
    """Cut the whole model over the ranks of a 1-D mesh, in place.

    Args:
        model: a causal language model of `FAMILIES`; every rank has the same values, or all are on the meta device.
        mesh: the `tensor` axis.
        takes_whole: blocks that are given activations of all tokens; others get this rank's tokens.
        gives_whole: blocks whose output is made whole again.
    """
    tied = tied_names(model)
    decoder = model.get_submodule("model")
    blocks = decoder.get_submodule("layers")
    outer: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(_TOKENS), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, outer)
    for index, block in enumerate(blocks.children()):
        parallelize_module(block, mesh, _block_plan(block))
        if index in takes_whole:
            cut = PrepareModuleInput(
                input_layouts=(Replicate(),), desired_input_layouts=(Shard(_TOKENS),), use_local_output=True
            )
            parallelize_module(block, mesh, cut)
        if index in gives_whole:
            joined = PrepareModuleOutput(output_layouts=(Shard(_TOKENS),), desired_output_layouts=(Replicate(),))
            parallelize_module(block, mesh, joined)
    tie(model, tied)
    # Its operators are DTensors' alone, forward and backward; what is entered here is what the process computes with.
    loss_parallel().__enter__()


def _block_plan(block: nn.Module) -> dict[str, ParallelStyle]:
    by_tokens, whole = Shard(_TOKENS), Replicate()
    plan: dict[str, ParallelStyle] = {
        "input_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": by_tokens}, desired_input_kwarg_layouts={"hidden_states": whole}
        ),
        **{f"self_attn.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")},
        "self_attn.o_proj": RowwiseParallel(output_layouts=by_tokens),
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(by_tokens,), desired_input_layouts=(whole,)),
        **{f"mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")},
        "mlp.down_proj": RowwiseParallel(output_layouts=by_tokens),
    }
    for name in ("q_norm", "k_norm"):  # of Qwen 3, over each head
        if hasattr(block.self_attn, name):
            plan[f"self_attn.{name}"] = SequenceParallel(sequence_dim=_HEADS, use_local_output=True)
    return plan
