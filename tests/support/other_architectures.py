"""Models of transformers for images, sound, series and images with text, at tiny sizes."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tests.support.tiny_models import (
    ROWS,
    VOCABULARY,
    Architecture,
    Batch,
    classes,
    classified_sound,
    image,
    image_and_text,
    pixels,
    segmented_image,
    series,
    series_with_features,
    spectrogram,
    spoken_text,
    tokens,
    video,
)

__all__ = ["IMAGES", "SERIES", "SOUND"]


def _with(batch: Any, *given: Any, **more: Any) -> Any:
    return functools.partial(batch, *given, **more)


# --- images ----------------------------------------------------------------------------------------------------------

STAGES: dict[str, Any] = {"hidden_sizes": [8, 16], "depths": [1, 1]}
FOUR: dict[str, Any] = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}
WINDOWS: dict[str, Any] = {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 2, "patch_size": 4}
PYRAMID: dict[str, Any] = {
    **STAGES,
    "num_attention_heads": [1, 2],
    "num_encoder_blocks": 2,
    "sr_ratios": [4, 2],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "mlp_ratios": [2, 2],
}
HG: dict[str, Any] = {
    **STAGES,
    "embedding_size": 8,
    "stem_channels": [3, 4, 8],
    "stage_in_channels": [8, 8],
    "stage_mid_channels": [4, 4],
    "stage_out_channels": [8, 16],
    "stage_num_blocks": [1, 1],
    "stage_numb_of_layers": [1, 1],
    "stage_downsample": [False, True],
    "stage_light_block": [False, True],
    "stage_kernel_size": [3, 5],
}
LEVIT: dict[str, Any] = {
    "image_size": 64,
    "patch_size": 16,
    "hidden_sizes": [16, 24, 32],
    "num_attention_heads": [2, 2, 2],
    "depths": [1, 1, 1],
    "key_dim": [4, 4, 4],
    "attention_ratio": [2, 2, 2],
    "mlp_ratio": [2, 2, 2],
}
PERCEIVER: dict[str, Any] = {
    "num_latents": 8,
    "d_latents": 32,
    "num_blocks": 1,
    "num_self_attends_per_block": 1,
    "num_self_attention_heads": 4,
    "num_cross_attention_heads": 4,
}
TOWERS: dict[str, Any] = {
    "text_config": {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 16,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "vision_config": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "image_size": 32,
        "patch_size": 8,
    },
}
GROUPS: dict[str, Any] = {
    **TOWERS,
    "vision_config": {
        **TOWERS["vision_config"],
        "depths": [1, 1, 1],
        "num_hidden_layers": 3,
        "num_group_tokens": [8, 4, 0],
        "num_output_groups": [8, 4, 8],
    },
    "projection_dim": 16,
    "projection_intermediate_dim": 24,
}
FOCAL: dict[str, Any] = {**STAGES, "embed_dim": 8, "focal_levels": [1, 1], "focal_windows": [3, 3], "patch_size": 4}
MOBILE: dict[str, Any] = {
    "hidden_sizes": [16, 24, 32],
    "neck_hidden_sizes": [8, 8, 16, 16, 16, 16, 32],
    "patch_size": 2,
}
SWIFT: dict[str, Any] = {"embed_dims": [8, 16], "depths": [1, 1], "mlp_ratio": 2, "downsamples": [True, True]}
DPT: dict[str, Any] = {
    "num_hidden_layers": 4,
    "backbone_out_indices": [0, 1, 2, 3],
    "neck_hidden_sizes": [8, 8, 16, 16],
    "fusion_hidden_size": 16,
    "reassemble_factors": [4, 2, 1, 0.5],
}
GLPN: dict[str, Any] = {
    "hidden_sizes": [8, 16, 16, 16],
    "depths": [1, 1, 1, 1],
    "num_attention_heads": [1, 2, 2, 2],
    "decoder_hidden_size": 16,
}
MAE: dict[str, Any] = {
    "decoder_hidden_size": 16,
    "decoder_num_hidden_layers": 1,
    "decoder_num_attention_heads": 2,
    "decoder_intermediate_size": 24,
}
BLIP: dict[str, Any] = {
    **TOWERS,
    "text_config": {**TOWERS["text_config"], "encoder_hidden_size": 32, "sep_token_id": 2},
}


def captioned() -> Batch:
    return image_and_text(labels=tokens(8))


def answered() -> Batch:
    return image_and_text(labels=torch.rand(ROWS, 5))


def plain_image() -> Batch:
    return {"inputs": pixels(), "labels": classes()}


def masked_image() -> Batch:
    return {"pixel_values": pixels(), "bool_masked_pos": torch.randint(2, (ROWS, 16)).bool()}


def depths() -> Batch:
    return {"pixel_values": pixels(), "labels": torch.rand(ROWS, 32, 32) + 0.1}


IMAGES = [
    Architecture("BeitForImageClassification", image),
    Architecture("BitForImageClassification", image, {**STAGES, "embedding_size": 8, "num_groups": 4}),
    Architecture("BlipForConditionalGeneration", captioned, BLIP),
    Architecture("CLIPModel", _with(image_and_text, return_loss=True), {**TOWERS, "projection_dim": 16}),
    Architecture("ConvNextForImageClassification", _with(image, 64), FOUR),
    Architecture("ConvNextV2ForImageClassification", _with(image, 64), FOUR),
    Architecture("Data2VecVisionForImageClassification", image),
    Architecture("DeiTForImageClassification", image),
    Architecture("Dinov2ForImageClassification", image),
    Architecture("Dinov2WithRegistersForImageClassification", image),
    Architecture("DonutSwinForImageClassification", image, WINDOWS),
    Architecture("DPTForSemanticSegmentation", segmented_image, DPT),
    Architecture("FocalNetForImageClassification", image, FOCAL),
    Architecture("GitForCausalLM", captioned, {"vision_config": TOWERS["vision_config"]}),
    Architecture("GLPNForDepthEstimation", depths, GLPN),
    Architecture("GroupViTModel", _with(image_and_text, return_loss=True), GROUPS),
    Architecture("HGNetV2ForImageClassification", image, HG),
    Architecture("IJepaForImageClassification", image),
    Architecture("ImageGPTForImageClassification", lambda: {"input_ids": tokens(16) - 3, "labels": classes()}),
    Architecture("LevitForImageClassification", _with(image, 64), LEVIT),
    Architecture("MobileNetV1ForImageClassification", image, {"depth_multiplier": 0.1}),
    Architecture("MobileNetV2ForImageClassification", image, {"depth_multiplier": 0.1}),
    Architecture("MobileViTForImageClassification", image, MOBILE),
    Architecture("MobileViTV2ForImageClassification", _with(image, 64), {"width_multiplier": 0.1, "patch_size": 2}),
    Architecture("PerceiverForImageClassificationLearned", plain_image, PERCEIVER),
    Architecture("PerceiverForMaskedLM", lambda: {"inputs": tokens(), "labels": tokens()},
        {**PERCEIVER, "qk_channels": 32, "v_channels": 32, "max_position_embeddings": 12}),
    Architecture("PoolFormerForImageClassification", image, FOUR),
    Architecture("PvtV2ForImageClassification", image, PYRAMID),
    Architecture("RegNetForImageClassification", image, {**STAGES, "embedding_size": 8, "groups_width": 4}),
    Architecture("ResNetForImageClassification", image, {**STAGES, "embedding_size": 8}),
    Architecture("SegformerForImageClassification", image, PYRAMID),
    Architecture("SegformerForSemanticSegmentation", segmented_image, {**PYRAMID, "decoder_hidden_size": 16}),
    Architecture("SiglipModel", _with(image_and_text, return_loss=True), TOWERS),
    Architecture("SwiftFormerForImageClassification", image, SWIFT),
    Architecture("SwinForImageClassification", image, WINDOWS),
    Architecture("Swinv2ForImageClassification", image, WINDOWS),
    Architecture("TimesformerForVideoClassification", _with(video, 2), {"image_size": 16, "num_frames": 2}),
    Architecture("VideoMAEForVideoClassification", _with(video, 4), {"image_size": 16, "num_frames": 4}),
    Architecture("ViltForQuestionAnswering", answered, {"max_image_length": -1}),
    Architecture("ViTForImageClassification", image),
    Architecture("ViTForMaskedImageModeling", masked_image, {"encoder_stride": 8}),
    Architecture("ViTMAEForPreTraining", lambda: {"pixel_values": pixels()}, MAE),
    Architecture("ViTMSNForImageClassification", image),
    Architecture("VivitForVideoClassification", _with(video, 2),
        {"image_size": 16, "num_frames": 2, "tubelet_size": [2, 8, 8]}),
]  # fmt: skip

# --- sound -----------------------------------------------------------------------------------------------------------

WAVES: dict[str, Any] = {
    "conv_dim": [8, 8],
    "conv_stride": [4, 4],
    "conv_kernel": [8, 4],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
}
OF_WAVES: dict[str, dict[str, Any]] = {
    "Data2VecAudio": {"conv_pos_kernel_size": 3, "num_conv_pos_embeddings": 2},
    "Hubert": {},
    "SEW": {"squeeze_factor": 2},
    "SEWD": {"squeeze_factor": 2},
    "UniSpeech": {},
    "UniSpeechSat": {},
    "Wav2Vec2": {},
    "Wav2Vec2Conformer": {},
    "WavLM": {},
}
SHORT: dict[str, Any] = {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16}
SPEECH: dict[str, Any] = {"conv_channels": 16, "max_source_positions": 64, "max_target_positions": 16}
SOUND = [
    *(Architecture(f"{name}ForCTC", spoken_text, {**WAVES, **more}) for name, more in OF_WAVES.items()),
    *(Architecture(f"{name}ForSequenceClassification", classified_sound, {**WAVES, **more})
        for name, more in OF_WAVES.items() if name in ("Hubert", "Wav2Vec2", "WavLM", "SEW")),
    Architecture("ASTForAudioClassification",
        lambda: {"input_values": torch.randn(ROWS, 24, 16), "labels": classes()},
        {"patch_size": 4, "max_length": 24, "num_mel_bins": 16, "frequency_stride": 4, "time_stride": 4}),
    Architecture("Speech2TextForConditionalGeneration", lambda: spectrogram(32, 8, tokens(8)),
        {**SPEECH, "input_feat_per_channel": 8, "input_channels": 1}),
    Architecture("SpeechT5ForSpeechToText", lambda: {"input_values": torch.randn(ROWS, 400), "labels": tokens(8)},
        {**{name: size for name, size in WAVES.items() if name != "mask_time_prob"}, "apply_spec_augment": False}),
    Architecture("Wav2Vec2BertForCTC", lambda: spectrogram(40, 16, tokens(4)),
        {"feature_projection_input_dim": 16, "mask_time_prob": 0.0, "conv_depthwise_kernel_size": 3}),
    Architecture("WhisperForConditionalGeneration", lambda: spectrogram(32, 8, tokens(8), transposed=True), SHORT),
    Architecture("WhisperForAudioClassification", lambda: spectrogram(32, 8, classes(), transposed=True),
        {**SHORT, "classifier_proj_size": 16}),
]  # fmt: skip

# --- series ----------------------------------------------------------------------------------------------------------

PATCHES: dict[str, Any] = {"num_input_channels": 2, "context_length": 32, "patch_length": 4, "patch_stride": 4}
LAGS: dict[str, Any] = {
    "prediction_length": 4,
    "context_length": 14,
    "lags_sequence": [1, 2, 6],
    "num_time_features": 1,
    "scaling": "mean",
}


def two_series() -> Batch:
    values = [torch.randn(32), torch.randn(32)]
    return {"past_values": values, "freq": [0, 0], "future_values": torch.randn(ROWS, 16)}


def classified_series() -> Batch:
    return {**series(), "target_values": torch.randint(3, (ROWS,))}


SERIES = [
    Architecture("AutoformerForPrediction", series_with_features, {**LAGS, "label_length": 4, "moving_average": 3}),
    Architecture("InformerForPrediction", series_with_features, LAGS),
    Architecture("PatchTSMixerForPrediction", _with(series, ahead=8), {**PATCHES, "prediction_length": 8}),
    Architecture("PatchTSTForClassification", classified_series, {**PATCHES, "num_targets": 3, "use_cls_token": True}),
    Architecture("PatchTSTForPrediction", _with(series, ahead=8), {**PATCHES, "prediction_length": 8}),
    Architecture("PatchTSTForPretraining", series, PATCHES),
    Architecture("TimesFmModelForPrediction", two_series,
        {"patch_length": 8, "context_length": 32, "horizon_length": 16}),
    Architecture("TimeSeriesTransformerForPrediction", series_with_features, LAGS),
]  # fmt: skip
