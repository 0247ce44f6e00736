"""Captures whose sizes vary survive the process: they serve the same sizes as before, others are captured as usual."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import graphopt
from graphopt import GraphoptError
from graphopt.ir.files.checked_json import Field
from graphopt.ir.files.size_expressions import read_condition
from graphopt.passes import FitMemory
from graphopt.runtime.stored.checked_file import read_checked, write_checked
from graphopt.runtime.stored.program_folder import entries
from graphopt.runtime.stored.stored_sizes import read_sizes
from tests.runtime.stored.test_hostile_entries import change_everywhere
from tests.support.changing_lengths import (
    LONGEST,
    Lengths,
    Trained,
    Way,
    assert_trains_alike,
    next_word,
    sentences,
    trained,
)
from tests.support.running import adamw, network, rows
from tests.support.storing import count, is_loaded, step_run, use_programs
from tests.support.training import OPTIMIZERS, assert_same, mean_square

LENGTHS = [40, 12, 128]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_programs(tmp_path, monkeypatch)


def read(found: Trained) -> list[bool]:
    """Of each capture and plan, whether it was read."""
    assert found.serving is not None
    return [capture.rewritten.loaded for capture in found.serving.everything()]


def assert_equal(one: Trained, two: Trained) -> None:
    assert all(torch.equal(mine, other) for mine, other in zip(one.tensors, two.tensors, strict=True))


def plain_peak(model: Lengths, length: int) -> int:
    (batch,) = sentences([length])
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    return graphopt.capture(model, batch, loss=next_word, optimizer=optimizer).memory().peak_bytes


def fit(budget: int | str) -> FitMemory:
    return FitMemory(budget, cost="roofline")


# --- what is read serves the sizes that it served --------------------------------------------------------------------


@pytest.mark.sweep(but=("recompute{checkpoints=blocks.*}-drop-in",))
@pytest.mark.parametrize("way", ["drop-in", "step"])
@pytest.mark.parametrize("passes", ["", "recompute{checkpoints=blocks.*}", "mixed-precision{dtype=bfloat16}"])
def test_it_trains_as_before_in_any_order(folder: Path, way: Way, passes: str) -> None:
    model = Lengths(layers=1)
    batches = sentences(LENGTHS[:3])

    def run(order: list[Any]) -> Trained:
        if "mixed" in passes:  # which computes in another precision than eager mode
            return trained(way, model, next_word, order, passes)
        return assert_trains_alike(way, model, next_word, order, passes=passes)

    first = run(batches)
    kept = count(folder)
    again = run(batches)
    other = run([*reversed(batches), *sentences([50])])
    assert [read(first), kept] == [[False, False], 2]
    assert_equal(again, first)
    assert [all(read(again)), all(read(other)), count(folder)] == [True, True, kept]


@pytest.mark.sweep
@pytest.mark.parametrize("way", ["drop-in", "step"])
def test_all_plans_are_read_and_the_budget_holds(folder: Path, way: Way) -> None:
    model = Lengths(layers=1)
    budget = int(0.75 * plain_peak(model, LONGEST))
    batches = sentences(LENGTHS)
    first = assert_trains_alike(way, model, next_word, batches, passes=[fit(budget)])
    kept = count(folder)
    second = assert_trains_alike(way, model, next_word, batches, passes=[fit(budget)])
    assert kept == len(read(first)) > 2
    assert [all(read(second)), count(folder), len(read(second))] == [True, kept, kept]
    for program in second.programs:
        assert program.memory().peak_bytes <= budget
        assert program.memory().peak_bytes in {other.memory().peak_bytes for other in first.programs}


def test_a_plan_for_other_sizes_is_read_too(folder: Path) -> None:
    batches = [(rows(3),), (rows(2),), (rows(4),)]
    first, made = step_run(network(), adamw, batches, [fit("5.7kB")])
    second, loaded = step_run(network(), adamw, batches, [fit("5.7kB")])
    assert_same(first, second, "loaded")
    peaks = [[program.memory().peak_bytes for program in _programs(step)] for step in (made, loaded)]
    assert peaks[0] == peaks[1]
    assert all(capture.rewritten.loaded for capture in loaded._runner.serving.everything())


@pytest.mark.sweep
def test_a_length_without_a_plan_is_planned_from_a_capture_of_its_own(folder: Path) -> None:
    model = Lengths(layers=1)
    budget = int(0.75 * plain_peak(model, LONGEST))
    assert_trains_alike("step", model, next_word, sentences([40, 12]), passes=[fit(budget)])
    kept = count(folder)
    found = assert_trains_alike("step", model, next_word, sentences([13, 128, 15]), passes=[fit(budget)])
    assert read(found).count(False) == count(folder) - kept >= 1
    assert all(program.memory().peak_bytes <= budget for program in found.programs)
    assert found.captures == 1
    again = assert_trains_alike("step", model, next_word, sentences([13, 128, 15]), passes=[fit(budget)])
    assert all(read(again))


@pytest.mark.sweep
def test_a_share_means_the_peak_at_the_largest_sizes(folder: Path) -> None:
    model = Lengths(layers=1)
    budget = int(0.75 * plain_peak(model, LONGEST))
    for _ in range(2):
        found = assert_trains_alike("step", model, next_word, sentences([90, 60, 128, 8]), passes=[fit("75%")])
        assert all(program.memory().peak_bytes <= budget for program in found.programs)
    assert all(read(found))


@pytest.mark.sweep
def test_accumulated_batches_have_their_programs_there_too(folder: Path) -> None:
    model = Lengths()
    for _ in range(2):
        found = assert_trains_alike("step", model, next_word, sentences([9, 12]), every=2)
    assert all(read(found))
    assert all(any(file.name.startswith("variant-") for file in entry.folder.iterdir()) for entry in entries(folder))


class Parity(nn.Module):
    """Takes one path for an even number of rows and another for an odd one, up to 20 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 20:
            return self.a(self.b(x)).sin()
        return self.a(x).tanh() if x.shape[0] % 2 else self.b(x)


def test_each_path_is_another_capture(folder: Path) -> None:
    model = Parity()
    batches = [(rows(n),) for n in (4, 6, 8, 5, 7, 9, 30, 32)]
    first, step = step_run(model, adamw, batches)
    second, loaded = step_run(model, adamw, batches)
    assert_same(first, second, "loaded")
    made, used = (each._runner.serving.everything() for each in (step, loaded))
    assert [capture.rewritten.loaded for capture in used] == [True] * len(made)
    plain, _ = _without_cache(model, [(rows(7),), (rows(11),), (rows(40),), (rows(12),)])
    others, _ = step_run(model, adamw, [(rows(7),), (rows(11),), (rows(40),), (rows(12),)])
    assert_same(plain, others, "in another order")


def test_sizes_that_no_capture_serves_are_captured(folder: Path) -> None:
    model = Parity()
    step_run(model, adamw, [(rows(4),), (rows(6),)])
    batches = [(rows(8),), (rows(5),), (rows(7),)]
    plain, _ = _without_cache(model, batches)
    found, step = step_run(model, adamw, batches)
    assert_same(plain, found, "other sizes")
    assert [capture.rewritten.loaded for capture in step._runner.serving.everything()] == [True, False, False]


def _without_cache(model: nn.Module, batches: list[Any]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAPHOPT_CACHE_PROGRAMS", "0")
        return step_run(model, adamw, batches)


# --- sizes that a user declares --------------------------------------------------------------------------------------


def declared(most: int = 64) -> dict[str, Any]:
    return {"dynamic_shapes": ({0: torch.export.Dim("rows", min=2, max=most)},)}


def test_declared_sizes_are_part_of_the_key_and_still_bounds(folder: Path) -> None:
    batches = [(rows(4),), (rows(7),), (rows(3),)]
    first, made = step_run(network(), adamw, batches, **declared())
    second, loaded = step_run(network(), adamw, batches, **declared())
    assert_same(first, second, "loaded")
    assert [is_loaded(made), is_loaded(loaded), count(folder)] == [False, True, 1]
    with pytest.raises(GraphoptError, match=r"is 65, and dynamic_shapes allows 2 to 64"):
        loaded(rows(65))
    _, other = step_run(network(), adamw, batches, **declared(65))
    assert [is_loaded(other), count(folder)] == [False, 2]
    _, automatic = step_run(network(), adamw, batches[:1])
    assert [is_loaded(automatic), count(folder)] == [False, 3]


@pytest.mark.sweep
def test_fixed_sizes_never_take_a_capture_whose_sizes_vary(folder: Path) -> None:
    step_run(network(), adamw, [(rows(4),), (rows(7),)])
    _, step = step_run(network(), adamw, [(rows(9),)], dynamic_shapes=None)
    assert not is_loaded(step)


# --- files that are shipped ------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_a_saved_step_serves_the_same_sizes(tmp_path: Path) -> None:
    model = Lengths(layers=1)
    budget = int(0.75 * plain_peak(model, LONGEST))
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    step = graphopt.optimize_step(model, optimizer, str(fit(budget)), loss=next_word)
    for batch in sentences(LENGTHS):
        step(*batch)
    step.save(tmp_path / "step")

    other = Lengths(layers=1)
    loaded = graphopt.load_step(tmp_path / "step", other, OPTIMIZERS["momentum"](other.parameters()), loss=next_word)
    for batch in sentences(LENGTHS):
        loaded(*batch)
    assert all(capture.rewritten.loaded for capture in loaded._runner.serving.everything())
    assert all(program.memory().peak_bytes <= budget for program in _programs(loaded))


def _programs(step: graphopt.TrainStep) -> list[graphopt.Program]:
    return [capture.rewritten.program for capture in step._runner.serving.everything()]


def test_a_saved_step_trains_alike_and_names_sizes_that_it_does_not_serve(tmp_path: Path) -> None:
    batches = [(rows(4),), (rows(7),), (rows(3),)]
    first, step = step_run(network(), adamw, batches)
    step.save(tmp_path / "step")
    model = network()
    loaded = graphopt.load_step(tmp_path / "step", model, adamw(model.parameters()), loss=mean_square)
    torch.manual_seed(1)
    losses = [loaded(*batch) for batch in batches]
    assert all(torch.equal(loss, first.tensors[f"{number}.loss"]) for number, loss in enumerate(losses))
    assert all(capture.rewritten.loaded for capture in loaded._runner.serving.everything())
    model = network()
    fresh = graphopt.load_step(tmp_path / "step", model, adamw(model.parameters()), loss=mean_square)
    with pytest.raises(GraphoptError, match="saved for something else than this Net: call"):
        fresh(rows(1))


# --- files of strangers ----------------------------------------------------------------------------------------------

SIZES = [(rows(4),), (rows(7),), (rows(3),)]
BAD_SIZES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a condition that is code": lambda sizes: sizes.update(conditions=["__import__('os').system('false')"]),
    "a condition that is no text": lambda sizes: sizes.update(conditions=[1]),
    "a condition on another symbol": lambda sizes: sizes.update(conditions=["other < 3"]),
    "a symbol that is no name": lambda sizes: sizes.update(symbols={"a b": [4, 2, None]}),
    "a range without an end": lambda sizes: sizes.update(symbols={name: [4, 2] for name in sizes["symbols"]}),
    "a value outside of its range": lambda sizes: sizes.update(symbols={name: [4, 9, 12] for name in sizes["symbols"]}),
    "no inputs": lambda sizes: sizes.update(inputs=None),
    "an input that is no tensor": lambda sizes: sizes.update(inputs=[["x", {}]]),
    "planned for another symbol": lambda sizes: sizes.update({"planned for": {"other": 3}}),
    "another entry": lambda sizes: sizes.update(more=1),
}


def _varying(folder: Path) -> Path:
    """The folder of the capture whose sizes vary."""
    (found,) = [entry.folder for entry in entries(folder) if "-" in entry.key]
    return found


@pytest.mark.sweep(but=("a condition that is code", "no inputs"))
@pytest.mark.parametrize("change", BAD_SIZES.values(), ids=BAD_SIZES)
def test_sizes_that_a_stranger_wrote_are_not_taken(
    folder: Path, change: Callable[[dict[str, Any]], object], caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = step_run(network(), adamw, SIZES)
    header = _varying(folder) / "capture"
    data = read_checked(header).value
    change(data["sizes"])
    write_checked(header, data)
    with pytest.raises(GraphoptError, match=r"\$\.sizes"):
        read_sizes(read_checked(header)["sizes"])
    found, step = step_run(network(), adamw, SIZES)
    assert_same(expected, found, "hostile")
    assert [capture.rewritten.loaded for capture in step._runner.serving.everything()] == [True, False, False]
    assert "cannot be used" in caplog.text


@pytest.mark.sweep(but=("unlimited",))
@pytest.mark.parametrize("name", ["stage-joint", "stage-step", "unlimited"])
def test_a_program_that_cannot_be_read_is_captured_anew(
    folder: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    passes = str(fit("5.7kB"))
    expected, _ = step_run(network(), adamw, [(rows(3),), (rows(4),)], passes)
    (_varying(folder) / name).write_bytes(b"nothing")
    found, step = step_run(network(), adamw, [(rows(3),), (rows(4),)], passes)
    assert_same(expected, found, "cut short")
    assert not step._runner.serving.everything()[-1].rewritten.loaded
    assert "cannot be used" in caplog.text


@pytest.mark.sweep
def test_entries_whose_sizes_vary_and_whose_data_is_changed(folder: Path) -> None:
    expected, _ = step_run(network(), adamw, SIZES)
    stored = expected, sorted(_varying(folder).iterdir())
    for number in range(300):
        change_everywhere(stored, number, lambda: step_run(network(), adamw, SIZES)[0])


# --- what is not kept ------------------------------------------------------------------------------------------------


class Fixes(nn.Module):
    """Needs the number of rows as a number of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x.view(int(x.shape[0]), 8))


def test_captures_whose_sizes_tracing_has_fixed_are_kept_one_by_one(folder: Path) -> None:
    batches = [(rows(4),), (rows(7),), (rows(9),)]
    model = Fixes()
    first, _ = step_run(model, adamw, batches)
    assert [count(folder), [entry.key for entry in entries(folder) if "-" in entry.key]] == [3, []]
    second, step = step_run(model, adamw, batches)
    assert_same(first, second, "loaded")
    assert [capture.rewritten.loaded for capture in step._runner.serving.everything()] == [True, True, True]


# --- conditions ------------------------------------------------------------------------------------------------------

VALUES = st.dictionaries(st.sampled_from(["s0", "s1"]), st.integers(1, 40), min_size=2)


@given(VALUES, st.integers(0, 2**32))
def test_conditions_mean_what_sympy_prints(values: dict[str, int], seed: int) -> None:
    draw = random.Random(seed)
    symbols = {name: sympy.Symbol(name, integer=True, positive=True) for name in values}

    def size(depth: int) -> Any:
        if depth == 0 or draw.random() < 0.2:
            return draw.choice([*symbols.values(), sympy.Integer(draw.randint(1, 9))])
        left, right = size(depth - 1), size(depth - 1)
        return draw.choice(
            [
                lambda: left + right,
                lambda: left - right,
                lambda: left * right,
                lambda: left**2,
                lambda: sympy.Max(left, right),
                lambda: sympy.Min(left, right),
                lambda: left / draw.randint(2, 5),
            ]
        )()

    def condition(depth: int) -> Any:
        if depth == 0 or draw.random() < 0.4:
            kind = draw.choice([sympy.Eq, sympy.Ne, sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge])
            return kind(size(2), size(2))
        parts = condition(depth - 1), condition(depth - 1)
        return draw.choice([lambda: sympy.And(*parts), lambda: sympy.Or(*parts), lambda: sympy.Not(parts[0])])()

    wanted = condition(2)
    found = read_condition(Field(str(wanted)), symbols.keys())
    assert found.holds(values) == bool(wanted.subs({symbols[name]: value for name, value in values.items()}))
    assert not found.holds({}) or not wanted.free_symbols
