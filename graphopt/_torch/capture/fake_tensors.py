"""Example values: tensors without data, the mode they compute in, and the storages they share.

Reads ``torch._subclasses.fake_tensor`` and the address of a storage (``_cdata``): torch tells no other way whether two
tensors share one, or for which tensor with data an example value was made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch._subclasses.functional_tensor import FunctionalTensor

from graphopt._torch.private_names import VALUES, attribute

__all__ = [
    "NEEDS_VALUES",
    "StandIn",
    "as_traced",
    "device_kind",
    "example_twins",
    "has_no_data",
    "mode_of",
    "stand_in_mode",
    "stand_in_of",
    "stands_for_real",
    "storage_key",
]

NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
"""What ops raise on example values where their result, or its size, depends on values."""


_STANDS_FOR = "graphopt_stands_for"
"""The attribute of a mode that says for which device its values stand; torch chooses what ops do by a mode's class."""


@dataclass(frozen=True)
class StandIn:
    """That example values are on the CPU and stand for tensors of another device, which may not be here.

    Autograd asks a device for its streams, and torch built without it ends the process; so values without data are on
    the CPU whatever they stand for.

    Attributes:
        device: the profile of the device that they stand for.
        kind: its type as torch names it, such as ``"cuda"``.
    """

    device: Any
    kind: str


def stand_in_mode(device: Any) -> FakeTensorMode:
    """A mode of values that stand for those of a device with this profile, whose ``kind`` is its type."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    setattr(mode, _STANDS_FOR, StandIn(device, device.kind))
    return mode


def stand_in_of(value: Any) -> StandIn | None:
    """What a value stands for that is for another device, also while it is traced; None for other values."""
    if isinstance(value, FunctionalTensor):
        value = torch._from_functional_tensor(value.elem)  # pyright: ignore[reportPrivateImportUsage]
    return getattr(value.fake_mode, _STANDS_FOR, None) if isinstance(value, FakeTensor) else None


def device_kind(tensor: torch.Tensor) -> str:
    """The type of the device that a tensor is on, or that it stands for one on."""
    if tensor.device.type != "cpu":
        return tensor.device.type
    found = stand_in_of(tensor)
    return "cpu" if found is None else found.kind


def mode_of(values: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """The mode in which example values compute; does nothing where none of them is one."""
    return detect_fake_mode(values) or contextlib.nullcontext()


@contextlib.contextmanager
def as_traced(values: Sequence[Any]) -> Iterator[None]:
    """Ops on example values give what they give while a model is traced, in the mode of these values.

    Kernels that are written for fixed sizes are then replaced by Python's, which keep sizes that vary open.
    """
    with mode_of(values), enable_python_dispatcher():
        yield


def has_no_data(tensor: torch.Tensor) -> bool:
    """Whether a tensor is an example value."""
    return isinstance(tensor, FakeTensor)


def storage_key(tensor: torch.Tensor) -> int:
    """A number that tells storages apart as long as they live."""
    return tensor.untyped_storage()._cdata


def stands_for_real(tensor: torch.Tensor) -> bool:
    """Whether an example value, or what it is a view of, was made for a tensor with data (a parameter, an input)."""
    if not isinstance(tensor, FakeTensor):
        return True
    known = attribute(tensor, "fake_mode.fake_tensor_converter.meta_converter.storage_memo", VALUES)
    return any(storage._cdata == storage_key(tensor) for storage in known.values())


def example_twins(
    values: Sequence[Any], mode: contextlib.AbstractContextManager[Any], device: torch.device | None = None
) -> list[Any]:
    """Example values like the given ones that nothing else refers to; what shared a storage shares one again.

    Args:
        values: tensors, and others, which are returned as they are.
        mode: in which the results compute.
        device: where the results are; by default where the tensors are.
    """
    storages: dict[int, torch.Tensor] = {}

    def twin(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        key = storage_key(value)
        if key not in storages:
            count = value.untyped_storage().nbytes() // value.element_size()
            storages[key] = torch.empty(count, dtype=value.dtype, device=device or value.device)
        empty = torch.empty(0, dtype=value.dtype, device=device or value.device)
        return empty.set_(storages[key].untyped_storage(), value.storage_offset(), value.shape, value.stride())  # type: ignore[call-overload]

    with mode:
        return [twin(value) for value in values]
