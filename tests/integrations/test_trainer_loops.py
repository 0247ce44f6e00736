"""`transformers.Trainer` with a drop-in model, and the Trainer of whole steps: as without graphopt, to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.loops import CASES, SIBLINGS, outcome, plain_outcome

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries, about themselves

WAYS = ("drop-in", "whole step")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plain")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_a_trainer_trains_as_without_graphopt(name: str, way: str, folder: Path, tmp_path: Path) -> None:
    outcome(CASES[name], way, tmp_path).assert_equal(plain_outcome(name, folder / name))


@pytest.mark.sweep
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SIBLINGS)
def test_other_settings(name: str, way: str, folder: Path, tmp_path: Path) -> None:
    outcome(SIBLINGS[name], way, tmp_path).assert_equal(plain_outcome(name, folder / name))
