"""``CompressActivations``: what waits for backward, in a few bits an element."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import graphopt
from graphopt import Phase
from graphopt.errors import ArgumentError, PassError
from graphopt.ir.node import info
from graphopt.ir.ops import schema
from graphopt.passes import (
    Chunk,
    ClipGradients,
    CompressActivations,
    FitMemory,
    FuseUpdate,
    MixedPrecision,
    Offload,
    Recompute,
)
from tests.support.properties import examples

ROWS, WIDTH = 32, 24


class Layer(nn.Module):
    """A norm, two products and an activation, beside a residual."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(self.norm(x))
        if self.kind == "dropout":
            hidden = F.dropout(F.gelu(hidden), 0.2, self.training)
        elif self.kind == "softmax":
            hidden = torch.softmax(hidden, -1)
        elif self.kind == "max":
            hidden = torch.maximum(hidden, hidden.detach() * 0.5)
        else:
            hidden = getattr(F, self.kind)(hidden)
        return x + self.down(hidden)  # type: ignore[no-any-return]


KINDS = ("gelu", "silu", "relu", "tanh", "sigmoid", "dropout", "softmax", "max", "leaky_relu")
Everything = CompressActivations(min_bytes=0, group=64)


def made(*kinds: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(kind) for kind in kinds))


def batch(rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))


def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def trained(
    passes: Sequence[Any], model: nn.Module, x: torch.Tensor, steps: int = 3, seed: int = 2
) -> tuple[graphopt.TrainStep, torch.Tensor]:
    torch.manual_seed(seed)
    step = graphopt.optimize_step(model, torch.optim.SGD(model.parameters(), lr=0.1), passes, loss=squares)
    return step, torch.stack([step(x).detach() for _ in range(steps)])


def gradients(model: nn.Module, passes: Sequence[Any], x: torch.Tensor, seed: int) -> list[torch.Tensor]:
    copied = copy.deepcopy(model)
    before = [p.detach().clone() for p in copied.parameters()]
    trained(passes, copied, x, 1, seed)
    return [(was - now) / 0.1 for was, now in zip(before, (p.detach() for p in copied.parameters()), strict=True)]


def waiting_bytes(program: graphopt.Program) -> int:
    memory = program.memory(measure=False)
    end = max(place for place, node in enumerate(memory.nodes) if info(node).phase is Phase.FORWARD)
    return sum(s.bytes for s in memory.storages if not s.is_input and s.first <= end < s.last)


def away(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """The distance of two lists of gradients, relative to the second."""
    distance = sum(float((a - b).square().sum()) for a, b in zip(one, other, strict=True))
    return float((distance / sum(float(b.square().sum()) for b in other)) ** 0.5)


@pytest.mark.sweep(but=("tanh",))
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "dropout"])
def test_forward_is_exact_and_gradients_are_close(kind: str) -> None:
    model = made(kind, kind)
    step, losses = trained([Everything], copy.deepcopy(model), batch())
    plain, expected = trained([], copy.deepcopy(model), batch())
    assert torch.equal(losses[0], expected[0])
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=0)
    assert 0 < away(gradients(model, [Everything], batch(), 0), gradients(model, [], batch(), 0)) < 0.02
    assert step.records[0].changed.counts["values"] >= 4
    assert waiting_bytes(step.program) < 0.8 * waiting_bytes(plain.program)


@pytest.mark.sweep
def test_gradients_have_no_bias() -> None:
    """The mean over many seeds is nearer than one of them, as far as their number allows."""
    model = made("gelu", "relu")
    step, _ = trained([], copy.deepcopy(model), batch(), 1)
    wanted = gradients(model, [], batch(), 0)
    four = CompressActivations(4, min_bytes=0, group=64)
    found = []
    compressed = copy.deepcopy(model)
    torch.manual_seed(0)
    step = graphopt.optimize_step(compressed, torch.optim.SGD(compressed.parameters(), lr=0.1), [four], loss=squares)
    for _ in range(60):
        compressed.load_state_dict(model.state_dict())
        step(batch())
        now = [p.detach().clone() for p in compressed.parameters()]
        found.append([(was - new) / 0.1 for was, new in zip(model.parameters(), now, strict=True)])
    alone = away([g.detach() for g in found[0]], wanted)
    mean = [torch.stack([gs[i].detach() for gs in found]).mean(0) for i in range(len(wanted))]
    assert away(mean, wanted) < 2.5 * alone / 60**0.5


@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    rows=st.integers(1, 40),
    bits=st.sampled_from([4, 8]),
)
@examples(3)
def test_any_model_trains_as_one_seed_says_and_its_peak_is_predicted(kinds: list[str], rows: int, bits: int) -> None:
    passes = [CompressActivations(bits, min_bytes=0, group=32)]
    models = [made(*kinds) for _ in range(2)]
    x = batch(rows)
    (step, one), (_, other) = (trained(passes, model, x) for model in models)
    assert torch.equal(one, other)
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models), strict=True))
    measured = graphopt.measure_peak(lambda: step(x))
    assert measured.allocated_peak_bytes == step.program.memory().allocated_peak_bytes


@pytest.mark.sweep
def test_another_seed_rounds_otherwise() -> None:
    one, other = (gradients(made("gelu"), [Everything], batch(), seed) for seed in (0, 1))
    assert not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.sweep
@pytest.mark.parametrize(
    "passes",
    [
        [MixedPrecision("bf16")],
        [MixedPrecision("bf16", level="O2")],
        [ClipGradients(0.1)],
        [FuseUpdate()],
        [Recompute("0")],
        [Chunk("*", chunks=2)],
        [FuseUpdate(), FitMemory("99%")],
        [Offload(min_bytes=0)],
    ],
    ids=["bf16", "bf16-O2", "clip", "fuse-update", "recompute", "chunk", "fit-memory", "offload"],
)
def test_it_goes_with_other_passes(passes: list[Any]) -> None:
    x = batch()
    step, losses = trained([*passes, Everything], made("gelu", "silu", "tanh"), x)
    _, expected = trained(passes, made("gelu", "silu", "tanh"), x)
    torch.testing.assert_close(losses, expected, rtol=2e-3, atol=0)
    assert any(info(node).origin.startswith("compress-activations: ") for node in step.program.phase_nodes(*Phase))
    measured = graphopt.measure_peak(lambda: step(x))
    assert measured.allocated_peak_bytes == step.program.memory().allocated_peak_bytes


def test_a_drop_in_model_is_compressed_too() -> None:
    model, other = made("gelu", "relu"), made("gelu", "relu")
    dropped = graphopt.optimize(model, [Everything])
    for one in (dropped, other):
        squares(one, batch()).backward()
    found = away([p.grad for p in model.parameters()], [p.grad for p in other.parameters()])  # type: ignore[misc]
    assert 0 < found < 0.02


def test_a_run_goes_on_from_its_state_to_the_same_bits() -> None:
    x = batch()
    model = made("gelu", "gelu")
    step, _ = trained([Everything], model, x)
    before = copy.deepcopy(model.state_dict())
    state, stream = copy.deepcopy(step.state_dict()), torch.get_rng_state()
    expected = torch.stack([step(x) for _ in range(3)])
    again = made("gelu", "gelu")
    again.load_state_dict(before)
    other = graphopt.optimize_step(again, torch.optim.SGD(again.parameters(), lr=0.1), [Everything], loss=squares)
    other.prepare(x).load_state_dict(state)
    torch.set_rng_state(stream)
    assert torch.equal(torch.stack([other(x) for _ in range(3)]), expected)


# --- which values ----------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_what_decides_is_kept_as_it_is() -> None:
    step, _ = trained([Everything], made("max", "leaky_relu"), batch(), 1)
    lines = "\n".join(step.records[0].changed.lines)
    assert "stay as they are: leaky_relu_backward reads it" in lines
    quantized = [node.args[0] for node in step.program.phase_nodes(Phase.FORWARD) if schema.op_name(node) == "quantize"]
    readers = {schema.op_name(reader) for node in quantized for reader in node.users}  # type: ignore[union-attr]
    assert "leaky_relu_backward" not in readers


def test_statistics_masks_inputs_and_parameters_are_never_compressed() -> None:
    step, _ = trained([Everything], made("dropout", "gelu"), batch(), 1)
    for node in step.program.phase_nodes(Phase.FORWARD):
        if schema.op_name(node) == "quantize":
            root = schema.storage_root(node.args[0])  # type: ignore[arg-type]
            assert root.op == "call_function"
            assert not any(name.endswith(("native_layer_norm.1", "native_layer_norm.2")) for name in info(root).names)
            assert schema.op_name(root) not in ("dropout_mask", "t")


@pytest.mark.sweep
def test_the_zeros_of_relu_decide_as_before() -> None:
    """Gradients of the bias in front of a relu are zero for the same units."""
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH))
    with torch.no_grad():
        model[0].bias[:20] = -50.0  # type: ignore[index]
    found = gradients(model, [CompressActivations(4, 64, ("1",), 0)], batch(), 0)
    wanted = gradients(model, [], batch(), 0)
    assert torch.equal(found[1] == 0, wanted[1] == 0)
    assert bool((found[1][:20] == 0).all())
    assert torch.equal(found[1], wanted[1])  # it depends on the zeros alone
    assert not torch.equal(found[2], wanted[2])


def classes(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), torch.arange(len(x)) % 64)


def test_log_probabilities_wait_as_bytes_too_where_the_peak_is_as_low() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, 64))
    x = batch(2048)

    def step(*passes: Any) -> graphopt.TrainStep:
        made = copy.deepcopy(model)
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        return graphopt.optimize_step(made, optimizer, passes, loss=classes).prepare(x)

    plain, ours = step(), step(CompressActivations())
    assert "_log_softmax" in ours.records[0].changed.tensors[-1]
    assert ours.records[0].changed.lines[1:] == ()
    assert waiting_bytes(ours.program) < 0.3 * waiting_bytes(plain.program)
    assert "_log_softmax_backward_data reads its exponential, for which 4 bits are too few" in "\n".join(
        step(CompressActivations(4)).records[0].changed.lines
    )
    assert ours.program.memory().peak_bytes < plain.program.memory().peak_bytes


def test_the_value_with_which_backward_begins_stays_where_the_peak_would_rise_unless_it_is_named() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, 512))
    plain, _ = trained([], copy.deepcopy(model), batch(), 1)
    ours, _ = trained([Everything], copy.deepcopy(model), batch(), 1)
    named, _ = trained([CompressActivations(tensors=("2",), min_bytes=0)], copy.deepcopy(model), batch(), 1)
    assert "2" not in ours.records[0].changed.tensors
    assert named.records[0].changed.tensors == ("2",)
    plain_peak, peak, other = (step.program.memory().peak_bytes for step in (plain, ours, named))
    assert peak <= plain_peak < other
    assert "stay as they are: nothing would be gained" in "\n".join(ours.records[0].changed.lines)


@pytest.mark.sweep
def test_names_choose_and_small_values_stay() -> None:
    step, _ = trained([CompressActivations(tensors=("*.up",), min_bytes=0)], made("gelu", "gelu"), batch(), 1)
    assert step.records[0].changed.counts["values"] == 2
    assert all(".up" in name for name in step.records[0].changed.tensors)
    quiet, _ = trained([CompressActivations()], made("gelu"), batch(), 1)
    assert "nothing that waits for backward can be compressed" in quiet.records[0].changed.reason


def test_twice_changes_nothing_more() -> None:
    program = graphopt.capture(made("gelu"), (batch(),), loss=squares)
    graphopt.Pipeline([Everything]).run(program)
    (again,) = graphopt.Pipeline([Everything]).run(program)
    assert again.changed.reason == "values of this program are compressed already"


@pytest.mark.sweep(but=("tensors0-names no tensor",))
@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (("nowhere",), "names no tensor"),
        (("0.up",), "'0.up' cannot be compressed: leaky_relu_backward reads it"),
        (("*.up.weight",), "cannot be compressed: it is smaller than"),
        (("0.norm::native_layer_norm.1",), "cannot be compressed: native_layer_norm_backward reads it"),
    ],
)
def test_a_name_that_cannot_be_is_refused(tensors: tuple[str, ...], message: str) -> None:
    with pytest.raises(PassError) as caught:
        trained([CompressActivations(tensors=tensors, min_bytes=0, group=8)], made("leaky_relu"), batch(), 1)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "options", [{"bits": 2}, {"bits": True}, {"group": 100}, {"group": 0}, {"min_bytes": -1}, {"group": "many"}]
)
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises((ArgumentError, TypeError)) as caught:
        CompressActivations(**options)
    assert next(iter(options)) in str(caught.value)
