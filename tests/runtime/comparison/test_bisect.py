from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphopt import Pass, Pipeline
from graphopt.errors import PipelineError
from graphopt.passes import Recompute
from graphopt.passes.mixed_precision import MixedPrecision
from graphopt.runtime.comparison.bisect import deniable, denying, precision_pass, smallest_denied
from graphopt.runtime.comparison.trial import Outcome, Trial
from tests.support.low_precision import LowLinear, overflowing, trial, unfit
from tests.support.properties import examples
from tests.support.targets import Small
from tests.support.training import mean_square


def recorded(rule: Callable[[set[str]], bool]) -> tuple[Callable[[tuple[str, ...]], bool], list[tuple[str, ...]]]:
    asked: list[tuple[str, ...]] = []

    def within(denied: tuple[str, ...]) -> bool:
        asked.append(denied)
        return rule(set(denied))

    return within, asked


@given(st.integers(1, 60), st.data())
@examples(30)
def test_bisection_finds_the_culprits(count: int, data: st.DataObject) -> None:
    entries = [f"m{number}" for number in range(count)]
    bad = set(data.draw(st.lists(st.sampled_from(entries), max_size=4)))
    within, asked = recorded(lambda denied: bad <= denied)
    found = smallest_denied(entries, within)
    assert found is not None
    assert set(found.entries) == bad
    assert found.minimal
    assert found.trials == len(asked) == len(set(asked))
    assert found.trials <= 2 + max(1, len(bad)) * (2 * math.ceil(math.log2(count + 1)) + 2)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=24), st.floats(0, 8))
@examples(30)
def test_where_errors_add_up_the_set_is_minimal_all_the_same(errors: list[float], tolerance: float) -> None:
    parts = {f"m{number}": error for number, error in enumerate(errors)}

    def holds(denied: set[str]) -> bool:
        return math.fsum(error for name, error in parts.items() if name not in denied) <= tolerance

    within, _ = recorded(holds)
    found = smallest_denied(list(parts), within)
    assert found is not None
    assert holds(set(found.entries))
    assert not any(holds(set(found.entries) - {entry}) for entry in found.entries)
    assert list(found.entries) == [name for name in parts if name in found.entries]


def test_no_set_helps() -> None:
    within, asked = recorded(lambda denied: False)
    assert smallest_denied(["a", "b"], within) is None
    assert asked == [("a", "b")]


def test_an_interruption_gives_the_best_set_so_far() -> None:
    entries = [f"m{number}" for number in range(16)]
    remarks: list[tuple[float, str]] = []

    def within(denied: tuple[str, ...]) -> bool:
        if len(remarks) > 6:
            raise KeyboardInterrupt
        return {"m3", "m12"} <= set(denied)

    found = smallest_denied(entries, within, progress=lambda share, remark: remarks.append((share, remark)))
    assert found is not None
    assert found.interrupted
    assert not found.minimal
    assert {"m3", "m12"} < set(found.entries) < set(entries)
    shares = [share for share, _ in remarks]
    assert shares == sorted(shares)
    assert shares[-1] > 0
    assert "Ctrl-C takes the best set so far" in remarks[-1][1]


def test_an_interruption_before_anything_is_known_is_passed_on() -> None:
    def within(denied: tuple[str, ...]) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        smallest_denied(["a"], within)


def rewritten(target: dict[str, Any], *passes: Pass) -> tuple[Trial, Outcome]:
    found = trial(target)
    return found, found.rewrite(Pipeline(passes))


def test_entries_name_modules_and_calls_of_outer_modules() -> None:
    target = {"model": Small(depth=2), "example_inputs": (torch.ones(2, 8),), "loss": mean_square}
    found, outcome = rewritten(target, MixedPrecision())
    entries = deniable(found.original.forward, outcome.forward, "module")
    assert [entry for entry in entries if "::" not in entry] == [
        "blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "head",
    ]  # fmt: skip
    assert {"blocks.0::gelu", "blocks.1::gelu"} <= set(entries)
    assert deniable(found.original.forward, outcome.forward, "op")[:2] == ["linear", "gelu"]
    assert deniable(found.original.forward, found.original.forward, "op") == []


@pytest.mark.sweep
def test_every_entry_can_be_denied() -> None:
    target = {"model": Small(depth=1), "example_inputs": (torch.ones(2, 8),), "loss": mean_square}
    found, outcome = rewritten(target, MixedPrecision())
    pipeline = Pipeline([MixedPrecision()])
    for by in ("module", "op"):
        everything = denying(pipeline, deniable(found.original.forward, outcome.forward, by))  # type: ignore[arg-type]
        assert found.compare(found.rewrite(everything).program).bitwise


_ALSO = pytest.param(LowLinear(dtype="float16"), marks=pytest.mark.sweep)


@pytest.mark.sweep
@pytest.mark.parametrize("current", [_ALSO, MixedPrecision(dtype="float16")])
@pytest.mark.parametrize(
    ("target", "culprits"), [(unfit, ("layers.2",)), (overflowing, ("layers.2", "layers.3"))], ids=["weight", "value"]
)
def test_the_layer_that_overflows_is_found(
    current: Pass, target: Callable[[], dict[str, Any]], culprits: tuple[str, ...]
) -> None:
    found, outcome = rewritten(target(), current)
    pipeline = Pipeline([current])

    def within(denied: tuple[str, ...]) -> bool:
        return found.within(
            found.rewrite(denying(pipeline, denied)).program, 0.001, kinds=("loss", "gradient"), settle=True
        )

    denied = smallest_denied(deniable(found.original.forward, outcome.forward, "module"), within)
    assert denied is not None
    assert denied.entries == culprits
    assert denied.minimal


def test_what_the_user_denies_stays_denied() -> None:
    pipeline = denying(Pipeline([LowLinear(deny=("layers.0",)), Recompute("layers.*")]), ["layers.1", "layers.0"])
    assert str(pipeline) == "low-linear{deny=layers.0,layers.1},recompute{checkpoints=layers.*}"


def test_a_search_needs_a_pass_that_can_deny() -> None:
    with pytest.raises(PipelineError, match=r"such as mixed-precision, and these are recompute\{checkpoints=a\}"):
        precision_pass(Pipeline([Recompute("a")]))
    with pytest.raises(PipelineError, match="and none are given"):
        precision_pass(Pipeline())
