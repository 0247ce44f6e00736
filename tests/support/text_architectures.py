"""Language models of transformers at tiny sizes."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tests.support.tiny_models import VOCABULARY, Architecture, classified_text, text, tokens

__all__ = ["TEXT"]

ALIKE = [
    "AfmoeForCausalLM",
    "ApertusForCausalLM",
    "ArceeForCausalLM",
    "AriaTextForCausalLM",
    "BioGptForCausalLM",
    "BitNetForCausalLM",
    "BloomForCausalLM",
    "CohereForCausalLM",
    "Cohere2ForCausalLM",
    "DiffLlamaForCausalLM",
    "DogeForCausalLM",
    "Emu3ForCausalLM",
    "Ernie4_5ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "Exaone4ForCausalLM",
    "FalconForCausalLM",
    "FalconMambaForCausalLM",
    "FlexOlmoForCausalLM",
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GlmForCausalLM",
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    "GPT2LMHeadModel",
    "GPTBigCodeForCausalLM",
    "GPTNeoXForCausalLM",
    "GPTNeoXJapaneseForCausalLM",
    "GptOssForCausalLM",
    "GraniteForCausalLM",
    "GraniteMoeForCausalLM",
    "GraniteMoeSharedForCausalLM",
    "HeliumForCausalLM",
    "HunYuanDenseV1ForCausalLM",
    "HunYuanMoEV1ForCausalLM",
    "JetMoeForCausalLM",
    "Lfm2ForCausalLM",
    "LlamaForCausalLM",
    "Llama4ForCausalLM",
    "MambaForCausalLM",
    "MiniMaxForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "ModernBertDecoderForCausalLM",
    "MptForCausalLM",
    "NanoChatForCausalLM",
    "NemotronForCausalLM",
    "OlmoForCausalLM",
    "Olmo2ForCausalLM",
    "OlmoeForCausalLM",
    "OlmoHybridForCausalLM",
    "OpenAIGPTLMHeadModel",
    "OPTForCausalLM",
    "PersimmonForCausalLM",
    "PhiForCausalLM",
    "Phi3ForCausalLM",
    "PhimoeForCausalLM",
    "ProphetNetForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "RwkvForCausalLM",
    "SeedOssForCausalLM",
    "SmolLM3ForCausalLM",
    "StableLmForCausalLM",
    "Starcoder2ForCausalLM",
    "TrOCRForCausalLM",
    "XGLMForCausalLM",
    "AlbertForMaskedLM",
    "BertForMaskedLM",
    "BigBirdForMaskedLM",
    "CamembertForMaskedLM",
    "ConvBertForMaskedLM",
    "Data2VecTextForMaskedLM",
    "DebertaForMaskedLM",
    "DebertaV2ForMaskedLM",
    "DistilBertForMaskedLM",
    "ElectraForMaskedLM",
    "ErnieForMaskedLM",
    "EsmForMaskedLM",
    "EuroBertForMaskedLM",
    "FlaubertWithLMHeadModel",
    "FNetForMaskedLM",
    "IBertForMaskedLM",
    "LongformerForMaskedLM",
    "MegatronBertForMaskedLM",
    "MobileBertForMaskedLM",
    "ModernBertForMaskedLM",
    "MPNetForMaskedLM",
    "MraForMaskedLM",
    "NomicBertForMaskedLM",
    "NystromformerForMaskedLM",
    "RemBertForMaskedLM",
    "RobertaForMaskedLM",
    "RobertaPreLayerNormForMaskedLM",
    "RoFormerForMaskedLM",
    "SqueezeBertForMaskedLM",
    "TapasForMaskedLM",
    "XLMWithLMHeadModel",
    "XLMRobertaXLForMaskedLM",
    "YosoForMaskedLM",
    "BartForConditionalGeneration",
    "BigBirdPegasusForConditionalGeneration",
    "BlenderbotForConditionalGeneration",
    "M2M100ForConditionalGeneration",
    "MarianMTModel",
    "MBartForConditionalGeneration",
    "MT5ForConditionalGeneration",
    "MvpForConditionalGeneration",
    "NllbMoeForConditionalGeneration",
    "PegasusForConditionalGeneration",
    "PegasusXForConditionalGeneration",
    "PLBartForConditionalGeneration",
    "ProphetNetForConditionalGeneration",
    "UMT5ForConditionalGeneration",
]
"""Those that need nothing beside the sizes that all of them have, and a batch of text."""

SSM: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_chunk_size": 8}
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}

WITH_SIZES: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": {**SSM, "attn_layer_indices": [1], "mamba_n_groups": 1},
    "CodeGenForCausalLM": {"rotary_dim": 4},
    "DeepseekV2ForCausalLM": {"n_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4},
    "DeepseekV3ForCausalLM": {"first_k_dense_replace": 1, "num_key_value_heads": 4},
    "FSMTForConditionalGeneration": {
        "src_vocab_size": VOCABULARY,
        "tgt_vocab_size": VOCABULARY,
        "langs": ["en", "de"],
    },
    "FalconH1ForCausalLM": {**SSM, "mamba_d_ssm": 64, "mamba_n_groups": 1},
    "FunnelForMaskedLM": {"block_sizes": [1, 1], "num_decoder_layers": 1, "d_inner": 48},
    "GPTJForCausalLM": {"rotary_dim": 4},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "GraniteMoeHybridForCausalLM": {**SSM, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 16},
    "JambaForCausalLM": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "use_mamba_kernels": False,
        "mamba_dt_rank": 4,
    },
    "LayoutLMForMaskedLM": {"max_2d_position_embeddings": 64},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "LongT5ForConditionalGeneration": {"local_radius": 3},
    "LukeForMaskedLM": {"entity_vocab_size": 10, "entity_emb_size": 8},
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
    "MiniCPM3ForCausalLM": {"num_key_value_heads": 4},
    "Qwen2MoeForCausalLM": {"shared_expert_intermediate_size": 16},
    "Qwen3NextForCausalLM": {**LINEAR, "shared_expert_intermediate_size": 16, "partial_rotary_factor": 0.5},
    "Qwen3_5ForCausalLM": LINEAR,
    "RecurrentGemmaForCausalLM": {
        "num_hidden_layers": 3,
        "attention_window_size": 8,
        "lru_width": 32,
        "block_types": ["recurrent", "recurrent", "attention"],
        "num_key_value_heads": 1,
    },
    "RoCBertForMaskedLM": {
        "pronunciation_vocab_size": 10,
        "shape_vocab_size": 10,
        "pronunciation_embed_dim": 8,
        "shape_embed_dim": 8,
    },
    "SwitchTransformersForConditionalGeneration": {
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
        "expert_capacity": 8,
    },
    "T5ForConditionalGeneration": {},
    "XLNetLMHeadModel": {"d_inner": 48},
    "XmodForMaskedLM": {"languages": ["en"], "default_language": "en"},
    "Zamba2ForCausalLM": {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "n_mamba_heads": 2,
        "mamba_headdim": 32,
        "chunk_size": 8,
        "num_mem_blocks": 1,
        "use_mamba_kernels": False,
        "mamba_d_state": 4,
        "mamba_ngroups": 1,
    },
}

STARTS_WITH_PADDING = ("T5", "LongT5", "SwitchTransformers")
"""Decoders whose config has no field of its own for the first token."""


def masked_states() -> dict[str, Any]:
    return {
        "input_ids": tokens(8),
        "attention_mask": torch.ones(2, 8, dtype=torch.long),
        "visual_embeds": torch.randn(2, 3, 16),
        "visual_attention_mask": torch.ones(2, 3),
        "labels": torch.rand(2, 5),
    }


REFORMER: dict[str, Any] = {
    "is_decoder": True,
    "axial_pos_embds": False,
    "attn_layers": ["local", "lsh"],
    "local_attn_chunk_length": 4,
    "lsh_attn_chunk_length": 4,
    "num_buckets": 2,
    "num_hashes": 1,
    "hash_seed": 0,
    "attention_head_size": 8,
    "feed_forward_size": 48,
}
LED: dict[str, Any] = {
    "attention_window": 4,
    "max_encoder_position_embeddings": 64,
    "max_decoder_position_embeddings": 64,
}
OTHERS = [
    Architecture("GPT2ForSequenceClassification", classified_text),
    Architecture("LEDForConditionalGeneration", functools.partial(text, 16), LED),
    Architecture("LiltForSequenceClassification", classified_text, {"max_2d_position_embeddings": 64, "hidden_size": 48,
        "channel_shrink_ratio": 2}),
    Architecture("ReformerModelWithLMHead", functools.partial(text, 16), REFORMER),
    Architecture("VisualBertForQuestionAnswering", masked_states, {"visual_embedding_dim": 16}),
    Architecture("XLNetForSequenceClassification", classified_text, {"d_inner": 48}),
]  # fmt: skip


def _sizes(name: str) -> dict[str, Any]:
    first = {"decoder_start_token_id": 0} if name.startswith(STARTS_WITH_PADDING) else {}
    return {**WITH_SIZES.get(name, {}), **first}


TEXT = [*(Architecture(name, text, _sizes(name)) for name in (*ALIKE, *WITH_SIZES)), *OTHERS]
