"""`transformers.Trainer` with a drop-in model, and the Trainer of whole steps: as without graphopt, to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.loops import CASES, SIBLINGS, outcome, plain_outcome
from tests.support.storing import count, reasons, use_programs

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries, about themselves

WAYS = ("drop-in", "whole step")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plain")


@pytest.mark.sweep(but=("defaults-drop-in",))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_a_trainer_trains_as_without_graphopt(name: str, way: str, folder: Path, tmp_path: Path) -> None:
    outcome(CASES[name], way, tmp_path).assert_equal(plain_outcome(name, folder / name))


@pytest.mark.sweep
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SIBLINGS)
def test_other_settings(name: str, way: str, folder: Path, tmp_path: Path) -> None:
    outcome(SIBLINGS[name], way, tmp_path).assert_equal(plain_outcome(name, folder / name))


KEPT = ("defaults", "bf16")
ALSO_KEPT = ("short window of means", "adapters", "resumed", "label smoothing", "two lengths", "SGD")


def assert_read(name: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train twice with a folder for captures: the second time nothing is captured, and all is the same."""
    programs = use_programs(tmp_path, monkeypatch)
    case = (CASES | SIBLINGS)[name]
    first = outcome(case, way, tmp_path / "first")
    kept = count(programs)
    outcome(case, way, tmp_path / "second").assert_equal(first)
    assert reasons(programs) == ""
    assert count(programs) == kept > 0


@pytest.mark.sweep(but=("defaults-whole step",))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", KEPT)
def test_a_second_start_reads_what_the_first_captured(
    name: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_read(name, way, tmp_path, monkeypatch)


@pytest.mark.sweep
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ALSO_KEPT)
def test_second_starts_of_other_settings(name: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_read(name, way, tmp_path, monkeypatch)
