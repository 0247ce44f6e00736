"""Models of any architecture at a size that trains in milliseconds: small numbers for the fields that a config has."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn

__all__ = ["CLASSES", "VOCABULARY", "Architecture", "Batch"]

Batch = dict[str, Any]

ROWS, VOCABULARY, CLASSES, PIXELS = 2, 67, 5, 32

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "emb_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "hidden_dim"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("head_dim", "d_kv", "d_head", "q_lora_rank", "kv_lora_rank"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("state_size", "mamba_d_state", "mamba_n_heads", "time_step_rank"), 4),
    "num_key_value_heads": 2,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "mamba_d_head": 16,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "image_size": PIXELS,
    "patch_size": 8,
}
"""What a config gets for each of these fields that it has."""


@dataclass(frozen=True)
class Architecture:
    """One model class of transformers.

    Attributes:
        name: of the class.
        batch: makes keyword arguments for one call, labels included.
        sizes: fields of the config beside ``SIZES``, or in place of them.
    """

    name: str
    batch: Callable[[], Batch]
    sizes: dict[str, Any] = field(default_factory=dict)

    def build(self, batches: int) -> tuple[nn.Module, list[Batch]]:
        """The model in training mode and batches of one shape, the same numbers every time."""
        torch.manual_seed(0)
        made = getattr(transformers, self.name)
        known = _fields(made.config_class)
        sizes = {name: value for name, value in SIZES.items() if name in known} | self.sizes
        labels = {} if "num_labels" in sizes else {"num_labels": CLASSES}
        model: nn.Module = made(made.config_class(**sizes, **labels)).train()
        return model, [self.batch() for _ in range(batches)]


def _fields(config: type) -> set[str]:
    """The fields of a config's class, which may be annotated or arguments of its constructor."""
    annotated = {name for base in config.__mro__ for name in getattr(base, "__annotations__", {})}
    return annotated | set(inspect.signature(config).parameters)


# --- batches ---------------------------------------------------------------------------------------------------------


def tokens(length: int = 12) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (ROWS, length))


def classes() -> torch.Tensor:
    return torch.randint(CLASSES, (ROWS,))


def pixels(size: int = PIXELS) -> torch.Tensor:
    return torch.randn(ROWS, 3, size, size)


def text(length: int = 12) -> Batch:
    found = tokens(length)
    return {"input_ids": found, "labels": found.clone()}


def classified_text() -> Batch:
    return {"input_ids": tokens(), "labels": classes()}


def image(size: int = PIXELS) -> Batch:
    return {"pixel_values": pixels(size), "labels": classes()}


def segmented_image() -> Batch:
    return {"pixel_values": pixels(), "labels": torch.randint(CLASSES, (ROWS, PIXELS, PIXELS))}


def video(frames: int) -> Batch:
    return {"pixel_values": torch.randn(ROWS, frames, 3, 16, 16), "labels": classes()}


def image_and_text(**more: Any) -> Batch:
    return {"pixel_values": pixels(), "input_ids": tokens(8), **more}


def spoken_text() -> Batch:
    return {"input_values": torch.randn(ROWS, 400), "labels": tokens(4)}


def classified_sound() -> Batch:
    return {"input_values": torch.randn(ROWS, 400), "labels": classes()}


def spectrogram(length: int, features: int, labels: torch.Tensor, transposed: bool = False) -> Batch:
    shape = (ROWS, features, length) if transposed else (ROWS, length, features)
    return {"input_features": torch.randn(shape), "labels": labels}


def series(length: int = 32, ahead: int = 0) -> Batch:
    batch = {"past_values": torch.randn(ROWS, length, 2)}
    return {**batch, "future_values": torch.randn(ROWS, ahead, 2)} if ahead else batch


def series_with_features() -> Batch:
    return {
        "past_values": torch.rand(ROWS, 20),
        "past_time_features": torch.rand(ROWS, 20, 1),
        "past_observed_mask": torch.ones(ROWS, 20),
        "future_values": torch.rand(ROWS, 4),
        "future_time_features": torch.rand(ROWS, 4, 1),
    }
