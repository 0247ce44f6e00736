"""Symbols of sizes that are made from their names and ranges: what torch does with them, and what is read of them."""

from __future__ import annotations

import pytest
import torch

from graphopt import _torch

NAMES = {"s0": _torch.SymbolRange(17), "s1": _torch.SymbolRange(4, 3, 8)}


def size(mode: _torch.FakeTensorMode, name: str) -> torch.SymInt:
    found: torch.SymInt = _torch.symbolic_size(mode, name, NAMES[name].hint)
    return found


def test_what_is_made_is_read_again() -> None:
    mode = _torch.fake_mode(NAMES)
    assert _torch.open_symbols(mode) == NAMES
    assert [_torch.size_range(size(mode, name)) for name in NAMES] == [(2, None), (3, 8)]
    assert _torch.guard_texts(mode) == []


def test_conditions_that_code_meets_are_noted_and_narrow_the_range() -> None:
    mode = _torch.fake_mode(NAMES)
    assert size(mode, "s0") > 9
    assert size(mode, "s0") % 2 == 1
    assert size(mode, "s1") < 9  # as its range says already
    assert _torch.guard_texts(mode) == ["s0 > 9", "Eq(Mod(s0, 2), 1)"]
    assert _torch.open_symbols(mode)["s0"].low == 10
    assert [_torch.broken_guard(mode, {"s0": value, "s1": 4}) for value in (11, 12, 7)] == [
        "",
        "Eq(Mod(s0, 2), 1)",
        "s0 > 9",
    ]


def test_ops_whose_kernels_are_for_fixed_sizes_keep_sizes_open_as_in_a_trace() -> None:
    mode = _torch.fake_mode(NAMES)
    x = _torch.example_tensor(mode, [4, size(mode, "s0")], [size(mode, "s0"), 1], torch.int64, torch.device("cpu"))
    with _torch.as_traced([x]):
        padded = torch.ops.aten.constant_pad_nd.default(x, [0, 1], -100)
    assert str(padded.shape[1]) == "s0 + 1"
    assert _torch.guard_texts(mode) == []


@pytest.mark.parametrize("name", ["s0", "s1"])
def test_a_size_that_is_taken_as_a_number_is_a_condition(name: str) -> None:
    mode = _torch.fake_mode(NAMES)
    hint = NAMES[name].hint
    assert int(size(mode, name)) == hint
    assert _torch.fixed_size_guard(mode, hint) == f"Eq({name}, {hint})"
