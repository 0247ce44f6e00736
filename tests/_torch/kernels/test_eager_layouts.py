"""Ops have the strides without data that they have with: in every mix of layouts of their arguments."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from graphopt._torch.kernels.eager_layouts import _LAID_OUT_AS, eager_layouts

CONTIGUOUS = torch.linspace(0.1, 0.9, 24).view(2, 3, 4)
TRANSPOSED = torch.linspace(0.1, 0.9, 24).view(2, 4, 3).transpose(1, 2)
LAYOUTS = (CONTIGUOUS, TRANSPOSED)
_VALUES: dict[str, Any] = {"number": 0.5, "float": 0.5, "int": 1, "bool": False}


def calls(op: Any) -> Iterator[list[Any]]:
    """The arguments of an op, its tensors in every mix of layouts; none where they have to be of other kinds."""
    required = [argument for argument in op._schema.arguments if not argument.has_default_value()]
    kinds = [str(argument.type) for argument in required]
    if any(argument.kwarg_only for argument in required) or not {*kinds} <= {"Tensor", *_VALUES}:
        return
    for layouts in itertools.product(LAYOUTS, repeat=kinds.count("Tensor")):
        supply = iter(layouts)
        yield [next(supply) if kind == "Tensor" else _VALUES[kind] for kind in kinds]


def differing(op: Any, compared: list[Any] | None = None) -> list[tuple[Any, ...]]:
    """The calls of an op whose result has other strides without data than with; ``compared`` gets all that ran."""
    found = []
    for arguments in calls(op):
        try:
            real = op(*arguments)
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
            continue  # wants other arguments than these
        if not isinstance(real, torch.Tensor):
            continue
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments]
            fake = op(*fakes)
        if compared is not None:
            compared.append(real)
        if fake.stride() != real.stride():
            found.append((str(op), real.stride(), fake.stride()))
    return found


def overload(name: str) -> Any:
    packet, _, which = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), which)


@pytest.mark.parametrize("name", _LAID_OUT_AS)
def test_an_op_has_its_kernels_strides_without_data(name: str) -> None:
    compared: list[Any] = []
    with eager_layouts():
        assert differing(overload(name), compared) == []
    assert len(compared) >= 2  # contiguous and transposed arguments


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("op", [torch.mul, torch.add, torch.div, torch.maximum])
def test_sixteen_bits_that_are_expanded_are_laid_out_as_their_kernel_does(op: Any, dtype: torch.dtype) -> None:
    expanded = torch.ones((), dtype=dtype).expand(2, 3, 4, 5)
    last = torch.ones(2, 3, 4, 5, dtype=dtype).contiguous(memory_format=torch.channels_last)
    for one, other in ((expanded, last), (last, expanded), (expanded, last.float()), (expanded.float(), last)):
        with eager_layouts(), FakeTensorMode() as mode:
            found = op(mode.from_tensor(one), mode.from_tensor(other))
        wanted = op(one, other)
        assert (found.stride(), found.dtype) == (wanted.stride(), wanted.dtype)


def test_torch_is_left_as_it_was() -> None:
    before = differing(torch.ops.aten.softplus_backward.default)
    assert before  # a torch that lays this out as its kernel does needs no entry
    with eager_layouts():
        assert not differing(torch.ops.aten.softplus_backward.default)
    assert differing(torch.ops.aten.softplus_backward.default) == before


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
def test_no_pointwise_op_is_missing_in_the_table() -> None:
    found = []
    with eager_layouts():
        for name in dir(torch.ops.aten):
            packet = getattr(torch.ops.aten, name)
            for which in packet.overloads() if hasattr(packet, "overloads") and not name.endswith("_") else ():
                op = getattr(packet, which)
                written = any(argument.alias_info for argument in op._schema.arguments)
                drawn = torch.Tag.nondeterministic_seeded in op.tags
                if not written and not drawn and (torch.Tag.pointwise in op.tags or "backward" in name):
                    try:
                        found += differing(op)
                    except (RuntimeError, NotImplementedError, AssertionError):
                        continue  # has no rule for tensors without data
    assert found == []
