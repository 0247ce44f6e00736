"""Every differentiable op of torch's own database trains as in eager mode, to the last bit, or is refused by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.bits import SAME
from tests.support.isolated import Isolated, Outcome
from tests.support.operator_trials import OPERATORS, Verdict

pytestmark = pytest.mark.sweep

REFUSED = {
    **dict.fromkeys((f"polygamma_polygamma_n_{n}" for n in range(5)), "aten::polygamma_"),
}
"""By op what the message about it says, for some of its arguments at least."""

NOTHING_TO_COMPUTE = ("is a view of its inputs or parameters", "requires a gradient for these inputs")
"""What messages say of a model that is one op which computes nothing by itself: views, dropout of nothing."""

AS_TORCH_DOES = ("linalg_eigh",)
"""Ops whose bits differ from eager mode's on some machines, and are then those of torch's own ``aot_eager``."""


@pytest.fixture(scope="module")
def tried() -> Iterator[Callable[[str], Outcome]]:
    with Isolated("tests.support.operator_trials:try_operator") as call:
        yield call


@pytest.mark.parametrize("name", list(OPERATORS))
def test_an_op_trains_as_in_eager_mode_or_is_refused_by_name(
    name: str, tried: Callable[[str], Outcome], record_property: Callable[[str, Any], None]
) -> None:
    outcome = tried(name)
    verdicts = [Verdict(**found) for found in outcome.values]
    kinds = Counter(f"{verdict.way} {verdict.kind}" for verdict in verdicts)
    record_property("counts", dict(kinds))
    if any(verdict.kind not in ("equal", "nothing to recompute") for verdict in verdicts):
        record_property("row", f"{name}: " + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())))
    assert not outcome.died, f"{outcome.died}\n{outcome.said}"
    assert [verdict for verdict in verdicts if verdict.kind in ("crash", "eager differs")] == []
    different = [verdict for verdict in verdicts if verdict.kind == "different"]
    assert [verdict for verdict in different if verdict.aot_eager != SAME] == []
    assert not different or name in AS_TORCH_DOES, different
    refused = [verdict.detail for verdict in verdicts if verdict.kind == "refused"]
    refused = [text for text in refused if not any(part in text for part in NOTHING_TO_COMPUTE)]
    assert bool(refused) == (name in REFUSED), refused
    assert [text for text in refused if not any(part in text for part in REFUSED[name].split("|"))] == []
