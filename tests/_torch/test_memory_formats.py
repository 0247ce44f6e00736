"""Ops have the strides without data that they have with, where arguments are in channels last and other formats."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphopt._torch.kernels.eager_layouts import _IN_FORMAT_OF, eager_layouts

KNOWN = {"_fft_r2c.default", "ldexp.Tensor"}
"""Ops of the database that differ: a transform of an expanded tensor, and one that is traced in its parts."""


class Compare(TorchDispatchMode):
    """Runs each op with data and without, and notes those whose first results have other strides."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: set[str] = set()
        self.differing: dict[str, Any] = {}
        self._fake = FakeTensorMode()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, (tuple, list)) and result else result
        if op.namespace != "aten" or op._schema.is_mutable or not isinstance(first, torch.Tensor) or first.dim() < 3:
            return result
        name = str(op).removeprefix("aten.")
        self.ran.add(name)
        with self._fake:
            given = pytree.tree_map_only(torch.Tensor, _without_data, (args, kwargs or {}))
            try:
                found = op(*given[0], **given[1])
            except (RuntimeError, NotImplementedError):
                return result  # an op whose shapes depend on values
        found = found[0] if isinstance(found, (tuple, list)) else found
        if first.numel() and _strides(found) != _strides(first):
            self.differing[name] = (tuple(first.shape), first.stride(), found.stride())
        return result


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def _strides(tensor: torch.Tensor) -> list[int]:
    """Those that matter: of axes with more than one element."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def channels_last(*shape: int) -> torch.Tensor:
    tensor = torch.randn(shape)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if len(shape) in formats:
        return tensor.contiguous(memory_format=formats[len(shape)]).requires_grad_()
    return tensor.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()


CALLS: dict[str, Callable[[], torch.Tensor]] = {
    "native_group_norm.default": lambda: F.group_norm(channels_last(2, 6, 4, 4), 3),
    "native_batch_norm.default": lambda: F.batch_norm(channels_last(3, 5, 4), None, None, training=True),
    "native_batch_norm_backward.default": lambda: F.batch_norm(channels_last(3, 5, 4, 4), None, None, training=True),
    "native_layer_norm_backward.default": lambda: F.layer_norm(channels_last(2, 5, 3), [3]),
    "native_layer_norm.default": lambda: F.layer_norm(channels_last(2, 5, 3), [3]),
    "_softmax.default": lambda: channels_last(2, 5, 3).softmax(1),
    "_softmax_backward_data.default": lambda: channels_last(2, 5, 3).softmax(1),
    "_log_softmax.default": lambda: channels_last(2, 5, 3).log_softmax(1),
    "reflection_pad2d_backward.default": lambda: F.pad(channels_last(2, 3, 5, 5), (1, 1, 1, 1), mode="reflect"),
    "reflection_pad3d.default": lambda: F.pad(channels_last(2, 3, 4, 5, 5), (1, 1) * 3, mode="reflect"),
    "reflection_pad3d_backward.default": lambda: F.pad(channels_last(2, 3, 4, 5, 5), (1, 1) * 3, mode="reflect"),
    "replication_pad2d_backward.default": lambda: F.pad(channels_last(2, 3, 5, 5), (1, 1, 1, 1), mode="replicate"),
    "replication_pad3d.default": lambda: F.pad(channels_last(2, 3, 4, 5, 5), (1, 1) * 3, mode="replicate"),
    "replication_pad3d_backward.default": lambda: F.pad(channels_last(2, 3, 4, 5, 5), (1, 1) * 3, mode="replicate"),
    "channel_shuffle.default": lambda: F.channel_shuffle(channels_last(2, 4, 5, 5).detach(), 2),
    "max_unpool2d.default": lambda: F.max_unpool2d(*F.max_pool2d(channels_last(2, 3, 4, 4), 2, return_indices=True), 2),
    "logaddexp.default": lambda: torch.logaddexp(channels_last(4, 1, 5), channels_last(1, 4, 5)),
    "div.Tensor_mode": lambda: torch.div(channels_last(5, 4, 3), torch.rand(4, 3), rounding_mode="floor"),
    "normal.Tensor_Tensor": lambda: torch.normal(channels_last(3, 4, 2), channels_last(3, 4, 2).detach().abs()),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_op_lays_out_its_result_as_its_kernel_does(name: str) -> None:
    with eager_layouts(), Compare() as compare:
        result = CALLS[name]()
        if result.requires_grad:
            result.square().sum().backward()
    assert name in compare.ran
    assert compare.differing == {}


def test_every_call_is_of_an_op_in_the_table() -> None:
    assert set(CALLS) <= set(_IN_FORMAT_OF)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
def test_no_op_is_missing_in_the_tables() -> None:
    from torch.testing._internal.common_methods_invocations import op_db

    differing: dict[str, Any] = {}
    with eager_layouts():
        for op in op_db:
            if op.supports_autograd and torch.float32 in op.supported_dtypes("cpu"):
                for sample in itertools.islice(op.sample_inputs("cpu", torch.float32, requires_grad=True), 12):
                    differing |= _of_sample(op.op, sample)
    assert {name: found for name, found in differing.items() if name not in KNOWN} == {}


def _of_sample(op: Any, sample: Any) -> dict[str, Any]:
    """What differs in an op and its backward, for arguments in other formats than the given ones."""
    args, kwargs = pytree.tree_map_only(torch.Tensor, _reformatted, ([sample.input, *sample.args], sample.kwargs))
    with Compare() as compare:
        try:
            results = [leaf for leaf in pytree.tree_leaves(op(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
            summed = [leaf.abs().sum() for leaf in results if leaf.requires_grad]
            if summed:
                inputs = [
                    x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.requires_grad
                ]
                torch.autograd.grad(summed, inputs, allow_unused=True)
        except (RuntimeError, ValueError, TypeError, IndexError):
            pass  # wants arguments in other formats
    return compare.differing


def _reformatted(tensor: torch.Tensor) -> torch.Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if tensor.dim() in formats:
        changed = tensor.detach().contiguous(memory_format=formats[tensor.dim()])
    elif tensor.dim() == 3:
        changed = tensor.detach().transpose(1, 2).contiguous().transpose(1, 2)
    else:
        return tensor
    return changed.requires_grad_(tensor.requires_grad)
