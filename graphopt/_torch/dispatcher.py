"""What torch's dispatcher has registered for an op: autocast's rules, and whether it is made of other ops.

Asks ``torch._C`` for the dispatcher's tables, which is the only place that lists autocast's rules.
"""

from __future__ import annotations

import torch
from torch._ops import OpOverload

from graphopt._torch.private_names import AUTOCAST, require

__all__ = ["autocast_operators", "has_autocast_rule", "is_composite", "qualified_name"]


def has_autocast_rule(op: OpOverload, device: str) -> bool:
    """Whether ``torch.autocast`` has a rule of its own for an op on a device type (``cpu``, ``cuda``)."""
    require(AUTOCAST)
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), _autocast_key(device))


def is_composite(op: OpOverload) -> bool:
    """Whether an op is defined by other ops, for which autocast may have rules."""
    require(AUTOCAST)
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def qualified_name(op: OpOverload) -> str:
    """The name of an op with namespace and overload: ``aten::softmax.int``."""
    return op.name()


def autocast_operators(device: str) -> list[OpOverload]:
    """Every op for which ``torch.autocast`` has a rule on a device type, by name."""
    require(AUTOCAST)
    return [
        _operator(name)
        for name in sorted(torch._C._dispatch_get_all_op_names())
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, _autocast_key(device))
    ]


def _autocast_key(device: str) -> str:
    """The name of the dispatch key under which autocast's rules for a device type are registered."""
    return f"Autocast{device.upper()}"


def _operator(qualified: str) -> OpOverload:
    """The op of a name with namespace and overload."""
    namespace, _, rest = qualified.partition("::")
    name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name)
    return getattr(packet, overload or "default")
