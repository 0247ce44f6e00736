"""The models of ``published_memory.toml``, by their sizes; they are made without data.

``litgpt`` is written like the model that was measured, operation by operation, since its memory depends on that:
fused projections with LoRA on queries and values, rotary embedding in two halves, norms and loss in bfloat16, the head
and the loss in pieces of 128 tokens. ``gpt_layer`` is the layer of the paper's figure 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["MODELS", "Sizes"]

Sizes = Mapping[str, int]
_PIECE = 128


# --- models of transformers ------------------------------------------------------------------------------------------


def bert(sizes: Sizes, row: Mapping[str, Any], masked: bool = False) -> dict[str, Any]:
    """BERT with attention by products: a classifier of two classes, or the model of masked words."""
    from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

    config = BertConfig(
        hidden_size=sizes["width"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        intermediate_size=sizes["ffn"],
        vocab_size=sizes["vocabulary"],
        attn_implementation="eager",
    )
    tokens = torch.zeros(row["batch"], row["tokens"], dtype=torch.long)
    model = BertForMaskedLM(config) if masked else BertForSequenceClassification(config)
    labels = tokens if masked else torch.zeros(row["batch"], dtype=torch.long)
    return {"model": model, "kwargs": {"input_ids": tokens, "labels": labels}, "loss": True}


def bert_masked(sizes: Sizes, row: Mapping[str, Any]) -> dict[str, Any]:
    """BERT with its head over the vocabulary."""
    return bert(sizes, row, masked=True)


def llama(sizes: Sizes, row: Mapping[str, Any]) -> dict[str, Any]:
    """Llama with labels for each token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=sizes["width"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes.get("groups", sizes["heads"]),
        intermediate_size=sizes["ffn"],
        vocab_size=sizes["vocabulary"],
        max_position_embeddings=row["tokens"],
        use_cache=False,
        attn_implementation="sdpa",
    )
    tokens = torch.zeros(row["batch"], row["tokens"], dtype=torch.long)
    return {"model": LlamaForCausalLM(config), "kwargs": {"input_ids": tokens, "labels": tokens}, "loss": True}


# --- the model of LitGPT ---------------------------------------------------------------------------------------------


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-5)
        return self.weight * (x * scale)


class Projection(nn.Module):
    """Queries, keys and values at once, with LoRA of rank 8 on queries and values."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 3 * width, bias=bias)
        self.down = nn.Parameter(torch.zeros(16, width))
        self.up = nn.Parameter(torch.zeros(2 * width, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = F.linear(F.dropout(x, 0.05), self.down)
        high = F.conv1d(low.transpose(-2, -1), self.up.unsqueeze(-1), groups=2).transpose(-2, -1)
        queries, values = high.chunk(2, dim=-1)
        padded = torch.cat((queries, torch.zeros_like(queries), values), dim=-1)
        return self.linear(x) + padded * 2.0


class Block(nn.Module):
    """Attention and feed-forward: one after the other with gates (Llama), or beside each other (phi)."""

    def __init__(self, sizes: Sizes, parallel: bool) -> None:
        super().__init__()
        width, ffn = sizes["width"], sizes["ffn"]
        self.heads, self.parallel = sizes["heads"], parallel
        self.norm = nn.LayerNorm(width) if parallel else Norm(width)
        self.projection = Projection(width, bias=parallel)
        self.out = nn.Linear(width, width, bias=parallel)
        self.second_norm = None if parallel else Norm(width)
        self.gate = None if parallel else nn.Linear(width, ffn, bias=False)
        self.widen = nn.Linear(width, ffn, bias=parallel)
        self.narrow = nn.Linear(ffn, width, bias=parallel)

    def attention(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        split = self.projection(x).view(rows, tokens, self.heads, 3, width // self.heads).permute(0, 2, 3, 1, 4)
        queries, keys, values = (part.squeeze(2) for part in split.split((1, 1, 1), dim=2))
        queries, keys = rotated(queries, cos, sin), rotated(keys, cos, sin)
        found = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.out(found.transpose(1, 2).reshape(rows, tokens, width))

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.widen(x)
        return self.narrow(F.gelu(wide) if self.gate is None else F.silu(self.gate(x)) * wide)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        attended = self.attention(normed, cos, sin)
        if self.second_norm is None:
            return self.feed_forward(normed) + attended + x
        x = attended + x
        return self.feed_forward(self.second_norm(x)) + x


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of the first elements of each head, as many as ``cos`` has."""
    turned = x[..., : cos.shape[-1]]
    half = turned.shape[-1] // 2
    swapped = torch.cat((-turned[..., half:], turned[..., :half]), dim=-1)
    return torch.cat((turned * cos + swapped * sin, x[..., cos.shape[-1] :]), dim=-1)


class LitGPT(nn.Module):
    def __init__(self, sizes: Sizes, tokens: int, parallel: bool) -> None:
        super().__init__()
        turned = sizes["width"] // sizes["heads"] // (2 if parallel else 1)
        self.embedding = nn.Embedding(sizes["vocabulary"], sizes["width"])
        self.blocks = nn.ModuleList(Block(sizes, parallel) for _ in range(sizes["layers"]))
        self.norm = nn.LayerNorm(sizes["width"]) if parallel else Norm(sizes["width"])
        self.head = nn.Linear(sizes["width"], sizes["vocabulary"], bias=parallel)
        self.register_buffer("cos", torch.ones(tokens, turned))
        self.register_buffer("sin", torch.ones(tokens, turned))

    def forward(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return [self.head(piece) for piece in self.norm(x).split(_PIECE, dim=1)]


def _loss_in_pieces(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    pieces = model(tokens)
    pieces[-1] = pieces[-1][..., :-1, :]
    targets = tokens[..., 1:].split(_PIECE, dim=1)
    losses = [
        F.cross_entropy(piece.reshape(-1, piece.size(-1)), target.reshape(-1), reduction="none")
        for piece, target in zip(pieces, targets, strict=True)
    ]
    return torch.cat(losses).mean()


def litgpt(sizes: Sizes, row: Mapping[str, Any]) -> dict[str, Any]:
    """A model of LitGPT whose LoRA parameters alone are trained."""
    model = LitGPT(sizes, row["tokens"], parallel=row["config"].startswith("phi"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith((".down", ".up")))
    tokens = torch.zeros(row["batch"], row["tokens"], dtype=torch.long)
    return {"model": model, "example_inputs": (tokens,), "loss": _loss_in_pieces}


# --- a layer of Megatron-LM ------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A transformer layer with dropout, attention by products, as the formula counts it."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes["width"]
        self.heads = sizes["heads"]
        self.norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projection, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, sizes["ffn"]), nn.Linear(sizes["ffn"], width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        parts = self.projection(self.norm(x)).view(rows, tokens, 3, self.heads, width // self.heads)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4).unbind(0)
        weights = F.softmax(queries @ keys.transpose(-2, -1), dim=-1)
        found = (F.dropout(weights, 0.1) @ values).transpose(1, 2).reshape(rows, tokens, width)
        x = x + F.dropout(self.out(found), 0.1)
        wide = F.gelu(self.widen(self.second_norm(x)))
        return x + F.dropout(self.narrow(wide), 0.1)


class Layers(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.zeros(sizes["width"]))
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes["layers"]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.start
        for layer in self.layers:
            x = layer(x)
        return x


def gpt_layer(sizes: Sizes, row: Mapping[str, Any]) -> dict[str, Any]:
    """So many layers, and the sum of what they give as the loss."""
    batch = torch.zeros(row["batch"], row["tokens"], sizes["width"], dtype=torch.float16)
    return {"model": Layers(sizes), "example_inputs": (batch,), "loss": lambda model, x: model(x).sum()}


MODELS: dict[str, Callable[[Sizes, Mapping[str, Any]], dict[str, Any]]] = {
    "bert": bert,
    "bert_masked": bert_masked,
    "llama": llama,
    "litgpt": litgpt,
    "gpt_layer": gpt_layer,
}
"""By name in the rows: what a capture takes, of the sizes and the row."""
