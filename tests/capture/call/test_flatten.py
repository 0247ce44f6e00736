"""Calls taken apart into tensors and everything else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphopt.capture.call.flatten import flatten, flatten_call

X, Y = torch.ones(2), torch.zeros(3)

CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    ((X,), {}),
    ((X, Y), {}),
    ((), {"x": X, "y": Y}),
    ((), {"y": Y, "x": X}),
    ((X,), {"y": Y}),
    ((X, 2), {}),
    ((X,), {"y": None}),
    (([X, Y],), {}),
]


@pytest.mark.parametrize("call", CALLS)
def test_a_call_is_taken_apart_as_any_nested_value(call: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    for _ in range(2):
        tensors, structure = flatten_call(*call)
        expected, general = flatten(call, paths=False)
        assert len(tensors) == len(expected)
        assert all(one is other for one, other in zip(tensors, expected, strict=True))
        assert structure.key == general.key
        assert structure.restore(tensors) == call


def test_other_calls_have_other_keys() -> None:
    keys = [flatten_call(*call)[1].key for call in CALLS]
    assert len(set(keys)) == len(keys)
