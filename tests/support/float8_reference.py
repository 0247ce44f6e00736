"""Linear layers in float8 as ten lines of eager PyTorch: what the pass ``Float8`` is held against."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def rounded(x: torch.Tensor, recipe: str, summed: int, dtype: torch.dtype) -> torch.Tensor:
    """What a matrix stands for in float32 behind its cast; ``summed`` is the dimension that the product sums over."""
    if recipe == "mx":
        blocks = x.float().unflatten(summed, (-1, 32))
        exponent = torch.floor(torch.log2(blocks.abs().amax(summed + 1, keepdim=True).clamp(min=2.0**-119))) - 8
        cast = (blocks * torch.exp2(-exponent)).clamp(-448, 448).to(E4M3).float()
        return (cast * torch.exp2(exponent)).flatten(summed, summed + 1)
    largest = x.abs().amax() if recipe == "tensorwise" else x.abs().amax(summed, keepdim=True)
    bound = torch.finfo(dtype).max
    scale = (bound / largest.double().clamp(min=1e-12)).float()
    if recipe == "rowwise":
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return (x.float() * scale).clamp(-bound, bound).to(dtype).float() / scale


def product(a: torch.Tensor, b: torch.Tensor, recipe: str, dtype: torch.dtype = E4M3) -> torch.Tensor:
    """``a @ b`` in 8 bits, of which ``a`` has another dtype there than ``b`` where it is a gradient."""
    first = rounded(a, recipe, 1, dtype if recipe == "tensorwise" else E4M3)
    with torch.autocast("cpu", enabled=False):
        return torch.mm(first, rounded(b, recipe, 0, E4M3)).to(a.dtype)


class Linear8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, recipe: str) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe = recipe
        return product(x, weight.t(), recipe)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        to_input = product(gradient, weight, ctx.recipe, E5M2) if ctx.needs_input_grad[0] else None
        to_weight = product(gradient.t(), x, ctx.recipe, E5M2) if ctx.needs_input_grad[1] else None
        return to_input, None if to_weight is None else to_weight.to(weight.dtype), None


def float8_linear(layer: nn.Linear, x: torch.Tensor, recipe: str = "tensorwise") -> torch.Tensor:
    """``nn.Linear.forward`` with its products in 8 bits, where features are multiples of 16."""
    if layer.in_features % 16 or layer.out_features % 16:
        return F.linear(x, layer.weight, layer.bias)
    flat = x.reshape(-1, x.shape[-1])
    found = Linear8.apply(flat, layer.weight, recipe)
    if layer.bias is not None:
        found = found + layer.bias
    return found.view(*x.shape[:-1], -1)
