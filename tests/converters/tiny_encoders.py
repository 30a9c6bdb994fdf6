"""Tiny random encoders and vision models of transformers that break every symmetry, and their checkpoints.

Eight heads of six or ten, 101 tokens, nothing square, norms and biases drawn, running statistics of a used model.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

TEXT = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 40,
    "type_vocab_size": 3,
    "layer_norm_eps": 1e-5,
    "num_labels": 5,
}
SHORT = {**TEXT, "num_hidden_layers": 1}
ROBERTA = {**SHORT, "hidden_act": "gelu_new", "pad_token_id": 1}
T5 = {
    "vocab_size": 101,
    "d_model": 44,
    "d_kv": 6,
    "d_ff": 72,
    "num_layers": 1,
    "num_decoder_layers": 2,
    "num_heads": 8,
    "relative_attention_num_buckets": 10,
    "relative_attention_max_distance": 17,
    "layer_norm_epsilon": 1e-5,
    "decoder_start_token_id": 0,
}
WHISPER = {
    "vocab_size": 101,
    "num_mel_bins": 7,
    "encoder_layers": 1,
    "encoder_attention_heads": 8,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "d_model": 48,
    "encoder_ffn_dim": 72,
    "decoder_ffn_dim": 56,
    "max_source_positions": 11,
    "max_target_positions": 30,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "decoder_start_token_id": 4,
    "begin_suppress_tokens": None,
}
VIT = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "intermediate_size": 72,
    "image_size": [12, 30],
    "patch_size": [4, 6],
    "num_channels": 2,
    "layer_norm_eps": 1e-5,
    "num_labels": 5,
}
CLIP_TEXT = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 20,
    "layer_norm_eps": 1e-4,
    "bos_token_id": 98,
    "eos_token_id": 77,
    "pad_token_id": 0,
}
CLIP_VISION = {
    "hidden_size": 80,
    "intermediate_size": 56,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "image_size": 20,
    "patch_size": 4,
    "num_channels": 2,
}
RESNET = {
    "num_channels": 2,
    "embedding_size": 10,
    "hidden_sizes": [12, 20, 28],
    "depths": [1, 1, 2],
    "num_labels": 5,
}
CONVNEXT = {
    "num_channels": 2,
    "patch_size": 3,
    "num_stages": 3,
    "hidden_sizes": [12, 20, 28],
    "depths": [1, 1, 2],
    "layer_scale_init_value": 0.3,
    "layer_norm_eps": 1e-5,
    "num_labels": 5,
}


def clip_sizes(**text: Any) -> dict[str, Any]:
    return {"text_config": {**CLIP_TEXT, **text}, "vision_config": CLIP_VISION, "projection_dim": 36}


MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "bert": ("BertModel", TEXT),
    "bert without pooler": ("BertModel", {**SHORT, "add_pooling_layer": False}),
    "bert masked": ("BertForMaskedLM", SHORT),
    "bert masked, untied": ("BertForMaskedLM", {**SHORT, "tie_word_embeddings": False}),
    "bert classifier": ("BertForSequenceClassification", SHORT),
    "bert token classifier": ("BertForTokenClassification", SHORT),
    "bert spans": ("BertForQuestionAnswering", {**SHORT, "num_labels": 2}),
    "roberta": ("RobertaModel", ROBERTA),
    "roberta masked": ("RobertaForMaskedLM", ROBERTA),
    "roberta classifier": ("RobertaForSequenceClassification", ROBERTA),
    "xlm-roberta": ("XLMRobertaModel", ROBERTA),
    "t5": ("T5ForConditionalGeneration", T5),
    "t5 v1.1": ("T5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "t5 encoder": ("T5EncoderModel", {**T5, "feed_forward_proj": "gated-silu"}),
    "whisper": ("WhisperForConditionalGeneration", WHISPER),
    "whisper, untied": ("WhisperForConditionalGeneration", {**WHISPER, "tie_word_embeddings": False}),
    "vit": ("ViTModel", VIT),
    "vit without pooler": ("ViTModel", {**VIT, "num_hidden_layers": 1, "add_pooling_layer": False}),
    "vit classifier": ("ViTForImageClassification", {**VIT, "num_hidden_layers": 1, "qkv_bias": False}),
    "clip": ("CLIPModel", clip_sizes()),
    "clip of the first kind": ("CLIPModel", clip_sizes(eos_token_id=2)),
    "resnet basic": ("ResNetModel", {**RESNET, "layer_type": "basic", "downsample_in_first_stage": True}),
    "resnet bottleneck": ("ResNetForImageClassification", {**RESNET, "hidden_act": "gelu"}),
    "resnet early": ("ResNetForImageClassification", {**RESNET, "downsample_in_bottleneck": True}),
    "convnext": ("ConvNextModel", CONVNEXT),
    "convnext classifier": ("ConvNextForImageClassification", CONVNEXT),
}
"""Class and config by the name of a case."""


def tiny(case: str, **overrides: Any) -> Any:
    """The model of a case, its numbers drawn so that no two roles could be swapped unseen."""
    name, given = MODELS[case]
    kind = getattr(transformers, name)
    sizes = {**given, **overrides}
    arguments = {"add_pooling_layer": sizes["add_pooling_layer"]} if "add_pooling_layer" in sizes else {}
    torch.manual_seed(7)
    model = kind(kind.config_class(**sizes), **arguments)
    draw(model)
    return model.eval()


@torch.no_grad()
def draw(model: nn.Module) -> None:
    """Numbers of a size that keeps activations near one; norms and biases too, which begin all alike."""
    tied = getattr(model, "all_tied_weights_keys", {})
    for name, parameter in model.named_parameters():
        if name.endswith("logit_scale"):
            parameter.copy_(torch.tensor(1.7))
        elif name.endswith(("bias", "beta")):
            parameter.copy_(torch.randn_like(parameter) * 0.3)
        elif parameter.dim() == 1:
            parameter.copy_(torch.rand_like(parameter) + 0.5)
        else:
            fan_in = parameter[0].numel() if "embed" not in name and name not in tied.values() else 4
            if name.endswith("Attention.q.weight"):  # T5 does not scale scores; its queries begin small instead
                fan_in *= model.config.d_kv
            parameter.copy_(torch.randn_like(parameter) * (1.5 / fan_in**0.5))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.copy_(torch.randn_like(module.running_mean) * 0.3)
            module.running_var.copy_(torch.rand_like(module.running_var) * 2 + 0.2)
            module.num_batches_tracked.fill_(31)


def save(model: Any, directory: Path) -> Path:
    model.save_pretrained(directory)
    return directory
