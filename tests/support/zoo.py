"""Nine models from transformers at tiny sizes, unmodified, with batches to train on and the names of their layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

__all__ = ["ZOO", "Batch", "Entry", "own_loss"]

Batch = dict[str, torch.Tensor]

VOCABULARY, ROWS, CLASSES = 67, 2, 5
TEXT: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE: dict[str, Any] = {**TEXT, "intermediate_size": 48, "max_position_embeddings": 32}
GROUPED: dict[str, Any] = {
    **WIDE,
    "num_key_value_heads": 2,
    "attention_dropout": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@dataclass(frozen=True)
class Entry:
    """One model.

    Attributes:
        model: makes it.
        batch: makes keyword arguments for one call, labels included.
        layers: a glob for the outputs of its layers.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    layers: str

    def build(self, batches: int) -> tuple[nn.Module, list[Batch]]:
        """The model in training mode and ``batches`` batches of one shape, the same ones every time."""
        torch.manual_seed(0)
        return self.model().train(), [self.batch() for _ in range(batches)]


def own_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss that the model computes itself."""
    loss: torch.Tensor = model(**batch).loss
    return loss


# --- batches ---------------------------------------------------------------------------------------------------------


def text(length: int = 12) -> Batch:
    tokens = torch.randint(2, VOCABULARY, (ROWS, length))
    return {"input_ids": tokens, "labels": tokens.clone()}


def padded_text() -> Batch:
    batch = text()
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][0, 8:] = 0
    return batch


def images(rows: int, pixels: int) -> Batch:
    return {"pixel_values": torch.randn(rows, 3, pixels, pixels), "labels": torch.randint(CLASSES, (rows,))}


# --- models ----------------------------------------------------------------------------------------------------------


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**WIDE))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=1
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED))


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=1, num_heads=4,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    sizes = {key: value for key, value in TEXT.items() if key != "vocab_size"}
    config = transformers.ViTConfig(
        **sizes, intermediate_size=48, image_size=16, patch_size=8, num_labels=CLASSES,
        hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[1, 2], num_labels=CLASSES)
    return transformers.ResNetForImageClassification(config)


def qwen3() -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**GROUPED, head_dim=8))


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        **GROUPED, num_local_experts=4, num_experts_per_tok=2, router_jitter_noise=0.1, output_router_logits=True
    )
    return transformers.MixtralForCausalLM(config)


def mamba() -> nn.Module:
    config = transformers.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4, bos_token_id=0, eos_token_id=1
    )
    return transformers.MambaForCausalLM(config)


ZOO: dict[str, Entry] = {
    "BERT": Entry(bert, padded_text, "bert.encoder.layer.*"),
    "GPT-2": Entry(gpt2, text, "transformer.h.*"),
    "Llama": Entry(llama, text, "model.layers.*"),
    "T5": Entry(t5, text, "**.block.*"),
    "ViT": Entry(vit, lambda: images(ROWS, 16), "vit.layers.*"),
    "ResNet": Entry(resnet, lambda: images(4, 32), "resnet.encoder.stages.*.layers.*"),
    "Qwen3": Entry(qwen3, text, "model.layers.*"),
    "Mixtral": Entry(mixtral, text, "model.layers.*"),
    "Mamba": Entry(mamba, lambda: text(4), "backbone.layers.*"),
}
