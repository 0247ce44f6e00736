"""Loss functions that return more than the loss: a whole step hands out what eager mode computes there."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import graphopt
from graphopt import CaptureError, TrainStep
from graphopt.passes import ChunkLoss, FitMemory, Microbatch, Recompute
from tests.support.properties import examples
from tests.support.running import adamw, network, rows, sgd
from tests.support.storing import is_loaded, use_programs
from tests.support.training import identical

Y = torch.arange(4) % 8
Results = Callable[[torch.Tensor, torch.Tensor], Any]


@dataclasses.dataclass
class Output:
    """What a loss may return, with the loss not at the beginning."""

    accuracy: torch.Tensor
    loss: torch.Tensor
    name: str = "train"


class Named(NamedTuple):
    predictions: torch.Tensor
    loss: torch.Tensor


def right(logits: torch.Tensor) -> torch.Tensor:
    return (logits.argmax(1) == Y[: len(logits)]).float().mean()


FORMS: dict[str, Results] = {
    "tuple": lambda loss, logits: (loss, right(logits)),
    "list of one": lambda loss, logits: [loss],
    "dict": lambda loss, logits: {"accuracy": right(logits), "loss": loss, "more": [logits, None, {"rank": 3}]},
    "dataclass": lambda loss, logits: Output(right(logits), loss),
    "named tuple": lambda loss, logits: Named(logits.argmax(1), loss),
    "shared memory": lambda loss, logits: (loss, loss, logits, logits[:, 0], logits.t(), logits),
}


def loss_of(form: Results) -> Callable[..., Any]:
    def loss(model: nn.Module, x: torch.Tensor) -> Any:
        logits = model(x)
        return form(F.cross_entropy(logits, Y[: len(x)]), logits)

    return loss


def eager(loss: Callable[..., Any], batches: list[torch.Tensor], every: int = 1) -> tuple[list[Any], nn.Module]:
    model = network()
    optimizer, found = adamw(model.parameters()), []
    torch.manual_seed(1)
    for number, x in enumerate(batches):
        result = loss(model, x)
        main = result["loss"] if isinstance(result, dict) else getattr(result, "loss", None)
        (main if main is not None else result[0]).div(every).backward()
        found.append(pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, result))
        if (number + 1) % every == 0:
            optimizer.step()
            optimizer.zero_grad()
    return found, model


def stepped(
    loss: Callable[..., Any], batches: list[torch.Tensor], passes: Any = (), every: int = 1
) -> tuple[list[Any], TrainStep]:
    model = network()
    step = graphopt.optimize_step(model, adamw(model.parameters()), passes, loss=loss).accumulate(every)
    torch.manual_seed(1)
    return [step(x) for x in batches], step


def same(one: Any, other: Any) -> bool:
    """Whether results have the same form and bits, and the second no gradients."""
    (left, form), (right, other_form) = pytree.tree_flatten(one), pytree.tree_flatten(other)
    pairs = list(zip(left, right, strict=False))
    tensors = [(a, b) for a, b in pairs if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)]
    return (
        form == other_form
        and all(identical(a, b) and not b.requires_grad for a, b in tensors)
        and all(a == b for a, b in pairs if not isinstance(a, torch.Tensor))
    )


@pytest.mark.sweep(
    but=("plain-dict", "plain-dataclass", "plain-shared memory", "recompute-dict", "accumulated-dict", "sizes-dict")
)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(
    ("passes", "every", "sizes"),
    [((), 1, (4, 4)), ([Recompute("net.3")], 1, (4, 4)), ((), 2, (4, 4, 4, 4)), ((), 1, (4, 3, 2, 4))],
    ids=["plain", "recompute", "accumulated", "sizes"],
)
def test_a_step_returns_what_eager_mode_computes(form: Results, passes: Any, every: int, sizes: tuple[int]) -> None:
    loss, batches = loss_of(form), [rows(4)[:size] * number for number, size in enumerate(sizes, 1)]
    expected, trained = eager(loss, batches, every)
    found, step = stepped(loss, batches, passes, every)
    assert same(expected, found)
    assert all(map(torch.equal, trained.parameters(), step.model.parameters()))


POOL: list[Callable[[torch.Tensor, torch.Tensor, nn.Module], Any]] = [
    lambda logits, x, model: logits,
    lambda logits, x, model: logits.detach()[1:],
    lambda logits, x, model: logits.exp().sum(),
    lambda logits, x, model: x,
    lambda logits, x, model: x.t(),
    lambda logits, x, model: logits.max(1),
    lambda logits, x, model: torch.ones(2),
    lambda logits, x, model: next(model.parameters()).norm(),
    lambda logits, x, model: None,
    lambda logits, x, model: 2.5,
]


@examples(5)
@given(
    st.recursive(
        st.integers(0, len(POOL) - 1),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        max_leaves=6,
    ),
    st.booleans(),
)
def test_any_results(chosen: Any, recomputed: bool) -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> Any:
        logits = model(x)
        return logits.square().mean(), pytree.tree_map(lambda number: POOL[number](logits, x, model), chosen)

    expected, trained = eager(loss, [rows(4), rows(4) * 2])
    found, step = stepped(loss, [rows(4), rows(4) * 2], [Recompute("net.3")] if recomputed else ())
    assert same(expected, found)
    assert all(map(torch.equal, trained.parameters(), step.model.parameters()))


def test_results_are_memory_of_their_own() -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> Any:
        return model(x).square().mean(), x, next(model.parameters())

    model, x = network(), rows(4)
    step = graphopt.optimize_step(model, sgd(model.parameters()), loss=loss)
    _, given_back, weight = step(x)
    before = [x.clone(), next(model.parameters()).detach().clone()]
    given_back.zero_()
    weight.zero_()
    assert all(map(torch.equal, before, [x, next(model.parameters())]))


def test_without_training_it_returns_the_same_form() -> None:
    loss = loss_of(FORMS["dict"])
    _, step = stepped(loss, [rows(4)])
    step.model.eval()
    with torch.no_grad():
        expected = loss(step.model, rows(4))
        assert same(expected, step(rows(4)))
    assert same(expected, step.evaluate(rows(4)))


@pytest.mark.sweep(cases=("dict",))
@pytest.mark.parametrize("form", ["dict", "dataclass"])
def test_a_stored_step_returns_them_too(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_programs(tmp_path, monkeypatch)
    loss = loss_of(FORMS[form])
    expected, captured = stepped(loss, [rows(4)] * 2)
    found, loaded = stepped(loss, [rows(4)] * 2)
    assert (is_loaded(captured), is_loaded(loaded)) == (False, True)
    assert same(expected, found)


def test_a_shipped_step_returns_them_too(tmp_path: Path) -> None:
    loss = loss_of(FORMS["dict"])
    expected, step = stepped(loss, [rows(4)] * 2)
    step.save(tmp_path / "step")
    model = network()
    loaded = graphopt.load_step(tmp_path / "step", model, adamw(model.parameters()), loss=loss)
    torch.manual_seed(1)
    assert same(expected, [loaded(rows(4)) for _ in range(2)])
    assert is_loaded(loaded)


def test_what_is_returned_as_it_is_takes_no_copy() -> None:
    model = network()
    program = graphopt.capture(model, (rows(4),), loss=loss_of(lambda loss, logits: (loss, logits)))
    assert not program.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
    assert [spec.role for spec in program.outputs][:2] == ["loss", "output"]


def test_predicted_bytes_count_them() -> None:
    loss, x = loss_of(FORMS["dict"]), rows(4)
    _, step = stepped(loss, [x, x])
    assert graphopt.measure_peak(lambda: step(x)).allocated_peak_bytes == step.program.memory().allocated_peak_bytes


def test_large_ones_are_told(caplog: pytest.LogCaptureFixture) -> None:
    big = nn.Linear(8, 4000)
    loss = lambda model, x: (lambda logits: (logits.square().mean(), logits))(model(x))  # noqa: E731
    with caplog.at_level(logging.WARNING, "graphopt"):
        graphopt.optimize_step(big, sgd(big.parameters()), loss=loss)(rows(4))
        stepped(loss_of(FORMS["tuple"]), [rows(4)])
    (line,) = [record.message for record in caplog.records]
    assert line.startswith("Linear: the step returns 64.0 kB beside the loss, which stay in memory as long as")


def test_metrics_are_computed_in_slices_and_chunks() -> None:
    loss = loss_of(FORMS["tuple"])
    (expected,), _ = eager(loss, [rows(4)])
    for current in (Microbatch(2), ChunkLoss(2)):
        ((value, accuracy),), step = stepped(loss, [rows(4)], [current])
        assert step.records[0].changed
        torch.testing.assert_close(value, expected[0].detach())
        assert accuracy == expected[1]


def test_results_stay_within_a_budget() -> None:
    (expected,), _ = eager(loss_of(FORMS["tuple"]), [rows(4)])
    (found,), step = stepped(loss_of(FORMS["tuple"]), [rows(4)], [FitMemory("97%")])
    assert step.records[0].changed
    assert same(expected, found)


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (lambda logits: (logits, logits.mean()), "returns a tensor of shape (4, 8)"),
        (lambda logits: {"value": logits.mean()}, "returns 1 tensor without one"),
        (lambda logits: (3, logits.mean()), "returns 1 tensor without one"),
        (lambda logits: None, "returns 0 tensors without one"),
    ],
)
def test_results_without_a_loss_are_refused(returned: Callable[[torch.Tensor], Any], reason: str) -> None:
    with pytest.raises(CaptureError) as caught:
        stepped(lambda model, x: returned(model(x)), [rows(4)])
    assert reason in str(caught.value)
    assert "alone, first in a tuple, or as 'loss' in a dict" in str(caught.value)
