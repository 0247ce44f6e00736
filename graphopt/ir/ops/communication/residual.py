"""The ops on what a rank has not sent yet: add a gradient to it, take away what is sent.

``graphopt.ir.ops.communication.sparse`` says how they make a step.

Source: Lin et al., Deep Gradient Compression, ICLR 2018 (arXiv 1712.01887), sections 3.1 and 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from graphopt.ir.ops.define import define, described, require
from graphopt.ir.ops.values import is_dense

__all__ = ["accumulate_", "clear_at_", "keep_rest_"]

_PIECE = {"cpu": 1 << 17, "cuda": 1 << 22}
"""Elements that are accumulated at a time: what the cache of a CPU's thread holds, and what keeps a GPU busy."""


# --- accumulating ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rule:
    """What is added of a gradient, and how: the arguments of ``accumulate_`` by these names.

    ``parameter`` is None where there is no weight decay.
    """

    momentum: float
    nesterov: bool
    scale: torch.Tensor | None
    parameter: torch.Tensor | None
    weight_decay: float
    dampening: float
    buffer: bool


def _accumulate(
    gradient: torch.Tensor,
    u: torch.Tensor | None,
    v: torch.Tensor,
    momentum: float,
    nesterov: bool,
    scale: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
    parameter: torch.Tensor | None = None,
    weight_decay: float = 0.0,
    dampening: float = 0.0,
    buffer: bool = False,
) -> None:
    """Accumulate where ``keep`` can be read without waiting."""
    _check_accumulate(gradient, u, v, momentum, nesterov, scale, keep, parameter, weight_decay, dampening, buffer)
    rule = _Rule(momentum, nesterov, scale, parameter if weight_decay else None, weight_decay, dampening, buffer)
    _accumulate_pieces(gradient, u, v, rule, keep is None or bool(keep.item()))


def _accumulate_unread(
    gradient: torch.Tensor,
    u: torch.Tensor | None,
    v: torch.Tensor,
    momentum: float,
    nesterov: bool,
    scale: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
    parameter: torch.Tensor | None = None,
    weight_decay: float = 0.0,
    dampening: float = 0.0,
    buffer: bool = False,
) -> None:
    """Accumulate where reading ``keep`` would wait for the device."""
    _check_accumulate(gradient, u, v, momentum, nesterov, scale, keep, parameter, weight_decay, dampening, buffer)
    rule = _Rule(momentum, nesterov, scale, parameter if weight_decay else None, weight_decay, dampening, buffer)
    _accumulate_pieces(gradient, u, v, rule, True if keep is None else keep.reshape(()) != 0)


def _accumulate_pieces(
    gradient: torch.Tensor, u: torch.Tensor | None, v: torch.Tensor, rule: _Rule, keep: torch.Tensor | bool
) -> None:
    """Accumulate piece by piece: a CPU reads and writes each piece once, and nothing of full size is allocated."""
    flat = _in_memory_order(gradient, gradient)
    u = u if u is None or u.dim() == 1 else u.as_strided([u.numel()], [1])
    decayed = None if rule.parameter is None else _in_memory_order(rule.parameter, gradient)
    scale = rule.scale
    size = _PIECE[v.device.type] * (torch.get_num_threads() if v.device.type == "cpu" else 1)
    changed = flat.dtype is not v.dtype or scale is not None or decayed is not None
    scratch = v.new_empty(min(size, v.numel()) if changed else 0)  # whatever keep says: memory is the same every step
    if keep is False:
        return
    for start in range(0, v.numel(), size):
        part = slice(start, start + size)
        g = scratch[: flat[part].numel()].copy_(flat[part]) if changed else flat[part]
        if scale is not None:
            g.mul_(scale.reshape(()))
        if decayed is not None:
            g.add_(decayed[part], alpha=rule.weight_decay)
        _add(g, None if u is None else u[part], v[part], rule, keep)


def _add(g: torch.Tensor, u: torch.Tensor | None, v: torch.Tensor, rule: _Rule, keep: torch.Tensor | bool) -> None:
    """Add one piece of a gradient; where ``keep`` is a tensor that holds False, put back what was there."""
    written = [x for x in (u, v) if x is not None] if isinstance(keep, torch.Tensor) else []
    before = [x.clone() for x in written]
    if u is None:
        v.add_(g)
    elif rule.buffer:
        u.mul_(rule.momentum).add_(g, alpha=1 - rule.dampening)  # rounded as torch.optim.SGD rounds it
        v.add_(u, alpha=rule.momentum if rule.nesterov else 1.0)
        if rule.nesterov:
            v.add_(g)
    elif rule.nesterov:
        u.add_(g).mul_(rule.momentum)
        v.add_(u).add_(g)
    else:
        torch.add(g, u, alpha=rule.momentum, out=u)
        v.add_(u)
    for x, old in zip(written, before, strict=True):
        assert isinstance(keep, torch.Tensor)
        torch.where(keep, x, old, out=x)


def _in_memory_order(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The elements of ``x``, flat, in the order in which ``like`` has them in memory; a view where that is possible."""
    if not is_dense(like):
        return x.reshape(-1)
    if x.stride() != like.stride():
        x = torch.empty_like(like, dtype=x.dtype).copy_(x)
    return x.as_strided([x.numel()], [1])


def _check_accumulate(
    gradient: torch.Tensor,
    u: torch.Tensor | None,
    v: torch.Tensor,
    momentum: float,
    nesterov: bool,
    scale: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
    parameter: torch.Tensor | None = None,
    weight_decay: float = 0.0,
    dampening: float = 0.0,
    buffer: bool = False,
) -> None:
    require(
        gradient.is_floating_point(), "accumulate_", f"the gradient must be real floating-point, not {gradient.dtype}"
    )
    dtype = torch.float64 if gradient.dtype is torch.float64 else torch.float32
    shaped = buffer and u is not None and u.dim() != 1
    if shaped:
        _check_buffer(gradient, u, dtype)
    for name, kept in (("u", None if shaped else u), ("v", v)):
        require(
            kept is None or (kept.dim() == 1 and kept.numel() == gradient.numel() and kept.dtype is dtype),
            "accumulate_",
            f"for a gradient of {gradient.numel()} elements and {gradient.dtype}, {name} must be flat, of as many "
            f"elements and {dtype}, not {described(kept)}",
        )
    for name, single in (("scale", scale), ("keep", keep)):
        require(
            single is None or single.numel() == 1, "accumulate_", f"{name} must be one element, not {described(single)}"
        )
    require(
        parameter is None or parameter.shape == gradient.shape,
        "accumulate_",
        f"the parameter must have the gradient's shape {list(gradient.shape)}, not be {described(parameter)}",
    )


def _check_buffer(gradient: torch.Tensor, u: torch.Tensor | None, dtype: torch.dtype) -> None:
    """What an optimizer keeps is read and written as it lies in memory, which has to be as the gradient lies."""
    assert u is not None
    require(
        u.dtype is dtype and u.shape == gradient.shape,
        "accumulate_",
        f"for a gradient of shape {list(gradient.shape)} and {gradient.dtype}, the optimizer's momentum must be of "
        f"this shape and {dtype}, not {described(u)}",
    )
    require(
        is_dense(gradient) and _order(u) == _order(gradient),
        "accumulate_",
        f"the optimizer's momentum has the strides {list(u.stride())}, and the gradient {list(gradient.stride())}: "
        "load a state whose tensors lie in memory as the parameters do",
    )


def _order(x: torch.Tensor) -> list[int]:
    """The strides, but for dimensions of one element, where they mean nothing."""
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size != 1]


# --- at indices ------------------------------------------------------------------------------------------------------


def _clear_at(x: torch.Tensor, indices: torch.Tensor) -> None:
    _check_indices("clear_at_", x, indices)
    x.index_fill_(0, indices.long(), 0.0)


def _keep_rest(v: torch.Tensor, indices: torch.Tensor, sent: torch.Tensor) -> None:
    _check_keep_rest(v, indices, sent)
    v.index_add_(0, indices, sent.to(v.dtype), alpha=-1)


def _check_indices(op: str, x: torch.Tensor, indices: torch.Tensor) -> None:
    require(x.dim() == 1, op, f"the tensor to write to must be flat, not {described(x)}")
    require(
        indices.dim() == 1 and indices.dtype is torch.int32,
        op,
        f"indices must be flat and torch.int32, not {described(indices)}",
    )


def _check_keep_rest(v: torch.Tensor, indices: torch.Tensor, sent: torch.Tensor) -> None:
    _check_indices("keep_rest_", v, indices)
    require(
        sent.shape == indices.shape and sent.is_floating_point(),
        "keep_rest_",
        f"for {indices.numel()} indices, what was sent must be as many numbers, not {described(sent)}",
    )


accumulate_ = define(
    "accumulate_(Tensor gradient, Tensor(a!)? u, Tensor(b!) v, float momentum, bool nesterov, Tensor? scale=None, "
    "Tensor? keep=None, Tensor? parameter=None, float weight_decay=0.0, float dampening=0.0, bool buffer=False) -> ()",
    _accumulate,
    _check_accumulate,
    _accumulate_unread,
)
"""``accumulate_(gradient, Tensor(a!)? u, Tensor(b!) v, momentum, nesterov, scale?, keep?, parameter?, ...)``.

Add a gradient to what this rank has not sent yet. With ``g = scale * gradient + weight_decay * parameter``:

* momentum correction: ``u = momentum * u + g; v = v + u``;
* with ``nesterov``: ``u = momentum * (u + g); v = v + u + g``;
* with ``buffer``, ``u`` is what ``torch.optim.SGD`` keeps: ``u = momentum * u + (1 - dampening) * g; v = v + u``, or
  with ``nesterov`` ``v = v + g + momentum * u``;
* with ``u`` None (error feedback): ``v = v + g``.

Args:
    gradient: of any floating-point dtype and any strides; its elements are taken in the order of its memory where that
        holds them without gaps (a transposed or channels-last gradient as it lies), else in the order of its shape.
    u: momentum; None for error feedback.
        With ``buffer`` it may have the gradient's shape; its strides are then the gradient's.
    v: the residual. Both flat, of ``gradient.numel()`` elements, float64 for a float64 gradient, else float32.
    momentum: its factor; not read where ``u`` is None.
    nesterov: as above.
    scale: one element: 1 / loss scale, or the factor of local clipping. None for 1.
    keep: one element; where it is 0, ``u`` and ``v`` stay as they are to the bit, whatever the gradient holds.
    parameter: of the gradient's shape; taken in the gradient's order. For weight decay within the residual.
    weight_decay: its factor.
    dampening: as above; not read without ``buffer``.
    buffer: as above.
"""

clear_at_ = define("clear_at_(Tensor(a!) x, Tensor indices) -> ()", _clear_at, partial(_check_indices, "clear_at_"))
"""``clear_at_(Tensor(a!) x, Tensor indices) -> ()``: write 0 at the indices (int32) of a flat tensor."""

keep_rest_ = define("keep_rest_(Tensor(a!) v, Tensor indices, Tensor sent) -> ()", _keep_rest, _check_keep_rest)
"""``keep_rest_(Tensor(a!) v, Tensor indices, Tensor sent) -> ()``: subtract from the residual what was sent.

Leaves what rounding took away, and exactly 0 where ``sent`` is ``v[indices]``. ``indices`` are distinct and int32.
"""
