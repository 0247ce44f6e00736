"""Seconds of a call without running it: arithmetic or memory traffic, whichever takes longer.

After Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for multicore architectures",
Communications of the ACM 52(4), 2009.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from graphopt import _torch
from graphopt.analysis.costs.isolated_call import call_tensors, real_call, sizes
from graphopt.analysis.costs.profiles import DeviceProfile
from graphopt.ir.node import Phase, info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.values import tensors_of

__all__ = ["call_device", "call_precision", "flops_of", "moved_bytes", "roofline_seconds"]

logger = logging.getLogger(__name__)

_ATTENTION_DIMENSIONS = 4
"""Of queries and of their gradients: sequences, heads, tokens, features."""


def roofline_seconds(node: fx.Node, profile: DeviceProfile) -> float:
    """``max(flops / rate, bytes / bandwidth) + overhead``, in seconds.

    The rate is the peak of the op's dtype or, for attention, what kernels for it reach. Bytes are those that the call
    reads and writes; for a copy between host and device, the link between the two takes the place of the device's
    memory. A call that starts or awaits a transfer takes the overhead alone, since the copy runs beside.

    Args:
        node: a call of a program; symbolic sizes are taken by their example.
        profile: what its device can do.
    """
    if info(node).phase is Phase.TRANSFER:
        return profile.overhead
    crossing = _crosses(node)
    bandwidth = profile.host_bandwidth if crossing else profile.memory_bandwidth
    arithmetic = flops_of(node) / _rate(node, profile)
    return max(arithmetic, moved_bytes(node) / bandwidth) + profile.overhead


def _rate(node: fx.Node, profile: DeviceProfile) -> float:
    """Floating-point operations per second that a call reaches."""
    precision, name = call_precision(node), str(real_call(node)[0])
    if "scaled_dot_product" not in name:
        return profile.peak_flops(precision)
    queries = next((tensor for tensor in _given(node) if tensor.dim() == _ATTENTION_DIMENSIONS), None)
    if queries is None:
        return profile.peak_flops(precision)
    return profile.attention_flops(precision, sizes(queries.shape)[-2], backward="backward" in name)


def call_device(node: fx.Node) -> torch.device:
    """The device that a call runs on: the first of its tensors' devices that is not the CPU, else the CPU."""
    devices = [tensor.device for tensor in call_tensors(node)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def call_precision(node: fx.Node) -> torch.dtype:
    """The dtype that a call computes in: that of the first of its arguments that has floating-point numbers."""
    return next((tensor.dtype for tensor in _given(node) if tensor.dtype.is_floating_point), torch.float32)


def moved_bytes(node: fx.Node) -> int:
    """Bytes of the elements that a call reads and writes; those that it copies between host and device count once.

    An element that a view repeats counts once.
    """
    read, written = _bytes(_given(node)), _bytes(_written(node))
    return min(read, written) if _crosses(node) else read + written


def _given(node: fx.Node) -> list[torch.Tensor]:
    return [tensor for source in node.all_input_nodes for tensor in tensors_of(value_of(source))]


def _written(node: fx.Node) -> list[torch.Tensor]:
    changed = schema.mutated_inputs(node)
    values = [value_of(source) for source in changed] if changed else [_result(node)]
    return [tensor for value in values for tensor in tensors_of(value)]


def _crosses(node: fx.Node) -> bool:
    """Whether what is written is on another device than everything that is read."""
    changed = set(schema.mutated_inputs(node))  # thousands, where one call updates all parameters
    read = {t.device.type for n in node.all_input_nodes if n not in changed for t in tensors_of(value_of(n))}
    return bool(read) and read.isdisjoint(tensor.device.type for tensor in _written(node))


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    total = 0
    for tensor in tensors:
        extents = zip(sizes(tensor.shape), sizes(tensor.stride()), strict=True)
        total += tensor.element_size() * math.prod(size for size, stride in extents if stride or not size)
    return total


def flops_of(node: fx.Node) -> int:
    """Floating-point operations of the matrix products, convolutions and attention in a call; 0 for other ops.

    The formulas are torch's (``torch.utils.flop_counter``), except that a kernel for causal attention skips half of the
    products, that the gradients of a convolution with groups are counted by group, and that attention on CPUs is known.
    Ops that are made of others, as they are in forward programs, are counted by their parts.
    """
    target, args, kwargs = real_call(node)
    if not isinstance(target, _torch.OpOverload) or not _given(node):
        return 0
    known = _FORMULAS.get(target._schema.name)
    if known is None and torch.Tag.pointwise in target.tags:
        return 0
    args, kwargs = _torch.map_aggregate(
        (args, kwargs), lambda a: _without_data(value_of(a) if isinstance(a, fx.Node) else a)
    )
    formula = known or partial(_by_parts, target)
    try:
        count = formula(*args, **kwargs, out_val=_without_data(_result(node)))
    except Exception as error:  # no formula for this overload, or nothing that runs without data
        logger.debug("the matrix products in %s are not counted: %s", node.name, error)
        return 0
    causal = "attention" in target._schema.name and _argument(target, args, kwargs, "is_causal") is True
    return int(count) // 2 if causal else int(count)


def _result(node: fx.Node) -> Any:
    """What the op itself returns, without the generator's state that may be returned beside it."""
    value = value_of(node)
    return value[1] if node.target is _torch.run_and_save_rng_state else value


def _without_data(value: Any) -> Any:
    """A value with plain sizes on the device ``meta``."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(sizes(value.shape), sizes(value.stride()), dtype=value.dtype, device="meta")
    if isinstance(value, (tuple, list)):
        return [_without_data(item) for item in value]
    if isinstance(value, torch.device):
        return torch.device("meta")
    return _torch.size_hint(value) if isinstance(value, torch.SymInt) else value


def _by_parts(target: _torch.OpOverload, *args: Any, out_val: Any, **kwargs: Any) -> int:
    """Count while the call runs on tensors without data."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        target(*args, **kwargs)
    return int(counter.get_total_flops())


def _argument(target: _torch.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], name: str) -> Any:
    for index, argument in enumerate(target._schema.arguments):
        if argument.name == name:
            return args[index] if index < len(args) else kwargs.get(name, argument.default_value)
    return None


class _ConvolutionBackward(NamedTuple):
    """The arguments of ``aten::convolution_backward``, in its order."""

    gradient: torch.Tensor
    x: torch.Tensor
    weight: torch.Tensor
    bias_sizes: Any
    stride: Any
    padding: Any
    dilation: Any
    transposed: bool
    output_padding: Any
    groups: int
    mask: Sequence[bool]


def _convolution_backward_flops(*args: Any, out_val: Any) -> int:
    """Each gradient (of the input, of the weight) takes as many multiplications and additions as forward does."""
    call = _ConvolutionBackward(*args)
    places = (call.x if call.transposed else call.gradient).shape[2:]
    once = 2 * call.x.shape[0] * math.prod(places) * call.weight.numel()
    return once * (int(call.mask[0]) + int(call.mask[1]))


_KNOWN: dict[str, Callable[..., int]] = {str(op).replace(".", "::"): count for op, count in flop_registry.items()}


def _product_flops(a: Any, b: Any, *_: Any, out_val: Any) -> int:
    return int(2 * a.shape[0] * a.shape[1] * b.shape[1])


_FORMULAS: dict[str, Callable[..., int]] = {
    **_KNOWN,
    "graphopt::float8_mm": _product_flops,
    "graphopt::mx_mm": _product_flops,
    "aten::convolution_backward": _convolution_backward_flops,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _KNOWN["aten::_scaled_dot_product_flash_attention"],
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _KNOWN[
        "aten::_scaled_dot_product_flash_attention_backward"
    ],
}
