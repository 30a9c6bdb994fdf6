"""Which dtype a model is served in, and why; what its weights take."""

from types import SimpleNamespace

import jax
import pytest
from flax import nnx

from pipeline.errors import ParameterError
from pipeline.models.decoders.model import fuse_projections
from pipeline.models.decoders.quantized import quantize_projections
from pipeline.models.registry import describe_config
from pipeline.serving.accelerator.device import allocator_room, choose_dtype, choose_placement, rebuilds_weight
from pipeline.serving.accelerator.weight_bytes import step_bytes, weights_bytes

CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 101,
    "hidden_size": 80,
    "intermediate_size": 120,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
EXPERTS = {**CONFIG, "model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2}
MEBI = 2**20


def decoder(**changes):
    return describe_config({**CONFIG, **changes}).parsed


def choose(asked, *, device="cuda", config=None, limit=None, rebuilds=False):
    return choose_dtype(asked, device=device, config=config, limit=limit, rebuilds=lambda: rebuilds)


def test_auto_is_float32_on_a_cpu_and_says_what_int8_would_bring():
    dtype, reason, warnings = choose("auto", device="cpu", config=decoder())
    assert dtype == "float32" and not warnings
    assert "10 to 40 times slower" in reason and "a quarter of the memory" in reason


def test_auto_on_a_gpu_is_bfloat16_until_it_leaves_no_room():
    config = decoder()
    wide, narrow = (weights_bytes(config, dtype=dtype, device="cuda") for dtype in ("bfloat16", "int8"))
    assert choose("auto", config=config, limit=2 * wide)[0] == "bfloat16"
    dtype, reason, _ = choose("auto", config=config, limit=wide)
    assert dtype == "int8" and "leave no room" in reason
    assert choose("auto", config=config, limit=narrow)[0] == "bfloat16"  # neither fits: refused where memory is judged
    assert choose("auto", config=describe_config(EXPERTS).parsed, limit=MEBI)[0] == "bfloat16"
    assert choose("auto", config=None, limit=1)[0] == "bfloat16"


def test_int8_that_is_asked_for_is_given_with_a_warning_where_it_is_not_faster():
    assert choose("int8", config=decoder()) == ("int8", "asked for", ())
    assert "rebuilds the float weight" in choose("int8", config=decoder(), rebuilds=True)[2][0]
    assert "saves memory, not time" in choose("int8", device="cpu", config=decoder())[2][0]


@pytest.mark.parametrize(("config", "words"), [(None, "no decoder of a family"), (EXPERTS, "a model of experts")])
def test_int8_is_refused_where_a_model_has_no_projections_to_quantize(config, words):
    parsed = None if config is None else describe_config(config).parsed
    with pytest.raises(ParameterError, match=words) as caught:
        choose("int8", config=parsed)
    assert caught.value.hint


def test_the_placement_says_what_is_computed_in():
    _, placement = choose_placement(device="cpu", dtype="int8", config=decoder())
    assert (placement.dtype, placement.compute_dtype) == ("int8", "float32")
    _, plain = choose_placement(device="cpu", dtype="bfloat16")
    assert (plain.dtype, plain.compute_dtype, plain.dtype_reason) == ("bfloat16", "bfloat16", "asked for")


def test_a_processor_that_rebuilds_a_weight_is_found_out_by_its_compiled_memory_use():
    assert rebuilds_weight(jax.devices("cpu")[0], decoder(hidden_size=512, intermediate_size=1024)) is True


def test_the_allocators_own_limit_counts_and_not_what_the_device_has_free():
    stats = {"bytes_limit": 100, "bytes_in_use": 30, "bytes_reserved": 100, "largest_free_block_bytes": 5}
    assert allocator_room(SimpleNamespace(memory_stats=lambda: stats)) == 70
    assert allocator_room(SimpleNamespace(memory_stats=lambda: None)) is None


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_bytes_are_those_of_the_module_that_is_served(dtype, is_tied):
    description = describe_config({**CONFIG, "tie_word_embeddings": is_tied})

    def served():
        model = description.abstract()
        if dtype == "int8":
            return nnx.eval_shape(lambda model: fuse_projections(model), quantize_projections(model))
        return nnx.eval_shape(lambda model: fuse_projections(model, materialize_head=True), model)

    sizes = [leaf.size * (1 if leaf.dtype == "int8" else 2 if dtype == "bfloat16" else 4) for leaf in leaves(served())]
    assert weights_bytes(description.parsed, dtype=dtype, device="cpu") == sum(sizes)


def leaves(model):
    return jax.tree.leaves(nnx.state(model))


def test_a_step_reads_the_layers_the_head_and_of_the_experts_its_own():
    config = decoder()
    table = 101 * 80 * 4
    assert step_bytes(config, dtype="float32", device="cpu") == (
        weights_bytes(config, dtype="float32", device="cpu") - table
    )
    tied = decoder(tie_word_embeddings=True)
    assert step_bytes(tied, dtype="float32", device="cuda") == weights_bytes(tied, dtype="float32", device="cuda")
    experts = describe_config(EXPERTS).parsed
    one = 3 * 80 * 120 * 4
    assert step_bytes(experts, dtype="float32", device="cuda") == (
        weights_bytes(experts, dtype="float32", device="cuda") - table - 2 * 4 * one
    )
    assert step_bytes(config, dtype="int8", device="cuda") < step_bytes(config, dtype="bfloat16", device="cuda") * 0.6
    assert step_bytes(config, dtype="int8", device="cpu") == step_bytes(config, dtype="float32", device="cpu")
