"""Which ops there are, and which overload a call means: ``aten.mul`` of a tensor and a number is ``aten.mul.Scalar``.

Private: ``torch._C._jit_resolve_packet``, which asks torch's own argument parser, and the registries of ops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket, _higher_order_ops

__all__ = ["OpOverloadPacket", "higher_order_ops", "is_registered", "resolve_overload"]


def resolve_overload(packet: OpOverloadPacket, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OpOverload:
    """The overload of ``packet`` that takes these arguments.

    Raises:
        RuntimeError: where none does, with the schemas that there are.
    """
    name = torch._C._jit_resolve_packet(packet._qualified_op_name, *args, **kwargs)
    overload: OpOverload = getattr(packet, name or "default")
    return overload


def is_registered(name: str) -> bool:
    """Whether an op is registered under a qualified name such as ``aten::mul``; nothing is loaded to find out."""
    return bool(torch._C._jit_get_schemas_for_operator(name))


def higher_order_ops() -> dict[str, HigherOrderOperator]:
    """The ops that take functions, by their names."""
    return dict(_higher_order_ops)
