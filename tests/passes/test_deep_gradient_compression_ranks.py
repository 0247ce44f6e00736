"""DeepGradientCompression in several processes: equal parameters on all ranks, nothing lost, exact resume."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.compressing import CHECKED, ENTRIES, MOMENTA, WAYS
from tests.support.compressing_published import CASES, KEPT, WHOLE
from tests.support.ranks import run_ranks
from tests.support.sweeping import sweeping

Said = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks save their states."""
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def two(folder: Path, request: pytest.FixtureRequest) -> Said:
    """What each of two ranks found; only in some ways where nothing that is swept is asked for."""
    swept = sweeping(request)
    ways = list(WAYS) if swept else PICKED
    parts = [
        f"compressing.equal({ways}, {[name for name in ENTRIES if name in ways]})",
        *(f"compressing.dense({kind!r})" for kind in asked(MOMENTA, swept=swept)),
        *(f"compressing.skipped({kind!r})" for kind in asked(CHECKED, swept=swept)),
        "compressing.left_out()",
        f"compressing.save({str(folder)!r})",
        *(f"compressing_published.published({case!r})" for case in asked(CASES, swept=swept)),
        *(f"compressing_published.conserved({kind!r})" for kind in asked(KEPT, swept=swept)),
        *(f"compressing_published.everything_sent({kind!r})" for kind in asked(WHOLE, swept=swept)),
        *(["compressing_links.found()"] if swept else []),
    ]
    return run(parts, 2, folder / "store")


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """What each of four ranks found, which do some of what two do."""
    parts = [
        f"compressing.equal({list(WAYS)[:4]}, ['plain'])",
        "compressing.left_out()",
        "compressing_published.published('masking')",
    ]
    return run(parts, 4, tmp_path_factory.mktemp("four") / "store")


def run(parts: Sequence[str], world: int, store: Path) -> Said:
    """What each rank found, in the order of the calls."""
    script = "from tests.support import compressing, compressing_links, compressing_published\n"
    script += "said = {}\n" + "".join(f"said.update({part})\n" for part in parts) + "say(said)\n"
    return [found for (found,) in run_ranks(script, world, store)]


def asked(kinds: Iterable[str], *, swept: bool) -> list[str]:
    """All of them, or the first, which stands for the others."""
    return list(kinds)[: None if swept else 1]


@pytest.fixture
def said(request: pytest.FixtureRequest) -> Said:
    """What the ranks of the group that the test names found."""
    found: Said = request.getfixturevalue(request.param)
    return found


def of_four(*case: str) -> Any:
    """A case of the group of four ranks, whose scripts take as long as everything else in this file."""
    return pytest.param("four", *case, marks=pytest.mark.sweep)


def first_of(first: str, *others: str) -> list[Any]:
    """Cases of two ranks of which the first stands for the others."""
    return [first, *(pytest.param(other, marks=pytest.mark.sweep) for other in others)]


PICKED = ["plain", "float16", "with other passes"]


def of_two(way: str) -> Any:
    """A case of the group of two ranks."""
    return pytest.param("two", way, marks=() if way in PICKED else pytest.mark.sweep)


@pytest.mark.sweep(cases=("two-plain",))
@pytest.mark.parametrize(
    ("said", "way"), [*(of_two(way) for way in WAYS), *(of_four(way) for way in list(WAYS)[:4])], indirect=["said"]
)
def test_parameters_are_equal_on_all_ranks_after_every_step(said: Said, way: str) -> None:
    """To the last bit, before, in and behind the warm-up."""
    for found in said:
        same, moved, exchanges = found[way]
        assert all(same)
        assert len(same) == (18 if way == "accumulated" else 6)
        assert moved
        assert exchanges >= 1


@pytest.mark.parametrize(("said", "way"), [*(of_two(way) for way in ENTRIES), of_four("plain")], indirect=["said"])
def test_parameters_are_equal_where_the_update_touches_entries_only(said: Said, way: str) -> None:
    """To the last bit on all ranks, and what dense sums give."""
    for found in said:
        same, entries, off = found[f"{way}, entries"]
        assert all(same)
        assert entries
        assert off == 0.0


def test_other_passes_change_nothing(two: Said) -> None:
    assert all(found["other passes change nothing"] for found in two)


@pytest.mark.parametrize("kind", first_of(*MOMENTA))
def test_dense_steps_are_those_of_sgd_with_momentum_which_goes_on(two: Said, kind: str) -> None:
    """Before the warm-up, and at sparsity 0: parameters and momenta to the last bit."""
    for found in two:
        equal, carried, off = found[f"dense, {kind}"]
        assert equal == [True] * 6
        assert carried
        assert off < 1e-6


@pytest.mark.parametrize(
    ("said", "case"),
    [("two", "masking"), pytest.param("two", "no masking", marks=pytest.mark.sweep), of_four("masking")],
    indirect=["said"],
)
def test_training_is_that_of_the_published_algorithm(said: Said, case: str) -> None:
    """Parameters and residuals in float64 after a dense step and two sparsities."""
    for found in said:
        for how in ("published", "published, entries"):
            parameters, residual = found[f"{how}, {case}"]
            assert parameters < 1e-12
            assert residual < 1e-12


@pytest.mark.parametrize("kind", first_of(*KEPT))
def test_what_is_added_is_sent_or_kept(two: Said, kind: str) -> None:
    """Over 20 steps, summed over the ranks, what was rounded off on the wire included."""
    assert all(found[f"conserved, {kind}"] < 1e-12 for found in two)


@pytest.mark.parametrize("kind", first_of(*WHOLE))
def test_sending_everything_is_dense_training(two: Said, kind: str) -> None:
    """Without masking that of momentum SGD; with it momentum starts again at every step, which is plain SGD."""
    assert all(found[f"density 1, {kind}"] < 1e-12 for found in two)


@pytest.mark.parametrize("kind", first_of(*CHECKED))
def test_a_skipped_step_leaves_residuals_and_momenta_on_all_ranks(two: Said, kind: str) -> None:
    """Where one rank's gradients are not finite, all ranks skip and agree on the next scale."""
    for found in two:
        kept, nothing, moving, same, scale, warned = found[f"skipped, {kind}"]
        assert kept
        assert nothing
        assert moving
        assert same
        assert scale == two[0][f"skipped, {kind}"][4]
        assert scale["loss-scale/scale"] == (512.0 if kind == "float16" else 1.0)
        assert not warned


@pytest.mark.parametrize("said", ["two", of_four()], indirect=True)
def test_without_loss_scaling_a_gradient_that_is_not_finite_is_left_out(said: Said) -> None:
    """Its rank sends of what it had kept, and adds nothing to it; others go on. That rank says so, once."""
    for rank, found in enumerate(said):
        u, v, same, warned = found["left out"]
        assert same
        assert (u and v) == (rank == 1)
        assert len(warned) == (rank == 1)
        assert all("left 1 gradient of this rank out up to step 4" in line for line in warned)


@pytest.mark.sweep
def test_a_link_is_measured_by_all_ranks_together(two: Said) -> None:
    """They get the same figures, and move no more than 8 MiB on the way to a size and five times 8 MiB."""
    bandwidth, latency, algorithm, host, moved = two[0]["link"]
    assert 0 < bandwidth < 1e13
    assert 0 <= latency < 10
    assert (algorithm, host) == ("ring", None)
    assert moved < 48 * 2**20
    assert two[1]["link"] == two[0]["link"]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("case", "sparse"), [("measured", None), ("one rank selects slowly", 0), ("all select fast", 2)]
)
def test_ranks_choose_alike_by_the_slowest(two: Said, case: str, sparse: int | None) -> None:
    """Each time and each choice is the same on both; one rank may capture another batch alone."""
    one, other = (found[f"chosen, {case}"] for found in two)
    same, tensors, lines, later = one
    assert same == [True, True]
    assert one == other
    assert later == 0
    assert any(line.startswith("dense or sparse by time at") for line in lines)
    assert ("measured by the ranks" in " ".join(lines)) == (case == "measured")
    assert sparse is None or len(tensors) == sparse


@pytest.mark.sweep
@pytest.mark.usefixtures("two")
def test_resuming_in_the_middle_of_the_warm_up_is_exact(folder: Path) -> None:
    """New processes go on from model, optimizer and each rank's step, to the last bit of all three."""
    for found in run([f"compressing.load({str(folder)!r})"], 2, folder / "other"):
        assert found["momentum"]
        assert found["feedback"]
        assert found["momentum, programs"] == ["update, deep-gradient-compression: sparsity 0.9", "update"]
