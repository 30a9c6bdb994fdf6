"""Every family, forward and back: three levels of parity, and a checkpoint that is the same again."""

import pytest
import torch
import transformers
from decoder_models import CASES, tiny_decoder
from tiny_encoders import MODELS, tiny

from converters.conversion import convert
from converters.difference import diff
from converters.exporting import export
from converters.families.registry import TABLES
from converters.parity import check_parity

pytestmark = pytest.mark.slow

DECODERS = {getattr(transformers, name).config_class.model_type: case for case, (name, _) in reversed(CASES.items())}
ENCODERS = {getattr(transformers, name).config_class.model_type: case for case, (name, _) in reversed(MODELS.items())}
# Of the largest value of a block or an output; seen 4.3e-6 for a pooler of RoBERTa, 9.1e-6 for Gemma 3's logits.
BLOCK_ERROR = 1e-5
OUTPUT_ERROR = 2e-5


def gemma3():
    """The text half of a model that also sees images; what sees is carried along."""
    config = transformers.Gemma3Config(
        text_config={**CASES["gemma3"][1], "final_logit_softcapping": None},
        vision_config={
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
        },
        mm_tokens_per_image=4,
        image_token_index=205,
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model.eval()


OTHERS = {"gemma3": gemma3}


def made(model_type):
    if model_type in OTHERS:
        return OTHERS[model_type]()
    return tiny_decoder(DECODERS[model_type]) if model_type in DECODERS else tiny(ENCODERS[model_type])


def test_every_family_has_a_case():
    assert set(TABLES) == set(DECODERS) | set(ENCODERS) | set(OTHERS)


@pytest.mark.parametrize("model_type", TABLES)
def test_a_family_holds_on_every_level_and_comes_back(model_type, tmp_path):
    made(model_type).save_pretrained(tmp_path / "checkpoint")
    convert(tmp_path / "checkpoint", to=tmp_path / "flax", via="family")
    report = check_parity(tmp_path / "checkpoint", tmp_path / "flax", continued_tokens=6)
    assert report.passed, report.failures
    assert (report.name, report.road) == (model_type, "family")
    assert report.tensors.num_identical == report.tensors.num_tensors
    assert len(report.blocks) >= 3
    assert 0.0 < report.max_block_relative_error < BLOCK_ERROR
    assert report.metrics["max_rel_output_difference"] < OUTPUT_ERROR
    assert report.not_compared == ()
    assert (report.greedy_match == 1.0) == (report.kind in ("causal-lm", "seq2seq-lm", "speech-to-text"))
    export(tmp_path / "flax", to=tmp_path / "back", format="safetensors")
    assert diff(tmp_path / "checkpoint", tmp_path / "back").same
