"""The two models of the examples, in plain PyTorch: a small GPT, and ResNet-50 with named blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import graphopt


@dataclass(frozen=True)
class GPTConfig:
    """The size of a GPT: ``vocab`` tokens, ``d`` features, at most ``context`` tokens in a row."""

    vocab: int = 256
    context: int = 256
    d: int = 256
    layers: int = 12
    heads: int = 4
    dropout: float = 0.0


class GPTBlock(nn.Module):
    """Pre-norm attention and MLP; takes and returns ``[batch, tokens, d]``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        d = config.d
        self.heads, self.dropout = config.heads, config.dropout
        self.ln_1, self.qkv, self.proj = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.ln_2, self.fc, self.out = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, d = x.shape
        qkv = self.qkv(self.ln_1(x)).view(batch, tokens, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        x = x + self.drop(self.proj(attended.transpose(1, 2).reshape(batch, tokens, d)))
        return x + self.drop(self.out(F.gelu(self.fc(self.ln_2(x)))))


class GPT(nn.Module):
    """A decoder-only transformer: ``[batch, tokens]`` of token numbers to ``[batch, tokens, vocab]`` of logits."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab, config.d)
        self.wpe = nn.Embedding(config.context, config.d)
        self.blocks = nn.ModuleList(GPTBlock(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.d)
        self.head = nn.Linear(config.d, config.vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


def next_token_loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy of ``targets``, ``[batch, tokens]``, under the model's logits; in nats."""
    logits = model(tokens)
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions around a shortcut; the result has four times ``width`` channels."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class ResNet50(nn.Module):
    """ResNet-50: ``[batch, 3, height, width]`` images to ``[batch, classes]`` logits.

    The outputs of the 16 blocks are named ``res2a`` … ``res2c``, ``res3a`` … ``res3d``, ``res4a`` … ``res4f`` and
    ``res5a`` … ``res5c``. ``width`` is the number of channels after the first convolution (64 in the paper).
    """

    BLOCKS = (3, 4, 6, 3)

    def __init__(self, classes: int = 1000, width: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.stages = nn.ModuleList()
        channels = width
        for number, blocks in enumerate(self.BLOCKS):
            inner, stage = width * 2**number, nn.ModuleList()
            for index in range(blocks):
                stage.append(Bottleneck(channels, inner, stride=2 if number and not index else 1))
                channels = 4 * inner
            self.stages.append(stage)
        self.fc = nn.Linear(channels, classes)

    @classmethod
    def block_names(cls) -> list[str]:
        """``res2a`` to ``res5c``, in order."""
        return [f"res{stage}{letter}" for stage, n in enumerate(cls.BLOCKS, 2) for letter in "abcdef"[:n]]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(images))), 3, 2, 1)
        names = iter(self.block_names())
        for stage in self.stages:
            for block in stage:
                x = graphopt.name(block(x), next(names))
        return self.fc(x.mean((2, 3)))


def label_loss(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy of ``labels``, ``[batch]``, under the model's logits; in nats."""
    return F.cross_entropy(model(images), labels)
