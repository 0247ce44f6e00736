"""torch's own lists of what autocast does, op by op: the rewritten program against eager PyTorch under autocast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists

import graphopt
from graphopt import _torch
from graphopt.passes import MixedPrecision
from graphopt.rewriting.precision import autocast_lists
from graphopt.rewriting.precision.autocast_rules import Autocast, Treatment
from tests.support.training import identical

FORWARD_ONLY = ("_addmm_activation", "_native_multi_head_attention")
"""Ops that torch has no derivative of."""

SLOW_IN_FLOAT16 = ("conv_transpose3d",)
"""Ops that take seconds in float16 on a CPU."""

LOW = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Call(nn.Module):
    """Calls one function; its tensor arguments are the module's inputs."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
        super().__init__()
        leaves, self.structure = _torch.pytree.tree_flatten((args, kwargs))
        self.leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = _torch.pytree.tree_unflatten(leaves, self.structure)
        return self.function(*args, **kwargs)


Case = tuple[str, Callable[..., Any], Any, dict[str, Any]]


def cases() -> Iterator[Any]:
    torch.manual_seed(0)
    lists = AutocastCPUTestLists(torch.device("cpu"))
    nn_ops: Any = torch._C._nn
    for group, owner in (("torch_16", torch), ("torch_fp32", torch), ("nn_16", nn_ops), ("nn_fp32", nn_ops)):
        for name, args, *rest in getattr(lists, group):
            for dtype in LOW if name not in SLOW_IN_FLOAT16 else ("bfloat16",):
                case = (dtype, getattr(owner, name), args, rest[0] if rest else {})
                yield pytest.param(case, id=f"{name}-{dtype}")
    for group in ("torch_expect_builtin_promote", "torch_need_autocast_promote"):
        for name, *given in getattr(lists, group):
            for dtype, args in zip(LOW, given, strict=False):
                yield pytest.param((dtype, getattr(torch, name), args, {}), id=f"{name}-{dtype}-mixed")
    for name, *given in lists.methods_expect_builtin_promote:
        for dtype, args in zip(LOW, given, strict=False):
            if hasattr(torch.Tensor, name):
                yield pytest.param((dtype, getattr(torch.Tensor, name), args, {}), id=f"{name}-{dtype}-method")


def tensors_of(case: Case) -> list[torch.Tensor]:
    return [
        leaf.detach().clone().requires_grad_(leaf.is_floating_point())
        for leaf in _torch.pytree.tree_leaves(case[2:])
        if isinstance(leaf, torch.Tensor)
    ]


def flat(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _torch.pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def gradients(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradients of the sum of squares of the outputs, taken in float32."""
    total = sum(output.float().square().sum() for output in outputs if output.requires_grad)
    leaves = [leaf for leaf in inputs if leaf.requires_grad]
    return list(torch.autograd.grad(total, leaves, allow_unused=True))  # type: ignore[arg-type]


@pytest.mark.sweep(
    but=(
        "_addmm_activation-bfloat16",
        "eq-bfloat16-mixed",
        "ge-bfloat16-mixed",
        "ge-float16-mixed",
        "gt-bfloat16-mixed",
        "gt-float16-mixed",
        "le-bfloat16-mixed",
        "le-float16-mixed",
        "lt-bfloat16-mixed",
        "ne-bfloat16-mixed",
        "ne-float16-mixed",
        "stack-bfloat16-mixed",
        "__eq__-bfloat16-method",
        "__ge__-bfloat16-method",
        "__gt__-bfloat16-method",
        "__gt__-float16-method",
        "__le__-bfloat16-method",
        "__le__-float16-method",
        "__lt__-bfloat16-method",
        "__lt__-float16-method",
        "__ne__-bfloat16-method",
        "__ne__-float16-method",
        "__div__-bfloat16-method",
        "__mul__-bfloat16-method",
    )
)
@pytest.mark.parametrize("case", list(cases()))
def test_an_op_and_its_gradients_equal_those_under_autocast(case: Case) -> None:
    dtype, function, args, kwargs = case
    module, given, inputs = Call(function, args, kwargs), tensors_of(case), tensors_of(case)
    with torch.autocast("cpu", dtype=LOW[dtype]):
        expected = flat(module(*given))
    if function.__name__ in FORWARD_ONLY or not any(output.requires_grad for output in expected):
        assert_same_outputs(forward(module, dtype, tensors_of(case)), expected)
        return
    outputs = flat(graphopt.optimize(module, [MixedPrecision(dtype, scale_loss=False)])(*inputs))
    expected = assert_same_outputs(outputs, expected)
    pairs = zip(gradients(outputs, inputs), gradients(expected, given), strict=True)
    assert all(identical(mine, theirs) for mine, theirs in pairs)


def assert_same_outputs(outputs: list[torch.Tensor], expected: list[torch.Tensor]) -> list[torch.Tensor]:
    """The program keeps the dtypes of its outputs: autocast's results are compared, and returned, in those dtypes."""
    kept = [theirs.to(mine.dtype) for mine, theirs in zip(outputs, expected, strict=True)]
    assert all(identical(mine, theirs) for mine, theirs in zip(outputs, kept, strict=True))
    return kept


def forward(module: nn.Module, dtype: str, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """What the rewritten forward program returns."""
    program = graphopt.capture(module, tuple(inputs), stage="forward")
    graphopt.Pipeline([MixedPrecision(dtype, scale_loss=False)]).run(program)
    with torch.no_grad():
        return list(program.to_graph_module().forward(list(inputs)))


# --- the rules as a table --------------------------------------------------------------------------------------------


def names(table: dict[str, tuple[str, ...]], kind: str) -> set[str]:
    return {name.partition(".")[0] for name in table[kind]}


def test_the_table_for_cpus_holds_torchs_own_test_lists() -> None:
    lists, table = AutocastCPUTestLists(torch.device("cpu")), autocast_lists("cpu")
    for group, kind in (("torch_16", "low precision"), ("nn_16", "low precision"), ("torch_fp32", "float32"),
                        ("nn_fp32", "float32"), ("torch_need_autocast_promote", "widest")):  # fmt: skip
        assert {name for name, *_ in getattr(lists, group)} <= names(table, kind)


def test_the_table_for_cuda_needs_no_gpu() -> None:
    """The lists of ``torch.amp``'s documentation, from ops that are cast down, computed in float32, and promoted."""
    table = autocast_lists("cuda", torch.float16)
    assert {"linear", "matmul", "conv2d", "einsum", "prelu", "scaled_dot_product_attention", "lstm_cell"} <= names(
        table, "low precision"
    )
    assert {"softmax", "log_softmax", "layer_norm", "exp", "pow", "sum", "cumsum", "norm", "mse_loss"} <= names(
        table, "float32"
    )
    assert names(table, "widest") == {
        "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put", "scatter_add",
        "tensordot", "vdot",
    }  # fmt: skip
    assert not any("binary_cross_entropy" in table[kind] for kind in table)


def test_an_op_is_in_one_list_only_and_asking_leaves_autocast_as_it_was() -> None:
    with torch.autocast("cpu", dtype=torch.float16):
        for device in ("cpu", "cuda"):
            listed = [name for found in autocast_lists(device).values() for name in found]
            assert len(listed) == len(set(listed)) > 100
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.float16
        assert torch.is_autocast_cache_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cuda")


# --- rules asked call by call ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(LOW))
def test_cuda_is_asked_with_example_values_and_needs_no_gpu(dtype: str) -> None:
    low, full, aten, mode = LOW[dtype], torch.float32, torch.ops.aten, _torch.FakeTensorMode()
    with mode:
        half = torch.empty(4, 4, dtype=low, device="cuda")
        row = torch.empty(4, device="cuda")
        wide, classes = torch.empty(4, 4, device="cuda"), torch.zeros(4, dtype=torch.int64, device="cuda")
    rules = Autocast(low, mode)
    assert rules.treatment(aten.linear.default, (wide, half), {}).casts == (low, None)
    assert rules.treatment(aten.layer_norm.default, (half, [4], row), {}).casts == (full, None)
    assert rules.treatment(aten.addcmul.default, (half, wide, half), {}).casts == (full, None, full)
    assert rules.treatment(aten.softmax.int, (half, -1), {}).kwargs == {"dtype": full}
    assert rules.treatment(aten.softmax.int, (half, -1, low), {}) == Treatment()
    assert rules.treatment(aten.softmax.int, (wide, -1), {}) == Treatment()
    assert rules.treatment(aten.norm.Scalar, (half,), {}).op is aten.norm.ScalarOpt_dtype
    assert rules.treatment(aten.norm.ScalarOpt_dim, (half, 2, [0]), {}).args == (False,)
    assert rules.treatment(aten.cross_entropy_loss.default, (half, classes), {}).inside
    assert rules.treatment(aten.relu.default, (half,), {}) == Treatment()
    assert rules.treatment(aten.linear.default, (wide.double(), wide.double()), {}) == Treatment()
    with pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
        rules.treatment(aten.binary_cross_entropy.default, (half, half), {})


def test_casts_are_in_the_order_in_which_autocast_makes_them() -> None:
    """Gradients of a tensor that is an argument twice are summed in the opposite order."""
    mode = _torch.FakeTensorMode()
    with mode:
        x, w, b = torch.empty(4, 4), torch.empty(4, 4), torch.empty(4)
    treatment = Autocast(torch.bfloat16, mode).treatment(torch.ops.aten.linear.default, (x, w, b), {})
    assert sorted(treatment.order) == [0, 1, 2]
    assert treatment.casts == (torch.bfloat16,) * 3
