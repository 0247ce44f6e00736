"""Ops that are made of others, taken apart as a CUDA device takes them, where what is traced is on the CPU.

A forward program has ``scaled_dot_product_attention`` and ``rms_norm`` as one call each; which kernels run is chosen by
the device. Values of a program without data are on the CPU whatever they stand for (``_torch.StandIn``), so the choice
is made here, by torch's rules for CUDA: flash attention for 16-bit tensors without a mask, memory-efficient attention
for others that fit its kernels, and the products one by one for the rest. The attention of cuDNN, which some releases
of torch prefer on Hopper, keeps as many bytes as flash attention.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from graphopt import _torch
from graphopt.ir.ops.layers.rms_norm import rms_norm_as_one

__all__ = ["on_device"]

logger = logging.getLogger("graphopt")

_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)
_FLASH_HEAD = 256
"""The widest head of the flash kernels."""

_told: set[str] = set()
"""What has been said once."""


def on_device(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """What a device runs for a call of such an op, to be called; None where it runs what is traced anyway."""
    taken = _TAKEN.get(target)
    first = next((arg for arg in args if isinstance(arg, torch.Tensor)), None)
    if taken is None or first is None:
        return None
    found = _torch.stand_in_of(first)
    if found is None or found.kind != "cuda":
        return None
    return taken(found, args, kwargs)


# --- attention -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Attention:
    """The arguments of ``aten::scaled_dot_product_attention``."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def heads_are_alike(self) -> bool:
        """Whether all heads of query, key and value have one width, which the flash kernels want."""
        widths = {tensor.shape[-1] for tensor in self.tensors}
        return len(widths) == 1 and max(widths) <= _FLASH_HEAD

    @property
    def can_be_flash(self) -> bool:
        """Whether flash attention takes it."""
        square = not self.is_causal or self.query.shape[-2] == self.key.shape[-2]
        plain = self.attn_mask is None and all(tensor.dim() == 4 for tensor in self.tensors)
        enabled = torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
        return enabled and plain and square and self.query.dtype in _HALVES and self.heads_are_alike

    @property
    def can_be_efficient(self) -> bool:
        """Whether memory-efficient attention takes it."""
        wide = 8 if self.query.dtype in _HALVES else 4
        aligned = all(tensor.shape[-1] % wide == 0 for tensor in self.tensors)
        same_heads = len({tensor.shape[-3] for tensor in self.tensors if tensor.dim() == 4}) == 1
        kept = self.attn_mask is None or not self.attn_mask.requires_grad
        known = self.query.dtype in (*_HALVES, torch.float32) and all(tensor.dim() == 4 for tensor in self.tensors)
        enabled = torch.backends.cuda.mem_efficient_sdp_enabled()  # type: ignore[no-untyped-call]
        return enabled and known and aligned and same_heads and kept


def _attention(stands: _torch.StandIn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any]:
    call = _Attention(*args, **kwargs)
    ampere = "bfloat16" in stands.device.flops  # the flash kernels are for tensor cores that know this dtype
    if call.can_be_flash and ampere:
        return lambda: _flash(call)
    if call.can_be_efficient:
        return lambda: _efficient(call)
    return lambda: _by_products(call)


def _flash(call: _Attention) -> torch.Tensor:
    """Heads are padded to multiples of 8, and scaled as without."""
    width = call.query.shape[-1]
    missing = -width % 8
    given = [pad(tensor, (0, missing)) if missing else tensor for tensor in call.tensors]
    scale = width**-0.5 if call.scale is None else call.scale
    kernel = _aten._scaled_dot_product_flash_attention.default
    result: torch.Tensor = kernel(*given, call.dropout_p, call.is_causal, False, scale=scale)[0]
    return result[..., :width] if missing else result


def _efficient(call: _Attention) -> torch.Tensor:
    """The mask, where there is one, is added to the scores and is aligned to 16 elements."""
    bias = None if call.attn_mask is None else _bias(call, call.attn_mask)
    grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in call.tensors)
    kernel = _aten._scaled_dot_product_efficient_attention.default
    result: torch.Tensor = kernel(*call.tensors, bias, grad, call.dropout_p, call.is_causal, scale=call.scale)[0]
    return result


def _bias(call: _Attention, mask: torch.Tensor) -> torch.Tensor:
    """A mask as what is added to the scores, shape ``[batch, heads, queries, keys]``."""
    if mask.dtype is torch.bool:
        zeros = torch.zeros((), dtype=call.query.dtype, device=mask.device)
        mask = torch.where(mask, zeros, float("-inf"))
    keys = mask.shape[-1]
    if keys % 16:
        mask = pad(mask, (0, -keys % 16))[..., :keys]
    batch, heads, queries, _ = call.query.shape
    return mask.expand(batch, heads, queries, keys)


def _by_products(call: _Attention) -> torch.Tensor:
    kernel = _aten._scaled_dot_product_attention_math.default
    given = (*call.tensors, call.attn_mask, call.dropout_p, call.is_causal)
    result: torch.Tensor = kernel(*given, scale=call.scale, enable_gqa=call.enable_gqa)[0]
    return result


# --- norms and recurrent layers --------------------------------------------------------------------------------------


def _rms_norm(_stands: _torch.StandIn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any]:
    return lambda: rms_norm_as_one(*args, **kwargs)


def _recurrent(_stands: _torch.StandIn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Say that cuDNN's kernel is not what is counted; the products are traced one by one."""
    if "recurrent" not in _told:
        _told.add("recurrent")
        logger.warning(
            "nn.LSTM, nn.GRU and nn.RNN run as one kernel of cuDNN on CUDA, whose workspace is not known without the "
            "device: what is captured are their matrix products one by one, which take more bytes and more time"
        )


_TAKEN: dict[Any, Callable[..., Callable[[], Any] | None]] = {
    _aten.scaled_dot_product_attention.default: _attention,
    _aten.rms_norm.default: _rms_norm,
    **dict.fromkeys((_aten.lstm.input, _aten.gru.input, _aten.rnn_tanh.input, _aten.rnn_relu.input), _recurrent),
}
"""What is taken apart by device; each gives what the device runs, or None for what is traced anyway."""
