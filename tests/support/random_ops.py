"""What random networks are made of: ops on rows of features, ops on tensors of any shape, in-place code, randomness."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["OPS", "READ_BOTH", "SHAPE", "SHAPED", "D", "Layers", "Op", "rows_of"]

ROWS, D = 24, 8
SHAPE = (ROWS, D)


class Layers(nn.Module):
    """One layer of each kind that has parameters or buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.wide, self.norm = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.LayerNorm(D)
        self.batch_norm = nn.BatchNorm1d(D)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, D))
        self.register_buffer("average", torch.zeros(D))


Op = Callable[[Any, torch.Tensor, torch.Tensor], Any]
"""Makes a tensor, or several, of two earlier ones with the layers of a network."""

# --- rows of features: (24, 8) to (24, 8) ----------------------------------------------------------------------------


def swap_halves(x: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat([right, left], -1)


def split_unevenly(x: torch.Tensor) -> torch.Tensor:
    a, b, c = x.split([2, 5, D - 7], -1)
    return torch.cat([c.sin(), a, b.cos()], -1)


def statistics(x: torch.Tensor) -> torch.Tensor:
    variance, mean = torch.var_mean(x, -1, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + 1)


def ordered(x: torch.Tensor) -> torch.Tensor:
    values, indices = x.sort(-1)
    return values + x.gather(-1, indices.flip(-1))


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 0.5
    y.add_(1)
    y[:, :2] = 0
    return y.mul_(2)


def attention(x: torch.Tensor) -> torch.Tensor:
    parts = x.view(1, 2, ROWS // 2, D)
    return F.scaled_dot_product_attention(parts, parts, parts, dropout_p=0.2).view(SHAPE)


def running_average(layers: Layers, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        layers.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return x - layers.average


OPS: dict[str, Op] = {
    "tanh": lambda _, x, y: torch.tanh(x),
    "gelu": lambda _, x, y: F.gelu(x),
    "sin": lambda _, x, y: torch.sin(x),
    "relu": lambda _, x, y: F.relu(x),
    "softmax": lambda _, x, y: x.softmax(-1),
    "add": lambda _, x, y: x + y,
    "mul": lambda _, x, y: x * torch.tanh(y),
    "sub the detached": lambda _, x, y: x - y.detach(),
    "scale": lambda layers, x, y: x * layers.scale,
    "linear": lambda layers, x, y: layers.linear(x),
    "gated": lambda layers, x, y: F.glu(layers.wide(x), -1) + y,
    "layer norm": lambda layers, x, y: layers.norm(x),
    "batch norm": lambda layers, x, y: layers.batch_norm(x.contiguous()),
    "matmul": lambda _, x, y: torch.tanh(x @ y.t() / D) @ y,
    "transpose": lambda _, x, y: x.t().contiguous().sin().t(),
    "reshape": lambda _, x, y: x.reshape(D, ROWS).cumsum(0).reshape(SHAPE) / D,
    "view": lambda _, x, y: x.view(2, -1, D).flip(0).view(SHAPE),
    "swap halves": lambda _, x, y: swap_halves(x),
    "split": lambda _, x, y: split_unevenly(x),
    "statistics": lambda _, x, y: statistics(x),
    "sort": lambda _, x, y: ordered(x),
    "in place": lambda _, x, y: in_place(x),
    "dropout": lambda _, x, y: F.dropout(x, 0.3),
    "noise": lambda _, x, y: x + 0.1 * torch.rand_like(y),
    "bernoulli": lambda _, x, y: x * torch.bernoulli(torch.sigmoid(y.detach())),
    "attention": lambda _, x, y: attention(x),
    "running average": lambda layers, x, y: running_average(layers, x),
    "checkpoint": lambda layers, x, y: checkpoint(
        lambda z: F.dropout(torch.tanh(layers.linear(z)), 0.2), x, use_reentrant=False
    ),
}

READ_BOTH = {"add", "mul", "sub the detached", "gated", "matmul", "bernoulli"}


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """A tensor of any shape as 24 rows of 8 features: repeated or cut, a view where it fits."""
    if x.shape == SHAPE:
        return x
    flat = x.reshape(-1)
    if flat.numel() < ROWS * D:
        flat = flat.repeat(-(-ROWS * D // max(1, flat.numel()))) if flat.numel() else flat.new_zeros(ROWS * D)
    return flat[: ROWS * D].view(SHAPE)


# --- tensors of any shape --------------------------------------------------------------------------------------------


class Rounded(torch.autograd.Function):
    """A gradient that is not the derivative: straight through, halved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * 0.5 * (x.abs() < 0.8)


def plane(x: torch.Tensor) -> torch.Tensor:
    """At least two dimensions, each with an element."""
    return x.reshape(1, -1) if x.dim() < 2 else x


def broadcast(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``y`` in a shape that broadcasts with that of ``x``."""
    for candidate in (y, y.flatten()[:1]):
        try:
            if torch.broadcast_shapes(candidate.shape, x.shape) == x.shape:
                return candidate
        except RuntimeError:
            continue
    return x


def write_slices(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = plane(x).clone()
    z[..., ::2] = broadcast(z[..., ::2], y)
    z[:1].mul_(3)
    z.view(-1)[1:3] -= 1
    return z


def write_through_views(x: torch.Tensor) -> torch.Tensor:
    z = plane(x) * 1
    z.transpose(0, -1)[0].fill_(0.5)
    z.flatten(0, -1).narrow(0, 0, 1).add_(2)
    z.diagonal(0, 0, 1).mul_(2)
    return z.sin_()


def write_by_index(x: torch.Tensor) -> torch.Tensor:
    z = plane(x).clone()
    place = torch.tensor([0, z.shape[0] - 1, 0])
    z.index_add_(0, place, torch.ones_like(z[:1]).expand(3, *z.shape[1:]))
    z.masked_fill_(z > 1.5, -0.0)
    return z.scatter_(0, torch.zeros_like(z[:1], dtype=torch.long), z[-1:].detach())


def clamped_in_place(x: torch.Tensor) -> torch.Tensor:
    z = x + 0
    F.relu_(z)
    z.clamp_(max=0.9).add_(x, alpha=0.5)
    return F.dropout(z, 0.4, inplace=True)


def several(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    parts = plane(x).unbind(-1)[:3]
    return *parts, torch.stack(parts).amax(0)


def best(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, places = plane(x).topk(1, -1)
    return values, plane(x).gather(-1, places) * 2


def counted(layers: Any, x: torch.Tensor) -> torch.Tensor:
    layers.count.add_(1)
    layers.seen = layers.seen * 0.5 + x.detach().mean()
    return x * layers.count - layers.seen


def spectrum(x: torch.Tensor) -> torch.Tensor:
    return torch.fft.rfft(plane(x), dim=-1).abs()


def convolved(layers: Any, x: torch.Tensor) -> torch.Tensor:
    image = rows_of(x).view(1, 2, 12, D)
    image = image.contiguous(memory_format=torch.channels_last) if layers.channels_last else image
    return F.max_pool2d(layers.conv(image), 2)


def looped(layers: Any, x: torch.Tensor) -> torch.Tensor:
    state = rows_of(x)[0]
    for step in range(3):
        state = torch.tanh(layers.linear(state) + rows_of(x)[step])
    return state


SHAPED: dict[str, Op] = {
    **{name: lambda layers, x, y, op=op: op(layers, rows_of(x), rows_of(y)) for name, op in OPS.items()},
    "square": lambda _, x, y: x.square(),
    "exp": lambda _, x, y: x.clamp(max=2).exp(),
    "sign of zero": lambda _, x, y: torch.where(x > 0, x, -0.0 * x),
    "sqrt": lambda _, x, y: (x.abs() + 0.1).sqrt(),
    "silu": lambda _, x, y: F.silu(x),
    "leaky relu": lambda _, x, y: F.leaky_relu(x, 0.1),
    "log softmax": lambda _, x, y: plane(x).log_softmax(-1),
    "maximum": lambda _, x, y: torch.maximum(x, broadcast(x, y)),
    "divide": lambda _, x, y: x / (broadcast(x, y).abs() + 1),
    "lerp": lambda _, x, y: torch.lerp(x, broadcast(x, y).expand(x.shape), 0.25),
    "addcmul": lambda _, x, y: torch.addcmul(x, x, broadcast(x, y), value=0.1),
    "where": lambda _, x, y: torch.where(broadcast(x, y) > 0, x, x * 2),
    "sum": lambda _, x, y: x.sum(-1) if x.dim() else x.sum(),
    "sum of all": lambda _, x, y: x.sum(),
    "mean and keep": lambda _, x, y: plane(x).mean(0, keepdim=True),
    "amax": lambda _, x, y: plane(x).amax(-1),
    "max": lambda _, x, y: plane(x).max(0).values,
    "median": lambda _, x, y: plane(x).median(-1)[0],
    "norm": lambda _, x, y: torch.linalg.vector_norm(plane(x), dim=-1),
    "log sum exp": lambda _, x, y: plane(x).logsumexp(0),
    "cumulated": lambda _, x, y: plane(x).cumsum(-1),
    "product": lambda _, x, y: plane(x).tanh().prod(-1),
    "permute": lambda _, x, y: plane(x).movedim(0, -1),
    "transposed": lambda _, x, y: plane(x).transpose(0, -1),
    "expand": lambda _, x, y: plane(x)[:1].expand(4, *plane(x).shape[1:]),
    "unsqueeze": lambda _, x, y: x.unsqueeze(0) if x.dim() < 4 else x.squeeze(),
    "flatten": lambda _, x, y: x.flatten(),
    "flip": lambda _, x, y: plane(x).flip(-1),
    "roll": lambda _, x, y: plane(x).roll(1, 0),
    "step": lambda _, x, y: plane(x)[..., ::2],
    "select": lambda _, x, y: plane(x).select(0, 0),
    "narrow": lambda _, x, y: plane(x).narrow(-1, 0, 1),
    "unfold": lambda _, x, y: rows_of(x).unfold(0, 4, 2),
    "strided": lambda _, x, y: rows_of(x).contiguous().as_strided((5, 4), (3, 2), 1),
    "diagonal": lambda _, x, y: plane(x).diagonal(0, 0, -1),
    "triangle": lambda _, x, y: plane(x).tril(),
    "pad": lambda _, x, y: F.pad(plane(x), (1, 0)),
    "repeat": lambda _, x, y: plane(x)[:2].repeat(2, *[1] * (plane(x).dim() - 1)),
    "cat": lambda _, x, y: torch.cat([x.flatten(), y.flatten()])[:200],
    "index": lambda _, x, y: plane(x)[torch.tensor([0, 0])],
    "embedding": lambda layers, x, y: layers.embedding(plane(x).argmax(-1) % D),
    "tied head": lambda layers, x, y: layers.head(rows_of(x)),
    "frozen": lambda layers, x, y: rows_of(x) * layers.frozen,
    "nested": lambda layers, x, y: layers.block(rows_of(x)),
    "convolution": lambda layers, x, y: convolved(layers, x),
    "recurrence": lambda layers, x, y: looped(layers, x),
    "einsum": lambda _, x, y: torch.einsum("ij,kj->ik", rows_of(x), rows_of(y)[:4]),
    "bmm": lambda _, x, y: torch.bmm(rows_of(x).view(2, 12, D), rows_of(y).view(2, D, 12)[..., :2]),
    "addmm": lambda layers, x, y: torch.addmm(layers.scale, rows_of(x), layers.linear.weight, beta=0.5),
    "double": lambda _, x, y: x.double().cos().float(),
    "through half": lambda _, x, y: x.half().float(),
    "through int": lambda _, x, y: x + x.detach().int(),
    "spectrum": lambda _, x, y: spectrum(x),
    "detached": lambda _, x, y: x.detach() + y.sum() * 0.01,
    "custom": lambda _, x, y: Rounded.apply(x),
    "several": lambda _, x, y: several(x),
    "best": lambda _, x, y: best(x),
    "write slices": lambda _, x, y: write_slices(x, y),
    "write through views": lambda _, x, y: write_through_views(x),
    "write by index": lambda _, x, y: write_by_index(x),
    "clamp in place": lambda _, x, y: clamped_in_place(x),
    "overwrite": lambda _, x, y: x.mul_(0.5) if x.grad_fn is not None else x * 0.5,
    "counted": lambda layers, x, y: counted(layers, x),
    "normal": lambda _, x, y: x + torch.randn(x.shape[-1:] if x.dim() else ()),
    "random buffer": lambda layers, x, y: rows_of(x) * layers.noise.uniform_(0.5, 1.0),
    "random permutation": lambda _, x, y: plane(x)[torch.randperm(plane(x).shape[0])],
    "channel dropout": lambda _, x, y: F.dropout1d(rows_of(x).view(2, 12, D), 0.4),
    "alpha dropout": lambda _, x, y: F.alpha_dropout(x, 0.2),
    "gumbel": lambda _, x, y: F.gumbel_softmax(rows_of(x), hard=True),
    "reentrant checkpoint": lambda layers, x, y: checkpoint(
        lambda z: F.dropout(layers.norm(z).sin(), 0.2), rows_of(x), use_reentrant=True
    ),
}
"""The ops on rows, and those that take any shape; any of them may give a view of what it gets."""
