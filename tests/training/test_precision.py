"""What each device computes in, and what stands against float8."""

import importlib.util
from dataclasses import replace

import pytest
import torch
from conftest import TINY_MODEL
from rank_functions import train_recorded

from pipeline.errors import ParameterError
from pipeline.training.config import Lora
from pipeline.training.precision import SUPPORT, capability_of, check_precision, mixed_precision
from pipeline.training.start.adapters import add_adapters
from pipeline.training.tasks.model import blocks_of, build_model, model_config
from pipeline.training.updates.float8 import check_float8, float8_layers
from pipeline.training.worker import WorkerContext

FLOAT8_TOLERANCE = 0.02
"""Relative, of the loss after 10 steps against bfloat16; e4m3 has 3 bits of mantissa."""


def allowed(device: str, capability: tuple[int, int] | None = None) -> set[str]:
    found = set()
    for precision in SUPPORT:
        try:
            check_precision(precision, device=device, capability=capability)
        except ParameterError:
            continue
        found.add(precision)
    return found


def test_each_device_has_its_precisions() -> None:
    assert allowed("cpu") == {"float32", "float16"}
    assert allowed("cuda") == {"float32", "float16", "bfloat16", "float8"}  # before a GPU is seen
    assert allowed("cuda", (7, 0)) == {"float32", "float16"}  # V100
    assert allowed("cuda", (8, 0)) == {"float32", "float16", "bfloat16"}  # A100
    assert allowed("cuda", (8, 9)) == allowed("cuda", (9, 0)) == set(SUPPORT)  # L4, H100
    assert capability_of(torch.device("cpu")) is None


def test_a_refusal_says_why_and_what_there_is() -> None:
    with pytest.raises(ParameterError, match="float8 needs CUDA; no CPU multiplies float8") as caught:
        check_precision("float8", device="cpu")
    assert "`precision: float32 or float16`" in caught.value.hint
    with pytest.raises(ParameterError, match=r"capability 8\.9 or more; this one has 8\.0") as caught:
        check_precision("float8", device="cuda", capability=(8, 0))
    assert "float32 or bfloat16 or float16" in caught.value.hint


def test_reductions_and_parameters_are_float32_in_every_precision() -> None:
    gathered = {name: mixed_precision(name).param_dtype for name in SUPPORT}
    assert gathered == {
        "float32": None,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "float8": torch.bfloat16,
    }
    assert {mixed_precision(name).reduce_dtype for name in SUPPORT if name != "float32"} == {torch.float32}


def test_float8_needs_torchao_and_sizes_of_sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(model_config(TINY_MODEL | {"intermediate_size": 40}), seed=0)
    blocks = blocks_of(model)
    assert len(float8_layers(model, blocks)) == 14
    assert "lm_head" not in float8_layers(model, blocks)
    adapted = build_model(model_config(TINY_MODEL), seed=0)
    add_adapters(adapted, Lora(rank=2, targets=("q_proj", "up_proj")))
    assert len(float8_layers(adapted, blocks_of(adapted))) == 14
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ParameterError, match="needs torchao") as caught:
        check_float8(model, blocks)
    assert "[float8]" in caught.value.hint
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ParameterError) as caught:
        check_float8(model, blocks)
    assert "model.layers.0.mlp.gate_proj 40 x 32 (remainders 8 and 0)" in caught.value.message
    assert caught.value.message.endswith("and 1 more are not")
    whole = build_model(model_config(TINY_MODEL), seed=0)
    check_float8(whole, blocks_of(whole))
    with pytest.raises(ParameterError, match="linear layers inside blocks; the model has none"):
        check_float8(whole, [])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_float8_and_bfloat16_learn_alike(make_job, one_rank: WorkerContext, tmp_path) -> None:
    pytest.importorskip("torchao")
    losses = {}
    for precision in ("bfloat16", "float8"):
        job = make_job(precision=precision, steps=10, workspace=tmp_path / precision)
        result, _ = train_recorded(replace(one_rank, device="cuda"), job)
        losses[precision] = result.state.train_loss
    assert losses["float8"] == pytest.approx(losses["bfloat16"], rel=FLOAT8_TOLERANCE)
