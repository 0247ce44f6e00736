"""Which overload of an op a call means: ``aten.mul`` of a tensor and a number is ``aten.mul.Scalar`` in a program.

Private: ``torch._C._jit_resolve_packet``, which asks torch's own argument parser.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

__all__ = ["OpOverloadPacket", "resolve_overload"]


def resolve_overload(packet: OpOverloadPacket, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OpOverload:
    """The overload of ``packet`` that takes these arguments.

    Raises:
        RuntimeError: where none does, with the schemas that there are.
    """
    name = torch._C._jit_resolve_packet(packet._qualified_op_name, *args, **kwargs)
    overload: OpOverload = getattr(packet, name or "default")
    return overload
