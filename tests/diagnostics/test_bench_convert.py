"""`pipeline bench convert` measures a real conversion against its input and output."""

from converters.conversion import convert
from pipeline.diagnostics.bench_convert import BAR, measure, write_random
from pipeline.models.checkpoint import load_model

CONFIG = {
    "model_type": "llama",
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "architectures": ["LlamaForCausalLM"],
}


def test_both_sides_are_measured_in_turns_and_leave_nothing(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    write_random(tmp_path / "checkpoint", config=CONFIG)
    result = measure(tmp_path / "checkpoint", name="tiny", rounds=2, scratch=tmp_path)
    (row,) = result.rows
    assert row.bar == BAR
    assert row.ours > 0 and row.peer > 0
    assert len(result.machine["ours_seconds"]) == len(result.machine["peer_seconds"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_the_random_checkpoint_is_a_model(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    write_random(tmp_path / "checkpoint", config=CONFIG)
    manifest = convert(tmp_path / "checkpoint", to=tmp_path / "flax")
    assert manifest.num_source_tensors == manifest.num_target_leaves == 20
    load_model(tmp_path / "flax", dtype=None)
