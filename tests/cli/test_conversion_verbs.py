"""`pipeline convert`, `diff` and `parity` as a user meets them: what is printed, what it ends with, what is left."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from transformers import LlamaConfig

from pipeline.cli.main import main
from pipeline.models.checkpoint import read_parameters, save_parameters

PROJECT = Path(__file__).resolve().parents[2]
SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def tensors_of(config):
    rng = np.random.default_rng(3)
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.head_dim
    shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}"
        shapes |= {f"{layer}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        shapes |= {
            f"{layer}.self_attn.q_proj.weight": (config.num_attention_heads * heads, hidden),
            f"{layer}.self_attn.k_proj.weight": (config.num_key_value_heads * heads, hidden),
            f"{layer}.self_attn.v_proj.weight": (config.num_key_value_heads * heads, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, config.num_attention_heads * heads),
            f"{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"{layer}.mlp.up_proj.weight": (inner, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inner),
        }
    return {
        name: (rng.normal(size=shape) * 0.2 + 0.5 * (len(shape) == 1)).astype("f4") for name, shape in shapes.items()
    }


def write_model(directory, **sizes):
    directory.mkdir(parents=True)
    config = LlamaConfig(architectures=["LlamaForCausalLM"], **{**SIZES, **sizes})
    config.save_pretrained(directory)
    save_file(tensors_of(config), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def flax(checkpoint):
    directory = checkpoint.parent / "flax"
    assert ended("convert", checkpoint, "--to", directory) == 0
    return directory


def ended(*words):
    """The exit code of `pipeline WORDS`, run in this process."""
    before, sys.argv = sys.argv, ["pipeline", *map(str, words)]
    try:
        main()
    except SystemExit as end:
        return end.code
    finally:
        sys.argv = before
    raise AssertionError("main returns by exiting")


def said(capsys, *words):
    """Exit code, standard output, standard error."""
    capsys.readouterr()
    code = ended(*words)
    return code, *capsys.readouterr()


def test_convert_says_what_was_made(capsys, checkpoint, tmp_path):
    code, out, _ = said(capsys, "convert", checkpoint, "--to", tmp_path / "flax")
    assert code == 0
    lines = {line.partition("  ")[0]: line.partition("  ")[2].strip() for line in out.splitlines()}
    assert lines["family"] == "llama"
    assert lines["road"] == "family"
    assert "config.json names the family llama" in lines["road reason"]
    assert lines["tensors"] == "20"
    assert lines["parameters"] == "37,344"
    assert lines["bytes"] == "149 kB"
    assert lines["to"] == str(tmp_path / "flax")
    assert "warning: no tokenizer.json beside the checkpoint" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["flax"]


def test_convert_as_json_is_one_document(capsys, checkpoint, tmp_path):
    code, out, err = said(capsys, "convert", checkpoint, "--to", tmp_path / "flax", "--dtype", "bfloat16", "--json")
    value = json.loads(out)
    assert (code, err) == (0, "")
    assert value["bytes"] == 2 * value["parameters"] == 74_688
    assert value["source_format"] == "safetensors"
    assert any("rounded by the cast" in warning for warning in value["warnings"])
    assert {leaf.dtype.name for leaf in read_parameters(tmp_path / "flax" / "params").values()} == {"bfloat16"}


def test_a_plan_reads_headers_and_writes_nothing(capsys, checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = said(capsys, "convert", checkpoint, "--check", "--dtype", "bfloat16", "--json")
    value = json.loads(out)
    assert code == 0
    assert (value["format"], value["family"], value["road"]) == ("safetensors", "llama", "family")
    assert value["num_tensors_by_dtype"] == {"float32": 20}
    assert value["num_source_bytes"] == 2 * value["num_target_bytes"]
    assert (value["largest_tensor"], value["largest_tensor_bytes"]) == ("model.embed_tokens.weight", 101 * 48 * 4)
    assert value["peak_memory_bytes"] >= 2 * value["largest_tensor_bytes"]
    assert value["facts"]["num_key_value_heads"] == 2
    assert value["refusal"] == ""
    assert list(tmp_path.iterdir()) == []


def test_a_plan_says_everything_that_would_be_refused(capsys, checkpoint, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    tensors = tensors_of(LlamaConfig(**SIZES))
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((72, 47), "f4")
    save_file(tensors, broken / "model.safetensors")
    code, out, _ = said(capsys, "convert", broken, "--check")
    assert code == 1
    assert "norm.scale: nothing fills it" in out
    assert "model.layers.0.mlp.up_proj.weight (72, 47) float32" in out
    code, _, err = said(capsys, "convert", broken, "--to", tmp_path / "flax")
    assert code == 1
    assert "norm.scale: nothing fills it" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken"]


def test_the_plan_of_the_way_back_is_what_the_record_says(capsys, flax, tmp_path):
    code, out, _ = said(capsys, "convert", flax, "--format", "safetensors", "--check", "--json")
    value = json.loads(out)
    assert code == 0
    assert (value["format"], value["family"], value["num_tensors"]) == ("flax", "llama", 20)
    assert value["num_target_bytes"] == value["num_source_bytes"] == 149_376


def test_a_flax_directory_goes_back_to_the_same_checkpoint(capsys, checkpoint, flax, tmp_path):
    code, out, _ = said(capsys, "convert", flax, "--to", tmp_path / "back", "--format", "safetensors")
    assert code == 0
    assert "model.safetensors" in out
    assert ended("diff", checkpoint, tmp_path / "back") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["back"]


def test_stablehlo_says_which_sizes_may_vary(capsys, flax, tmp_path):
    code, out, _ = said(capsys, "convert", flax, "--to", tmp_path / "hlo", "--format", "stablehlo", "--json")
    value = json.loads(out)
    assert code == 0
    assert value["inputs"]["input_ids"] == {"shape": ["batch", "sequence"], "dtype": "int32"}
    assert "model.stablehlo" in value["files"]


def test_parity_prints_each_layer_and_writes_a_page(capsys, checkpoint, flax, tmp_path):
    code, out, _ = said(capsys, "parity", checkpoint, flax, "--continued-tokens", 4, "--report", tmp_path / "report")
    assert code == 0
    assert "tensors: 20 of 20 come back bit for bit" in out
    rows = [line.split() for line in out.splitlines() if line.startswith(("embed_tokens", "layers.", "norm"))]
    assert [row[0] for row in rows] == ["embed_tokens", "layers.0", "layers.1", "norm"]
    assert all(float(row[1]) < 1e-5 and "|" in row[3] for row in rows)
    assert "continuations: 100.0%" in out
    assert out.rstrip().splitlines()[-2:] == ["all levels hold", f"report: {tmp_path / 'report' / 'parity.html'}"]
    assert json.loads((tmp_path / "report" / "parity.json").read_text())["passed"] is True
    page = (tmp_path / "report" / "parity.html").read_text()
    assert "passed" in page
    assert "<svg" in page


def test_parity_of_a_wrong_model_ends_with_1_and_names_the_layer(capsys, checkpoint, flax, tmp_path):
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    for name in ("config.json", "conversion.json"):
        (wrong / name).write_bytes((flax / name).read_bytes())
    leaves = read_parameters(flax / "params")
    leaves["layers.1.attention.k_proj.kernel"] = np.roll(leaves["layers.1.attention.k_proj.kernel"], 6, axis=1)
    save_parameters(wrong / "params", leaves)
    code, out, _ = said(capsys, "parity", checkpoint, wrong, "--continued-tokens", 0)
    assert code == 1
    assert "does not hold: tensors: 1 of 20" in out
    assert "does not hold: blocks: layers.1 (torch: model.layers.1) is the first" in out
    assert out.rstrip().endswith("not the same")
    code, out, _ = said(capsys, "parity", checkpoint, wrong, "--continued-tokens", 0, "--json")
    value = json.loads(out)
    assert (code, value["passed"], value["first_block_over_limit"]) == (1, False, "layers.1")


def test_diff_of_a_checkpoint_and_its_flax_model_ends_with_0(capsys, checkpoint, flax):
    code, out, _ = said(capsys, "diff", checkpoint, flax)
    assert code == 0
    assert "20 of 20 tensors that both have are the same bit for bit" in out
    assert out.rstrip().endswith("the same")


def test_diff_shows_each_difference_in_a_table_and_ends_with_1(capsys, checkpoint, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    tensors = tensors_of(LlamaConfig(**SIZES))
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"][1, 2] += 0.5
    save_file(tensors, other / "model.safetensors")
    code, out, _ = said(capsys, "diff", checkpoint, other)
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.startswith("model.")}
    assert code == 1
    assert rows["model.norm.weight"] == ["missing", "float32", "[48]", "-", "-", "-"]
    assert rows["model.layers.0.mlp.up_proj.weight"][-2:] == ["1", "0.5"]
    assert "not the same: 2 differences" in out
    code, out, _ = said(capsys, "diff", checkpoint, other, "--json")
    value = json.loads(out)
    assert (code, value["same"], len(value["differences"])) == (1, False, 2)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["convert", "TMP/absent", "--to", "TMP/x"], "absent: no such file or directory"),
        (["convert", "TMP/flaxx", "--to", "TMP/x"], "did you mean TMP/flax?"),
        (["convert", "TMP", "--to", "TMP/x"], "holds no model that a reader knows; found: "),
        (["convert", "TMP/llama/config.json", "--to", "TMP/x"], "not a file that a reader knows"),
        (["convert", "TMP/llama"], "--to is missing"),
        (["convert", "TMP/llama", "--to", "TMP/flax"], "exists and is not empty; nothing is ever overwritten"),
        (["convert", "TMP/llama", "--to", "TMP/llama/config.json"], "is a file; a converted model is a directory"),
        (["convert", "TMP/llama", "--to", "TMP/x", "--format", "orbx"], "did you mean 'orbax'?"),
        (["convert", "TMP/llama", "--to", "TMP/x", "--via", "traced"], "allowed: auto, family, trace"),
        (["convert", "TMP/llama", "--to", "TMP/x", "--dtype", "fp8"], "allowed: keep, float32, bfloat16"),
        (["convert", "TMP/flax", "--to", "TMP/x"], "allowed formats for it: safetensors, onnx, stablehlo"),
        (
            ["convert", "TMP/flax", "--to", "TMP/x", "--format", "safetensors", "--via", "trace"],
            "--via trace chooses the road to Flax",
        ),
        (["convert", "TMP/llama", "--to", "TMP/x", "--int8"], "--opset and --int8 belong to --format onnx"),
        (["diff", "TMP/llama", "TMP/absent"], "absent: no such file or directory"),
        (["diff", "TMP/llama", "TMP/llama/config.json"], "not a file that a reader knows"),
        (["parity", "TMP/llama", "TMP/llama"], "not a Flax model directory; one has params/"),
        (["parity", "TMP/llama", "TMP/flax", "--report", "TMP/llama/config.json"], "cannot be a directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_command_ends_with_2_and_says_what_is_right(capsys, checkpoint, flax, words, complaint):
    folder = str(checkpoint.parent)
    before = sorted(checkpoint.parent.rglob("*"))
    code, out, err = said(capsys, *(word.replace("TMP", folder) for word in words))
    assert (code, out) == (2, "")
    assert complaint.replace("TMP", folder) in err
    assert sorted(checkpoint.parent.rglob("*")) == before


def test_interrupting_a_conversion_leaves_nothing_behind(tmp_path):
    """Ctrl-C in the middle of the tensors: the hidden directory that was being written is gone."""
    checkpoint = write_model(tmp_path / "big", vocab_size=400_001, num_hidden_layers=24)
    (tmp_path / "target").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeline", "convert", str(checkpoint), "--to", str(tmp_path / "target" / "flax")],
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not any((tmp_path / "target").iterdir()) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "error: interrupted" in err
    assert list((tmp_path / "target").iterdir()) == []
