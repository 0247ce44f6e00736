"""The models of memory_frontier.py: six networks that return their own loss, at sizes for two CPU cores.

BERT, ResNet-50, ViT and Llama are those of ``transformers``, unmodified; it is in the extra ``examples``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from harness import example_models
from torch import nn

models = example_models()

Batch = tuple[torch.Tensor, ...]
Loss = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Workload:
    """A model with a batch.

    Attributes:
        title: what it is, with its sizes, for people.
        make: gives the model and the batch, the same ones every time; small ones for a quick run.
        loss: of a model and a batch.
        blocks: globs for the modules that ``torch.utils.checkpoint`` is put around.
        budgets: peaks above persistent memory that are tried beside the ones that peers reach: megabytes, or per cent
            of the eager peak.
    """

    title: str
    make: Callable[[bool], tuple[nn.Module, Batch]]
    loss: Loss
    blocks: tuple[str, ...]
    budgets: tuple[str, ...] = ("80%", "60%", "45%")


class WithLoss(nn.Module):
    """A model that is called with a batch and returns its loss, so that the loss is part of what is measured."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        return self.loss(self.model, *batch)


class DoubleConvolution(nn.Sequential):
    """Two 3×3 convolutions, each with BatchNorm and ReLU; ``[batch, channels, h, w]`` to ``[batch, width, h, w]``."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__(
            nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        )  # fmt: skip


class UNet(nn.Module):
    """U-Net: ``[batch, 3, height, width]`` images to ``[batch, classes, height, width]`` logits.

    After Ronneberger, Fischer and Brox, "U-Net: Convolutional Networks for Biomedical Image Segmentation", 2015, with
    padded convolutions and BatchNorm, as is usual now. Height and width are multiples of 2 to the power of ``depth``.
    """

    def __init__(self, classes: int, width: int, depth: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(DoubleConvolution(a, b) for a, b in zip([3, *widths], widths, strict=False))
        pairs = list(itertools.pairwise(widths))[::-1]
        self.grow = nn.ModuleList(nn.ConvTranspose2d(deep, shallow, 2, 2) for shallow, deep in pairs)
        self.up = nn.ModuleList(DoubleConvolution(deep, shallow) for shallow, deep in pairs)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        kept = []
        x = images
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            kept.append(x)
        for grow, block, skipped in zip(self.grow, self.up, kept[-2::-1], strict=True):
            x = block(torch.cat([skipped, grow(x)], 1))
        return self.head(x)


def _text(vocabulary: int, rows: int, tokens: int) -> Batch:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(vocabulary, (2, rows, tokens), generator=generator))


def _images(classes: int, rows: int, pixels: int) -> Batch:
    generator = torch.Generator().manual_seed(1)
    pictures = torch.randn(rows, 3, pixels, pixels, generator=generator)
    return pictures, torch.randint(classes, (rows,), generator=generator)


def _text_loss(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=tokens, labels=labels).loss
    return loss


def _image_loss(model: nn.Module, pictures: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(pixel_values=pictures, labels=labels).loss
    return loss


def _pixel_loss(model: nn.Module, pictures: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(pictures), labels)


def _gpt(quick: bool, dropout: float = 0.0) -> tuple[nn.Module, Batch]:
    if quick:
        config = models.GPTConfig(vocab=64, context=32, d=32, layers=2, heads=2, dropout=dropout)
        return models.GPT(config), _text(64, 2, 32)
    config = models.GPTConfig(vocab=2048, context=256, d=256, layers=6, heads=4, dropout=dropout)
    return models.GPT(config), _text(2048, 8, 256)


def _bert(quick: bool) -> tuple[nn.Module, Batch]:
    import transformers

    width, layers, heads, vocabulary = (32, 2, 2, 64) if quick else (1024, 3, 16, 2048)
    config = transformers.BertConfig(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=4 * width,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config), _text(vocabulary, 2, 32 if quick else 256)


def _resnet(quick: bool) -> tuple[nn.Module, Batch]:
    import transformers

    if quick:
        config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[1, 2], num_labels=5)
        return transformers.ResNetForImageClassification(config), _images(5, 2, 32)
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=10)), _images(10, 8, 128)


def _unet(quick: bool) -> tuple[nn.Module, Batch]:
    width, depth, rows, pixels = (8, 2, 2, 16) if quick else (32, 4, 4, 128)
    pictures, _ = _images(4, rows, pixels)
    labels = torch.randint(4, (rows, pixels, pixels), generator=torch.Generator().manual_seed(2))
    return UNet(4, width, depth), (pictures, labels)


def _vit(quick: bool) -> tuple[nn.Module, Batch]:
    import transformers

    width, layers, heads, pixels, patch = (32, 2, 2, 16, 8) if quick else (384, 8, 6, 224, 16)
    config = transformers.ViTConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * width,
        image_size=pixels, patch_size=patch, num_labels=10,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config), _images(10, 2 if quick else 4, pixels)


def _llama(quick: bool) -> tuple[nn.Module, Batch]:
    import transformers

    width, layers, heads, vocabulary = (32, 2, 4, 64) if quick else (384, 6, 6, 2048)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads // 2, intermediate_size=8 * width // 3, max_position_embeddings=256,
        use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), _text(vocabulary, 2 if quick else 4, 32 if quick else 256)


_GPT_BUDGETS = ("214MB", "176MB", "151MB", "128MB", "96MB", "77MB", "64MB")

WORKLOADS: dict[str, Workload] = {
    "gpt": Workload(
        "GPT d=256, 6 layers, 4 heads, vocabulary 2048, batch 8 × 256, no dropout",
        _gpt, models.next_token_loss, ("model.blocks.*",), _GPT_BUDGETS,
    ),
    "gpt-dropout": Workload(
        "GPT d=256, 6 layers, 4 heads, vocabulary 2048, batch 8 × 256, dropout 0.1",
        functools.partial(_gpt, dropout=0.1), models.next_token_loss, ("model.blocks.*",),
    ),
    "bert": Workload(
        "BERT-Large's layers (1024, 16 heads), 3 of them, vocabulary 2048, batch 2 × 256, dropout 0.1",
        _bert, _text_loss, ("model.bert.encoder.layer.*",),
    ),
    "resnet50": Workload(
        "ResNet-50, batch 8 of 128 × 128",
        _resnet, _image_loss, ("model.resnet.encoder.stages.*.layers.*",),
    ),
    "unet": Workload(
        "U-Net, 32 to 512 channels, batch 4 of 128 × 128",
        _unet, _pixel_loss, ("model.down.*", "model.up.*"),
    ),
    "vit": Workload(
        "ViT d=384, 8 layers, 6 heads, batch 4 of 224 × 224 in patches of 16",
        _vit, _image_loss, ("model.vit.layers.*",),
    ),
    "llama": Workload(
        "Llama d=384, 6 layers, 6 heads in 3 groups, vocabulary 2048, batch 4 × 256",
        _llama, _text_loss, ("model.model.layers.*",),
    ),
}  # fmt: skip
"""The six models by name, and the reference once more with dropout."""
