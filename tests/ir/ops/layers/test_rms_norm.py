"""Root-mean-square norm as one call, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from graphopt.ir.ops.layers.rms_norm import fused_rms_norm, fused_rms_norm_backward, rms_norm_as_one


@pytest.mark.parametrize("shape", [[8], [3, 8]])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("eps", [None, 1e-3])
def test_it_is_torchs_norm_with_its_gradients(shape: list[int], weighted: bool, eps: float | None) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, requires_grad=True)
    weight = torch.randn(shape, requires_grad=True) if weighted else None
    inputs = [x] if weight is None else [x, weight]
    wanted, found = F.rms_norm(x, shape, weight, eps), rms_norm_as_one(x, shape, weight, eps)
    torch.testing.assert_close(found, wanted)
    seed = torch.randn_like(wanted)
    for one, other in zip(
        torch.autograd.grad(found, inputs, seed), torch.autograd.grad(wanted, inputs, seed), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_sixteen_bits_keep_one_float32_number_for_each_row() -> None:
    x = torch.randn(2, 3, 8, dtype=torch.bfloat16)
    result, scale = fused_rms_norm(x, [8], None, 1e-5)
    assert (result.dtype, scale.dtype, scale.shape) == (torch.bfloat16, torch.float32, (2, 3, 1))
    grad_x, grad_weight = fused_rms_norm_backward(result, x, [8], scale, None)
    assert grad_x.dtype is torch.bfloat16
    assert grad_weight.numel() == 0


def test_values_without_data_are_as_those_with() -> None:
    x, weight = torch.randn(2, 8, 3).transpose(1, 2), torch.randn(8)
    torch.library.opcheck(fused_rms_norm, (x, [8], weight, None), test_utils=("test_schema", "test_faketensor"))
    scale = fused_rms_norm(x, [8], weight, None)[1]
    torch.library.opcheck(
        fused_rms_norm_backward, (x, x, [8], scale, weight), test_utils=("test_schema", "test_faketensor")
    )
