"""Programs captured for a device that need not be here: without data, as that device would run them."""

from __future__ import annotations

import copy
from collections import Counter

import torch
import torch.nn.functional as F
from torch import nn

import graphopt
from graphopt import Program


def _ops(program: Program) -> Counter[str]:
    return Counter(str(node.target).removeprefix("aten.") for node in program.nodes if node.op == "call_function")


class Block(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.into = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        rows, columns, width = x.shape
        query, key, value = self.into(self.norm(x)).view(rows, columns, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        return x + self.scale * self.drop(self.out(mixed.transpose(1, 2).reshape(x.shape)))


def _loss(model: nn.Module, *batch: torch.Tensor | None) -> torch.Tensor:
    return model(*batch).float().square().mean()


def _captured(model: nn.Module, *batch: torch.Tensor | None, device: str = "h100-80gb", step: bool = False) -> Program:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True) if step else None
    return graphopt.capture(model, batch, loss=_loss, optimizer=optimizer, device=device)


def test_a_program_is_the_same_with_data_on_meta_and_made_without_data() -> None:
    with_data = Block()
    with graphopt.without_data():
        without = Block()
    on_meta = copy.deepcopy(with_data).to("meta")
    texts = {
        _captured(model, torch.empty(2, 9, 64, device=device), step=True).to_text()
        for model, device in ((with_data, "cpu"), (without, "cpu"), (without, "meta"), (on_meta, "meta"))
    }
    assert len(texts) == 1
    assert "# device: h100-80gb, captured without data" in texts.pop()
