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
    "combinations": "masked_select|unbacked symbols",
    "corrcoef": "aten.equal",
    "cov": "aten.equal",
    "index_fill": "aten._unique",
    "index_put": "aten.nonzero",
    "linalg_lstsq": "aten.linalg_lstsq",
    "linalg_lstsq_grad_oriented": "aten.linalg_lstsq",
    "masked_select": "aten.masked_select",
    "narrow": "unbacked symbols",
    "nn_functional_ctc_loss": "aten._ctc_loss",
    "nn_functional_gaussian_nll_loss": "data-dependent",
    "sparse_mm_reduce": "FakeTensors",
    "sparse_sampled_addmm": "FakeTensors",
    "tensor_split": "aten._local_scalar_dense",
    **dict.fromkeys((f"polygamma_polygamma_n_{n}" for n in range(5)), "aten::polygamma_"),
}
"""By op what the message about it says, for some of its arguments at least."""

AS_TORCH_DOES = (
    "cholesky_inverse",
    "linalg_eigh",
    "masked_prod",
    "nn_functional_interpolate_bicubic",
    "nn_functional_interpolate_bilinear",
    "nn_functional_interpolate_linear",
    "nn_functional_interpolate_trilinear",
    "nn_functional_multi_margin_loss",
    "nn_functional_multilabel_margin_loss",
    "nn_functional_upsample_bilinear",
)
"""Ops whose bits are not those of eager mode, and are those of torch's own ``aot_eager``, which the test runs."""


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
    assert bool(different) == (name in AS_TORCH_DOES), different
    refused = [verdict.detail for verdict in verdicts if verdict.kind == "refused"]
    assert bool(refused) == (name in REFUSED), refused
    assert [text for text in refused if not any(part in text for part in REFUSED[name].split("|"))] == []
