"""DeepGradientCompression in several processes: equal parameters on all ranks, nothing lost, exact resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.compressing import COMMON, DENSE, EQUAL, EXACT, LOAD, RESUME, SAVE, SKIPPED
from tests.ranks import run_ranks

Said = list[dict[str, Any]]
SAY = "\nsay(said)\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks save their states."""
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def two(folder: Path) -> Said:
    """What each of two ranks found."""
    script = COMMON + EQUAL + DENSE + SKIPPED + RESUME + SAVE + EXACT + SAY
    return [found for (found,) in run_ranks(script, 2, folder / "store")]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """What each of four ranks found, which do some of what two do."""
    script = COMMON + EQUAL + SKIPPED + EXACT + SAY
    return [found for (found,) in run_ranks(script, 4, tmp_path_factory.mktemp("four") / "store")]


@pytest.fixture
def said(request: pytest.FixtureRequest) -> Said:
    """What the ranks of the group that the test names found."""
    found: Said = request.getfixturevalue(request.param)
    return found


WAYS = [
    "plain", "nesterov, clipping, decay", "no masking, bfloat16 wire", "feedback, float16 wire", "bfloat16, O2",
    "bfloat16, O1", "float16", "accumulated", "tied", "with other passes", "bfloat16 parameters",
]  # fmt: skip


@pytest.mark.parametrize(
    ("said", "way"), [*(("two", way) for way in WAYS), *(("four", way) for way in WAYS[:4])], indirect=["said"]
)
def test_parameters_are_equal_on_all_ranks_after_every_step(said: Said, way: str) -> None:
    """To the last bit, before, in and behind the warm-up."""
    for found in said:
        same, moved, exchanges = found[way]
        assert all(same)
        assert len(same) == (18 if way == "accumulated" else 6)
        assert moved
        assert exchanges >= 1


def test_other_passes_change_nothing(two: Said) -> None:
    assert all(found["other passes change nothing"] for found in two)


@pytest.mark.parametrize("kind", ["momentum", "nesterov"])
def test_dense_steps_are_those_of_sgd_with_momentum_which_goes_on(two: Said, kind: str) -> None:
    """Before the warm-up, and at sparsity 0: parameters and momenta to the last bit."""
    for found in two:
        equal, carried, off = found[f"dense, {kind}"]
        assert equal == [True] * 6
        assert carried
        assert off < 1e-6


@pytest.mark.parametrize(
    ("said", "case"), [("two", "masking"), ("two", "no masking"), ("four", "masking")], indirect=["said"]
)
def test_training_is_that_of_the_published_algorithm(said: Said, case: str) -> None:
    """Parameters and residuals in float64 after a dense step and two sparsities."""
    for found in said:
        parameters, residual = found[f"published, {case}"]
        assert parameters < 1e-12
        assert residual < 1e-12


@pytest.mark.parametrize("kind", ["momentum", "nesterov, float16 wire", "feedback, bfloat16 wire"])
def test_what_is_added_is_sent_or_kept(two: Said, kind: str) -> None:
    """Over 20 steps, summed over the ranks, what was rounded off on the wire included."""
    assert all(found[f"conserved, {kind}"] < 1e-12 for found in two)


@pytest.mark.parametrize("kind", ["no masking", "masking"])
def test_sending_everything_is_dense_training(two: Said, kind: str) -> None:
    """Without masking that of momentum SGD; with it momentum starts again at every step, which is plain SGD."""
    assert all(found[f"density 1, {kind}"] < 1e-12 for found in two)


@pytest.mark.parametrize("kind", ["float16", "float32, checked"])
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


@pytest.mark.parametrize("said", ["two", "four"], indirect=True)
def test_without_loss_scaling_a_gradient_that_is_not_finite_is_left_out(said: Said) -> None:
    """Its rank sends of what it had kept, and adds nothing to it; others go on. That rank says so, once."""
    for rank, found in enumerate(said):
        u, v, same, warned = found["left out"]
        assert same
        assert (u and v) == (rank == 1)
        assert len(warned) == (rank == 1)
        assert all("left 1 gradients of this rank out up to step 4" in line for line in warned)


@pytest.mark.usefixtures("two")
def test_resuming_in_the_middle_of_the_warm_up_is_exact(folder: Path) -> None:
    """New processes go on from model, optimizer and each rank's step, to the last bit of all three."""
    for (found,) in run_ranks(COMMON + RESUME + LOAD + SAY, 2, folder / "other"):
        assert found["momentum"]
        assert found["feedback"]
        assert found["momentum, programs"] == ["update, deep-gradient-compression: sparsity 0.9", "update"]
