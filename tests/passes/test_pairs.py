"""Float8 and DiLoCo beside every other pass: right, in an order, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest

from graphopt.rewriting.registry import find_pass
from tests.support.core_passes import ROWS
from tests.support.pass_pairs import together
from tests.support.ranks import run_ranks

TOGETHER = "cannot be used together"
CONFLICTS = (
    "adaptive-local-sgd", "compress-gradients", "deep-gradient-compression", "local-sgd", "offload-state",
    "shard-optimizer", "shard-parameters",
)  # fmt: skip
REFUSED = {
    ("float8", "chunk"): "its products are in 8 bits: let float8 skip it",
    ("float8", "microbatch"): "float8_scale may mix samples",
    **{("diloco", name): TOGETHER for name in CONFLICTS},
}
"""What says so where two passes cannot be in one pipeline."""

ALONE = [name for name, row in ROWS.items() if row.ranks == 1]


def is_right(one: str, other: str, found: Mapping[str, Any]) -> None:
    if (one, other) in REFUSED:
        assert all(word in found["refused"] for word in (other, REFUSED[one, other]))
        return
    assert not found["refused"]
    assert found["finite"]
    assert found["alike"]
    bitwise = find_pass(other).numerics == "bitwise"
    assert found["same"] or not bitwise


@pytest.mark.sweep(but=("fit-memory", "mixed-precision", "recompute"))
@pytest.mark.parametrize("other", [name for name in ALONE if name != "float8"])
def test_float8_beside_another_pass(other: str) -> None:
    is_right("float8", other, together("float8", other))


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], list[Mapping[str, Any]]]:
    """What two ranks found of DiLoCo beside each other pass; they run when the first case asks."""

    @cache
    def found() -> list[Mapping[str, Any]]:
        names = [name for name in ROWS if name not in ("diloco", "data-parallel")]
        script = "from tests.support.pass_pairs import together\n"
        script += f"say({{name: together('diloco{{every=2}}', name) for name in {names!r}}})"
        return [said for (said,) in run_ranks(script, 2, tmp_path_factory.mktemp("ranks") / "store")]

    return found


@pytest.mark.sweep
@pytest.mark.parametrize("other", [name for name in ROWS if name not in ("diloco", "data-parallel")])
def test_diloco_beside_another_pass(other: str, of_ranks: Callable[[], list[Mapping[str, Any]]]) -> None:
    for said in of_ranks():
        is_right("diloco", other, said[other])
