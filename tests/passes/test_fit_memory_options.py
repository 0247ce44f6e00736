"""FitMemory: nothing to do, what cannot be done, and the options."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt import ArgumentError, GraphoptError, Pipeline
from graphopt.analysis.costs import measurements
from graphopt.errors import PassError, PipelineError
from graphopt.passes import FitMemory
from graphopt.rewriting.memory import free_memory as freememory
from graphopt.rewriting.memory.fit import fitting as fitting_module
from graphopt.rewriting.memory.fit.budget import BudgetError, budget_bytes, least_bytes, what_would_help
from tests.support.budgets import ROWS, fit, smallest_of
from tests.support.errors import attempt, told
from tests.support.fitting import applied, frontiers_searched_once, structure, wide
from tests.support.training import Net, captured, mean_square, peaks


@pytest.fixture(autouse=True, scope="module")
def _searched_once() -> Iterator[None]:
    with frontiers_searched_once():
        yield


# --- nothing to do, and what cannot be done --------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("more", [0, 1, 10**9])
def test_a_budget_above_the_peak_leaves_the_program_as_it_is(more: int) -> None:
    plain = captured(wide(), ROWS)
    program, record = applied(plain, fit(plain.memory().peak_bytes + more))
    assert not record.changed
    assert "is within the budget" in record.changed.reason
    assert structure(program) == structure(plain)


def test_a_budget_that_is_met_already_is_no_reason_to_warn(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="graphopt")
    model = graphopt.optimize(wide(), fit(10**9), example_inputs=(ROWS,))
    (record,) = model.records  # type: ignore[attr-defined]
    assert record.changed.satisfied
    told = [(entry.levelname, entry.getMessage()) for entry in caplog.records if "within the budget" in entry.message]
    assert [level for level, _ in told] == ["INFO"]
    assert not [entry for entry in caplog.records if entry.levelno >= logging.WARNING]


def test_the_smallest_budget_of_the_error_is_met_and_a_byte_less_is_not() -> None:
    plain = captured(wide(), ROWS)
    smallest = smallest_of(plain)
    program, record = applied(plain, fit(smallest))
    assert program.memory().peak_bytes == record.peak_after == smallest
    error = attempt(lambda: applied(plain, fit(smallest - 1)))
    assert isinstance(error, PassError)
    assert isinstance(error.__cause__, BudgetError)
    assert error.__cause__.smallest_bytes == smallest
    assert f"({smallest - 1} bytes): " in str(error)


@pytest.mark.sweep
def test_the_error_names_the_largest_tensors() -> None:
    plain = captured(wide(), ROWS)
    smallest, _ = applied(plain, fit(smallest_of(plain)))
    error = told(attempt(lambda: applied(plain, fit(least_bytes(plain.memory())))))
    largest = smallest.memory().alive[:3]
    assert [item.name for item in largest if item.name not in error] == []
    assert "parameters, optimizer state and inputs" in error
    assert "what to do:" in error
    with pytest.raises(GraphoptError, match="no plan fits"):
        graphopt.optimize(wide(), [fit("1kB")])(ROWS)


def test_a_program_whose_peak_is_not_in_what_forward_keeps() -> None:
    """Nothing can be dropped: parameters alone are above the budget."""
    plain = captured(Net(nn.Linear(64, 64)), torch.randn(2, 64))
    error = attempt(lambda: applied(plain, fit("50%")))
    assert "no plan fits" in str(error)


@pytest.mark.sweep
def test_applied_twice_it_does_nothing() -> None:
    program, first = applied(captured(wide(), ROWS), fit("70%"))
    again, second = applied(program, fit("60%"))
    assert first.changed
    assert not second.changed
    assert "fitted already" in second.changed.reason
    assert structure(again) == structure(program)


# --- options ---------------------------------------------------------------------------------------------------------


def test_budgets_can_be_written_in_several_ways() -> None:
    plain = captured(wide(), ROWS)
    peak = plain.memory().peak_bytes
    share = int(peak * 70 / 100)
    programs = [structure(applied(plain, fit(budget))[0]) for budget in (share, str(share), "70%", f"{share / 1e3}kB")]
    assert all(program == programs[0] for program in programs)
    assert not applied(plain, fit("8GB"))[1].changed
    assert not applied(plain, fit("512MiB"))[1].changed


@pytest.mark.sweep
def test_auto_is_what_is_there_and_most_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = captured(wide(), ROWS)
    memory = plain.memory()
    free = int(0.7 * memory.allocated_peak_bytes)
    monkeypatch.setattr(freememory, "free_host_bytes", lambda: free)
    program, record = applied(plain, fit("auto"))
    assert record.changed
    assert program.memory().peak_bytes <= memory.resident_bytes + 0.95 * free
    monkeypatch.setattr(freememory, "free_host_bytes", lambda: 10**12)
    assert not applied(plain, fit("auto"))[1].changed
    monkeypatch.setattr(freememory, "free_host_bytes", lambda: 4 * free)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert applied(plain, fit("auto"))[0].memory().peak_bytes == program.memory().peak_bytes
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "four")
    assert "LOCAL_WORLD_SIZE is 'four'" in str(attempt(lambda: applied(plain, fit("auto"))))
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.setattr(freememory, "free_host_bytes", lambda: None)
    assert "give the budget in bytes" in str(attempt(lambda: applied(plain, fit("auto"))))


@pytest.mark.parametrize("budget", ["", "8 apples", "60 %%", "-5%", "automatic", "GB"])
def test_a_budget_that_means_nothing(budget: str) -> None:
    with pytest.raises(GraphoptError, match="write 8GB, 512MiB or 1000000, 60%"):
        FitMemory(budget)


@pytest.mark.parametrize("budget", [None, True, (1,)])
def test_a_budget_of_another_type(budget: Any) -> None:
    with pytest.raises(TypeError, match="budget is a number of bytes"):
        FitMemory(budget)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (0, "write a number such as 8_000_000_000"),
        (-5, "write a number such as 8_000_000_000"),
        (8, "did you mean '8GB'"),
        ("8", "did you mean '8GB'"),
        (0.6, "did you mean '60%' of the peak"),
        ("0.6", "did you mean '60%' of the peak"),
        ("0%", "write 60%"),
        ("8G", "did you mean 8GB"),
        (float("nan"), "no number of bytes"),
        (float("inf"), "no number of bytes"),
        (1000.5, "whole numbers"),
    ],
)
def test_a_number_that_is_no_budget(budget: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        FitMemory(budget)


@pytest.mark.sweep(cases=("8e9-8GB", "8 GB-8GB"))
@pytest.mark.parametrize(("budget", "same"), [(8e9, 8 * 10**9), ("8e9", "8GB"), ("8 GB", "8GB"), ("60 %", "60%")])
def test_other_spellings_of_a_budget(budget: Any, same: Any) -> None:
    memory = captured(Net(nn.Linear(4, 4)), torch.randn(2, 4)).memory()
    assert budget_bytes(FitMemory(budget).budget, memory) == budget_bytes(same, memory)


def test_below_what_every_plan_takes_nothing_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting_module, "find_frontier", None)
    plain = captured(wide(), ROWS)
    least = least_bytes(plain.memory())
    assert least <= plain.memory().peak_bytes
    error = attempt(lambda: applied(plain, fit(least - 1)))
    assert isinstance(error.__cause__, BudgetError)
    assert not error.__cause__.searched
    assert error.__cause__.smallest_bytes == least
    assert "what to do: a larger budget" in told(error)


@pytest.mark.parametrize("searched", [False, True])
def test_a_share_that_cannot_be_met_is_answered_in_shares_first(searched: bool) -> None:
    plain = captured(wide(), ROWS)
    share = 100 * smallest_of(plain) // plain.memory().peak_bytes - 1 if searched else 1
    error = attempt(lambda: applied(plain, fit(f"{share}%")))
    cause = error.__cause__
    assert isinstance(cause, BudgetError)
    begin = (
        rf"(\d+)% is the least( that any plan can take)?, and {share}% is asked for: no plan fits into [\d.]+ .?B \("
    )
    found = re.match(begin, str(cause))
    assert found
    assert (cause.searched, bool(found[2])) == (searched, not searched)
    assert len(told(error).splitlines()) <= 4
    least = int(found[1])
    assert isinstance(attempt(lambda: applied(plain, fit(f"{least - 1}%"))).__cause__, BudgetError)
    if cause.searched:
        assert applied(plain, fit(f"{least}%"))[1].peak_after >= cause.smallest_bytes


def test_the_advice_names_passes_with_their_bytes() -> None:
    model = wide()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    program = graphopt.capture(model, (ROWS,), loss=mean_square, optimizer=optimizer)
    advice = "\n".join(what_would_help(program, program.memory(), moves=False))
    for words in (r"MixedPrecision\(\) .* up to [\d.]+ [kM]?B less", r"host_budget=.* [\d.]+ [kM]?B are alive"):
        assert re.search(words, advice)
    assert re.search(r"ShardOptimizer\(\) .* [\d.]+ [kM]?B of optimizer state", advice)
    layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    joint = graphopt.capture(layers, (torch.randn(2, 64),), loss=mean_square)
    advice = "\n".join(what_would_help(joint, joint.memory(), moves=True))
    assert re.search(r"optimize_step with FuseUpdate\(\) .* up to [\d.]+ kB less", advice)
    joint = graphopt.capture(model, (ROWS,), loss=mean_square)  # no two gradients are alive at its peak
    assert "FuseUpdate" not in "\n".join(what_would_help(joint, joint.memory(), moves=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allow": ()}, "allow=nothing"),
        ({"allow": ("recompte",)}, "recompute"),
        ({"cost": "roofine"}, "roofline"),
        ({"cost": ""}, "cost model"),
        ({"effort": "through"}, "effort='through' is not possible; .*thorough"),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphoptError, match=message):
        FitMemory("60%", **options)


@pytest.mark.parametrize(
    "text",
    [
        "fit-memory{budget=60%}",
        "fit-memory{budget=8GB}",
        "fit-memory{budget=auto}",
        "fit-memory{budget=100000}",
        "fit-memory{budget=60% cost=roofline}",
        "fit-memory{budget=60% allow=recompute}",
        "fit-memory{budget=60% time-limit=2.5}",
        "fit-memory{budget=60% effort=thorough}",
        "fit-memory{budget=60% host-budget=1GB}",
    ],
)
def test_the_text_form_goes_both_ways(text: str) -> None:
    pipeline = Pipeline(text)
    assert str(pipeline) == text
    assert Pipeline(str(pipeline)).passes == pipeline.passes


@pytest.mark.sweep
def test_the_text_form_runs() -> None:
    model = graphopt.optimize(wide(), "fit-memory{budget=70% cost=roofline}")
    model(ROWS).sum().backward()
    assert model.records[0].changed
    with pytest.raises(PipelineError, match="budget"):
        Pipeline("fit-memory")


def test_by_the_roofline_no_op_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> float:
        raise AssertionError("a call was measured")

    monkeypatch.setattr(measurements, "measured_seconds", fail)
    for name in ("roofline", "a100-80gb"):
        assert applied(captured(wide(), ROWS), fit("70%", cost=name))[1].changed


def test_by_measured_seconds() -> None:
    model, x = wide(), ROWS
    program, record = applied(captured(model, x), FitMemory("70%"))
    assert record.changed
    said = "\n".join(record.changed.lines)
    known = "more, estimated from measured ops" in said
    assert known or "measured while the machine had other work" in said or "there was time for" in said, said
    predicted, measured = peaks(program, model, x)
    assert predicted == measured


def test_a_time_limit_ends_the_search_with_what_was_found() -> None:
    plain = captured(wide(), ROWS)
    program, record = applied(plain, fit("90%", time_limit=0.0))
    assert record.changed
    assert program.memory().peak_bytes <= 0.9 * plain.memory().peak_bytes


@pytest.mark.sweep
def test_without_recomputing_and_without_a_host_nothing_fits() -> None:
    plain = captured(wide(), ROWS)
    assert "no plan fits" in str(attempt(lambda: applied(plain, fit("70%", allow=("offload",)))))


def test_a_thorough_search_knows_the_smallest_peak_and_so_does_the_page() -> None:
    """The default looks for one budget; whoever draws the trade between bytes and seconds gets all of it."""
    plain = captured(wide(), ROWS)
    records = {effort: applied(plain, fit("80%", effort=effort))[1] for effort in ("default", "thorough")}
    known = {effort: "the smallest peak found is" in record.changed.lines[0] for effort, record in records.items()}
    assert known == {"default": False, "thorough": True}
    lowest = {effort: min(record.changed.details["frontier"]()["peaks"]) for effort, record in records.items()}
    assert lowest["default"] == lowest["thorough"] < 0.8 * plain.memory().peak_bytes


def test_the_record_says_how_far_the_best_plan_can_be() -> None:
    program = captured(wide(), ROWS)
    memory = program.memory()
    (record,) = graphopt.Pipeline([fit(memory.resident_bytes + memory.allocated_peak_bytes * 8 // 10)]).run(program)
    (line,) = (line for line in record.changed.lines if "above the best possible" in line)
    found = re.search(r"at most (\d+\.\d)% above the best possible", line)
    assert found is not None
    assert 0 <= float(found[1]) < 10
