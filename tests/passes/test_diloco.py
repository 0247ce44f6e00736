"""DiLoCo: its schedule, a plain loop's bits, what travels, and what is kept from one run to the next."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import graphopt
from graphopt import GraphoptError, Pipeline, PipelineError
from graphopt.passes import DataParallel, DiLoCo, LocalSGD
from graphopt.rewriting.distributed.local_steps import LOCAL
from graphopt.rewriting.distributed.outer_step import fragments_of, sent_bytes
from graphopt.rewriting.training_pass import Clock
from tests.support.ranks import run_ranks

# --- the schedule ----------------------------------------------------------------------------------------------------


def schedule(steps: int, **options: Any) -> str:
    """Of each update: ``.`` it is local; ``b`` an exchange begins, ``a`` it arrives, ``S`` both, with its fragment."""
    found = []
    for number in range(steps):
        form = DiLoCo(**options).form(Clock(number))
        fragment = form.split()[1] if form.startswith("fragment") else "1"
        kind = "a" if form.endswith("arrives") else "b" if options.get("delay") else "S"
        found.append("." if form == LOCAL else f"{kind}{fragment}")
    return " ".join(found)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"every": 1}, "S1 S1 S1 S1"),
        ({"every": 3}, ". . S1 . . S1 ."),
        ({"every": 4, "fragments": 2}, ". S1 . S2 . S1 . S2"),
        ({"every": 3, "delay": 1}, ". b1 a1 . b1 a1"),
        ({"every": 6, "fragments": 2, "delay": 2}, "b1 . a1 b2 . a2 b1"),
    ],
)
def test_each_fragment_has_an_outer_step_in_turn(options: dict[str, int], expected: str) -> None:
    assert schedule(len(expected.split()), **options) == expected


@given(st.integers(1, 4), st.integers(1, 5), st.data())
def test_an_exchange_arrives_before_the_next_one_begins(fragments: int, interval: int, data: st.DataObject) -> None:
    delay = data.draw(st.integers(0, interval - 1))
    every = interval * fragments
    found = schedule(4 * every, every=every, fragments=fragments, delay=delay).split()
    events = [event for event in found if event != "."]
    turns = [str(1 + number % fragments) for number in range(4 * fragments)]
    assert events == [kind + turn for turn in turns for kind in (["b", "a"] if delay else ["S"])]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.data())
def test_fragments_are_neighbours_and_none_is_empty(sizes: list[int], data: st.DataObject) -> None:
    number = data.draw(st.integers(1, len(sizes)))
    names = [str(place) for place in range(len(sizes))]
    found = fragments_of(list(zip(names, sizes, strict=True)), number)
    assert len(found) == number
    assert all(found)
    assert [name for fragment in found for name in fragment] == names


def test_fragments_have_about_the_same_bytes() -> None:
    sizes = [4, 1, 1, 2, 3, 1, 2, 2]
    found = fragments_of([(str(place), size) for place, size in enumerate(sizes)], 4)
    assert [sum(sizes[int(name)] for name in fragment) for fragment in found] == [4, 4, 4, 4]


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every is a number of updates of at least 1, got 0"),
        ({"outer_lr": 0.0}, "outer_lr must be above 0"),
        ({"outer_momentum": 1.0}, "outer_momentum must be at least 0 and below 1"),
        ({"every": 10, "fragments": 3}, "every is a multiple of fragments.* got every=10 and fragments=3"),
        ({"every": 8, "fragments": 2, "delay": 4}, r"delay must be at least 0 and below every / fragments \(4\)"),
        ({"mix": 0.0}, "mix must be above 0 and at most 1"),
        ({"bits": 2}, "bits is one of 32, 16, 8, 4, got 2"),
        ({"sparsity": 1.0}, "sparsity must be at least 0 and below 1"),
        ({"sparsity": 0.9, "bits": 8}, "with sparsity entries travel in 32 or 16 bits, got bits=8"),
        ({"error_decay": 1.5, "sparsity": 0.5}, "error_decay must be from 0 to 1"),
        ({"error_decay": 0.5}, "error_decay=0.5 would mean nothing without sparsity"),
    ],
)
def test_wrong_options_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphoptError, match=f"diloco: .*{message}"):
        DiLoCo(**options)


def test_combinations_that_make_no_sense_name_both_passes() -> None:
    with pytest.raises(PipelineError, match="'diloco' needs 'data-parallel'"):
        Pipeline([DiLoCo()])
    with pytest.raises(PipelineError, match="'diloco' and 'local-sgd' cannot be used together"):
        Pipeline([DataParallel(), DiLoCo(), LocalSGD()])
    with pytest.raises(PipelineError, match="diloco rewrites the optimizer's update, which a drop-in model"):
        graphopt.optimize(torch.nn.Linear(2, 2), [DataParallel(), DiLoCo()])


def test_options_as_text() -> None:
    given = DiLoCo(every=64, fragments=4, delay=2, mix=0.5, bits=8)
    assert str(given) == "diloco{every=64 fragments=4 delay=2 mix=0.5 bits=8}"
    assert Pipeline(f"data-parallel,{given}").passes == Pipeline([DataParallel(), given]).passes


def test_other_parameters_are_refused_while_an_exchange_may_be_under_way() -> None:
    """What was sent of those before would be taken for theirs."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        for delay in (1, 0):
            model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            sgd = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
            passes = [DataParallel(), DiLoCo(every=2, delay=delay)]
            step = graphopt.optimize_step(model, sgd, passes, loss=lambda model, x: model(x).square().mean())
            step(torch.randn(4, 8))
            model[0].requires_grad_(False)
            if delay:
                with pytest.raises(GraphoptError, match=r"diloco: other parameters are trained than before \(2 now\)"):
                    step(torch.randn(4, 8))
            else:
                step(torch.randn(4, 8))
            step.state_dict()  # waits for what is under way
    finally:
        torch.distributed.destroy_process_group()


def test_other_parameters_are_refused_in_a_program_that_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHOPT_CACHE", str(tmp_path))
    monkeypatch.setenv("GRAPHOPT_CACHE_PROGRAMS", "1")
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)

    def stepped(*, frozen: bool) -> tuple[nn.Sequential, graphopt.TrainStep]:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        model[0].requires_grad_(not frozen)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
        passes = [DataParallel(), DiLoCo(every=2, delay=1)]
        return model, graphopt.optimize_step(model, sgd, passes, loss=mean_square)

    try:
        _, frozen = stepped(frozen=True)
        frozen(torch.randn(4, 8))
        frozen.state_dict()  # waits for what is under way
        model, step = stepped(frozen=False)
        step(torch.randn(4, 8))
        model[0].requires_grad_(False)
        with pytest.raises(GraphoptError, match=r"diloco: other parameters are trained than before \(2 now\)"):
            step(torch.randn(4, 8))
        step.state_dict()
    finally:
        torch.distributed.destroy_process_group()


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


@pytest.mark.parametrize(
    ("bits", "sparsity", "expected"),
    [
        (32, 0.0, 4000),
        (16, 0.0, 2000),
        (8, 0.0, 4 * (8 + 256)),
        (4, 0.0, 4 * (8 + 128)),
        (32, 0.99, 80),
        (16, 0.99, 60),
    ],
)
def test_what_travels(bits: int, sparsity: float, expected: int) -> None:
    """Of 1,000 elements: whole, in groups of 256 with 8 bytes each, or the largest with 4 bytes of index each."""
    assert sent_bytes([1000], 4, bits, sparsity) == expected


# --- on ranks --------------------------------------------------------------------------------------------------------

GOLDEN: list[tuple[dict[str, Any], str]] = [
    ({"every": 3}, "plain"),
    ({"every": 3, "outer_momentum": 0.0, "outer_lr": 1.0}, "frozen"),
    ({"every": 8, "fragments": 4}, "plain"),
    ({"every": 6, "fragments": 2, "delay": 1, "mix": 0.5}, "plain"),
    ({"every": 3, "delay": 2}, "tied"),
    ({"every": 3}, "images"),
    ({"every": 3}, "bfloat16"),
    ({"every": 3, "bits": 16}, "plain"),
    ({"every": 4, "fragments": 2, "bits": 8}, "plain"),
    ({"every": 3, "bits": 4, "delay": 2}, "float64"),
    ({"every": 3, "sparsity": 0.9, "outer_lr": 1.0, "outer_momentum": 0.0}, "plain"),
    ({"every": 3, "sparsity": 0.9, "bits": 16, "delay": 1}, "plain"),
]
ALWAYS = [2, 3, 5, 8, 10, 11]
"""Those that run by default: what the core has not, fragments, layouts, and what travels in another form."""

ON_THREE = [place for place, (options, _) in enumerate(GOLDEN) if options.get("bits", 32) < 16 or "sparsity" in options]

SCRIPT = """
import pathlib
from tests.support.outer_steps import beside_reference, peaks, resumed, synchronized
from tests.passes.test_diloco import ALWAYS, GOLDEN, PEAKS, RESUMED
folder = pathlib.Path(store).parent
say({place: beside_reference(*GOLDEN[place], 10) for place in ALWAYS})
say([peaks(options) for options in PEAKS])
say([resumed(options, at, 12, folder / str(place)) for place, (options, at) in enumerate(RESUMED)])
say(synchronized({"every": 6, "delay": 1}, 5))
"""

MORE = """
from tests.support.outer_steps import beside_reference
from tests.passes.test_diloco import ALWAYS, GOLDEN, ON_THREE
places = ON_THREE if world > 2 else [place for place in range(len(GOLDEN)) if place not in ALWAYS]
say({place: beside_reference(*GOLDEN[place], 10) for place in places})
"""
PEAKS: list[dict[str, Any]] = [
    {"every": 2},
    {"every": 3, "delay": 1},
    {"every": 4, "fragments": 2, "delay": 1, "bits": 8},
]
RESUMED: list[tuple[dict[str, Any], int]] = [
    ({"every": 3, "delay": 2}, 5),
    ({"every": 3, "delay": 2, "bits": 4}, 4),
    ({"every": 3, "sparsity": 0.9, "delay": 1}, 5),
]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """What each of two ranks said."""
    return run_ranks(SCRIPT, 2, tmp_path_factory.mktemp("ranks") / "store")


def test_training_is_that_of_a_plain_loop(said: list[list[Any]]) -> None:
    for golden, *_ in said:
        assert golden == {str(place): [] for place in ALWAYS}


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", [2, 3])
def test_other_options_and_three_ranks(ranks: int, tmp_path: Path) -> None:
    """With three, of what every rank adds up by itself: sums of gloo's go in another order for other buckets."""
    for (golden,) in run_ranks(MORE, ranks, tmp_path / "store"):
        assert set(map(tuple, golden.values())) == {()}
        assert len(golden) >= len(ON_THREE)


def test_peaks_are_predicted_with_what_is_kept(said: list[list[Any]]) -> None:
    for _, found, *_ in said:
        for options, calls in zip(PEAKS, found, strict=True):
            assert set(calls) == {DiLoCo(**options).form(Clock(number)) for number in range(options["every"])}
            assert all(predicted == measured for predicted, measured in calls.values())


def test_a_step_is_saved_while_an_exchange_is_under_way(said: list[list[Any]]) -> None:
    assert [found for _, _, found, _ in said] == [[True] * len(RESUMED)] * 2


def test_synchronize_gives_all_ranks_the_mean(said: list[list[Any]]) -> None:
    assert [found for *_, found in said] == [[True, True, True]] * 2


TORCHFT = """
from tests.support.torchft_beside import furthest
say([furthest(options, 20) for options in ({options})])
"""
BESIDE_TORCHFT: list[dict[str, Any]] = [
    {"every": 4},
    {"every": 8, "fragments": 4},
    {"every": 8, "fragments": 2, "delay": 3, "mix": 0.75},
]


@pytest.mark.sweep
def test_training_is_that_of_torchft(tmp_path: Path) -> None:
    assert importlib.util.find_spec("torchft"), "pip install torchft"
    options = ", ".join(map(repr, BESIDE_TORCHFT))
    for (found,) in run_ranks(TORCHFT.format(options=options), 2, tmp_path / "store"):
        assert all(difference < 1e-6 for difference in found)
