"""What shrinking by field name does not get right.

Owns the declared exceptions, one row a model type. Knows nothing of how they are used. The one decision: an exception
is data that a reader can check against the architecture's config, never code.
"""

from collections.abc import Mapping
from typing import Any

_SMALL_HEADS = {"head_dim": 16}
_SERIES = {"prediction_length": 6, "context_length": 12, "lags_sequence": (1, 2, 3), "num_time_features": 1}
_SERIES_MODEL = {**_SERIES, "encoder_layers": 2, "decoder_layers": 2}
_SWIN = {"image_size": 64, "window_size": 2}
_RESNET = {"model_type": "resnet", "hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 2, 1], "embedding_size": 16}
_WITHOUT_TIMM = {
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "backbone_config": {**_RESNET, "out_features": ["stage4"]},
    "num_feature_levels": 1,
}
_RT_DETR = {"encoder_in_channels": [32, 64, 128], "decoder_in_channels": [64, 64, 64]}
_ONE_TILE = {"image_grid_pinpoints": [[32, 32]]}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}}

OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "align": {"projection_dim": 640},
    "aria": {"projector_patch_to_query_dict": {16: 8}},
    "autoformer": {**_SERIES_MODEL, "moving_average": 5},
    "informer": _SERIES_MODEL,
    "time_series_transformer": _SERIES_MODEL,
    "beit": {"out_indices": [1, 2, 3, 4], "num_hidden_layers": 4},
    "blip-2": {"image_token_index": 99},
    "instructblip": {"image_token_index": 99},
    "conditional_detr": _WITHOUT_TIMM,
    "cosmos3_edge_text": _MROPE,
    "cosmos3_omni": {"num_hidden_layers": 2},
    "dab-detr": _WITHOUT_TIMM,
    "dbrx": {"n_heads": 4, "d_model": 64, "n_layers": 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deformable_detr": _WITHOUT_TIMM,
    "detr": _WITHOUT_TIMM,
    "donut-swin": _SWIN,
    "dpt": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [16, 24, 32, 40]},
    "d_fine": {"encoder_in_channels": [48, 64, 80], "decoder_in_channels": [64, 64, 64]},
    "deimv2": {"encoder_in_channels": [48, 64, 80], "decoder_in_channels": [64, 64, 64]},
    "esm": {"vocab_size": 101, "mask_token_id": 32, "pad_token_id": 1},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
    "gemma3n_text": {"intermediate_size": 48, "activation_sparsity_pattern": [0.5, 0.0], "num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "hgnet_v2": {
        "embedding_size": 16,
        "hidden_sizes": [32, 48, 64, 80],
        "stem_channels": [3, 16, 16],
        "stage_in_channels": [16, 32, 48, 64],
        "stage_mid_channels": [16, 16, 16, 16],
        "stage_out_channels": [32, 48, 64, 80],
    },
    "hunyuan_v1_dense": _SMALL_HEADS,
    "hunyuan_v1_moe": _SMALL_HEADS,
    "hunyuan_vl_text": _SMALL_HEADS,
    "led": {"attention_window": [4, 4]},
    "llama4": {"vision_config": {"intermediate_size": 256}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "levit": {"image_size": 64, "patch_size": 16},
    "llava_next": _ONE_TILE,
    "llava_next_video": _ONE_TILE,
    "llava_onevision": _ONE_TILE,
    "mamba2": {"head_dim": 32},
    "maskformer-swin": _SWIN,
    "ministral": _SMALL_HEADS,
    "nemotron": {**_SMALL_HEADS, "num_key_value_heads": 2},
    "paligemma": {"projection_dim": 64, "vision_config": {"projection_dim": 64}},
    "pix2struct": {"vision_config": {"patch_size": 16}},
    "rt_detr_resnet": {"embedding_size": 16, "hidden_sizes": [16, 32, 64, 128], "layer_type": "basic"},
    "rt_detr": _RT_DETR,
    "rt_detr_v2": _RT_DETR,
    "swin": _SWIN,
    "swinv2": _SWIN,
    "table-transformer": _WITHOUT_TIMM,
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "xmod": {"languages": ["en_XX", "de_DE"], "default_language": "en_XX"},
    "sam2_hiera_det_model": {"hidden_size": 96},
    "zamba": {"num_hidden_layers": 8},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
}
"""Model type -> fields of its small config."""

REQUIRED_SUB_CONFIGS: Mapping[str, Mapping[str, str]] = {
    "encoder-decoder": {"encoder": "bert", "decoder": "bert"},
    "vision-encoder-decoder": {"encoder": "vit", "decoder": "bert"},
    "speech-encoder-decoder": {"encoder": "wav2vec2", "decoder": "bert"},
    "vision-text-dual-encoder": {"vision_config": "vit", "text_config": "bert"},
}
"""Model type -> sub-configs it cannot be made without."""

HEAD_OVERRIDES: Mapping[str, Mapping[str, Any]] = {"llama:LlamaForSequenceClassification": {"pad_token_id": 0}}
"""Name of a model with a head -> fields of its config that only the head needs."""

HEADS: Mapping[str, tuple[str, ...]] = {
    "llama": ("LlamaForCausalLM", "LlamaForSequenceClassification"),
    "gpt2": ("GPT2LMHeadModel",),
    "bert": ("BertForMaskedLM", "BertForSequenceClassification", "BertForQuestionAnswering"),
    "roberta": ("RobertaForTokenClassification",),
    "electra": ("ElectraForPreTraining",),
    "t5": ("T5ForConditionalGeneration", "T5EncoderModel"),
    "bart": ("BartForConditionalGeneration",),
    "marian": ("MarianMTModel",),
    "pegasus": ("PegasusForConditionalGeneration",),
    "whisper": ("WhisperForConditionalGeneration",),
    "wav2vec2": ("Wav2Vec2ForCTC", "Wav2Vec2ForSequenceClassification"),
    "hubert": ("HubertForCTC",),
    "vit": ("ViTForImageClassification",),
    "swin": ("SwinForImageClassification",),
    "resnet": ("ResNetForImageClassification",),
    "convnext": ("ConvNextForImageClassification",),
    "segformer": ("SegformerForSemanticSegmentation",),
    "beit": ("BeitForSemanticSegmentation",),
    "dpt": ("DPTForDepthEstimation",),
    "detr": ("DetrForObjectDetection",),
    "yolos": ("YolosForObjectDetection",),
    "mobilevit": ("MobileViTForSemanticSegmentation",),
    "clip_text_model": ("CLIPTextModelWithProjection",),
    "clip_vision_model": ("CLIPVisionModelWithProjection",),
    "blip": ("BlipForConditionalGeneration",),
    "mixtral": ("MixtralForCausalLM",),
    "mamba": ("MambaForCausalLM",),
    "rwkv": ("RwkvForCausalLM",),
    "layoutlm": ("LayoutLMForTokenClassification",),
    "patchtst": ("PatchTSTForPrediction",),
    "patchtsmixer": ("PatchTSMixerForPrediction",),
}
"""Model type -> classes with a head that are measured besides the plain model."""
