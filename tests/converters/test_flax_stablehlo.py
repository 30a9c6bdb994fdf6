"""The exported program runs where only jax is, at sizes it was not exported with."""

import json
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import torch
from decoder_models import tiny_decoder
from safetensors.numpy import load_file

from converters.exporting import export
from pipeline.errors import ConversionError

ALONE = """
import json, sys
from pathlib import Path
import jax, numpy as np
from safetensors.flax import load_file

directory = Path(sys.argv[1])
facts = json.loads((directory / "stablehlo.json").read_text())
program = jax.export.deserialize(bytearray((directory / facts["program"]).read_bytes()))
tokens = np.arange(4 * 19, dtype=np.int32).reshape(4, 19) % 101
inputs = {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
outputs = program.call(load_file(directory / facts["parameters"]), inputs)
np.save(directory / "logits.npy", np.asarray(outputs["logits"]))
loaded = {name.partition(".")[0] for name in sys.modules}
print(json.dumps(sorted(loaded & {"torch", "flax", "pipeline", "converters"})))
"""
# float32 sums in another order: seen 1e-6 of the largest at most.
TOLERANCE = 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen3", "gpt2"])
def test_a_fresh_process_with_jax_alone_computes_what_torch_computes(tmp_path, case):
    model = tiny_decoder(case)
    model.save_pretrained(tmp_path / "saved")
    record = export(tmp_path / "saved", to=tmp_path / "out", format="stablehlo")
    assert record.facts["inputs"]["input_ids"] == {"shape": ["batch", "sequence"], "dtype": "int32"}
    assert record.facts["limits"] == {"sequence": 64}
    assert record.metrics["max_rel_difference"] < TOLERANCE
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) in ([], ["flax"])  # safetensors.flax is named so; it loads jax
    tokens = torch.arange(4 * 19).reshape(4, 19) % 101
    with torch.no_grad():
        wanted = model(tokens).logits.numpy()
    found = np.load(tmp_path / "out" / "logits.npy")
    assert np.abs(found - wanted).max() < TOLERANCE * np.abs(wanted).max()


def test_parameters_are_arguments_and_not_in_the_program(tmp_path):
    model = tiny_decoder("llama")
    model.save_pretrained(tmp_path / "saved")
    export(tmp_path / "saved", to=tmp_path / "out", format="stablehlo", dtype="bfloat16")
    program = (tmp_path / "out" / "model.stablehlo").read_bytes()
    kernel = load_file(tmp_path / "out" / "parameters.safetensors")["layers.0.mlp.up_proj.kernel"]
    assert kernel.dtype == ml_dtypes.bfloat16
    assert kernel.tobytes()[:64] not in program
    facts = json.loads((tmp_path / "out" / "stablehlo.json").read_text())
    assert facts["outputs"]["logits"]["dtype"] == "float32"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "model.stablehlo",
        "parameters.safetensors",
        "stablehlo.json",
    ]


def test_outputs_that_are_no_numbers_are_refused(tmp_path):
    model = tiny_decoder("llama")
    model.model.norm.weight.data[3] = float("nan")
    model.save_pretrained(tmp_path / "saved")
    with pytest.raises(ConversionError, match="differs from the module by inf"):
        export(tmp_path / "saved", to=tmp_path / "out", format="stablehlo")
    assert not (tmp_path / "out").exists()
