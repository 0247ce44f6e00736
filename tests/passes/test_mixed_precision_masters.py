"""Level O2 in a whole step: low-precision copies that follow float32 masters, and gradients that wait in 16 bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import graphopt
from examples.models import GPT, GPTConfig, next_token_loss
from graphopt.ir.node import Phase, info, value_of
from graphopt.passes import ClipGradients, FuseUpdate, MixedPrecision, Recompute
from graphopt.rewriting.precision.master_weights import COPIES
from tests.support.covering import covering

Batch = tuple[torch.Tensor, torch.Tensor]


def build(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = GPT(GPTConfig(vocab=32, context=8, d=16, layers=1, heads=2))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(32, (2, 2, 8), generator=generator)) for _ in range(count)]  # type: ignore[misc]


def whole_step(passes: list[graphopt.Pass]) -> tuple[nn.Module, torch.optim.Optimizer, graphopt.TrainStep]:
    model, optimizer = build()
    return model, optimizer, graphopt.optimize_step(model, optimizer, passes, loss=next_token_loss)


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def copies(step: graphopt.TrainStep) -> dict[str, torch.Tensor]:
    return {name.removeprefix(COPIES): step._store[name] for name in step.program.pass_state if name.startswith(COPIES)}


@pytest.mark.sweep(but=("float16-[ClipGradients(max_norm=0.5, max_value=None, norm_type=2.0, keep_norm=False)]",))
@covering(dtype=["float16", "bfloat16"], more=[[], [Recompute("blocks.*")], [ClipGradients(0.5)]])
def test_held_copies_train_to_the_same_bits_as_casts_at_every_step(dtype: str, more: list[graphopt.Pass]) -> None:
    """A drop-in model casts its parameters at every call; the whole step holds the copies."""
    model, _, step = whole_step([MixedPrecision(dtype, level="O2"), *more])
    plain, optimizer = build()
    dropped = graphopt.optimize(plain, [MixedPrecision(dtype, level="O2"), *more[:1] * (not _clips(more))])
    scaler = graphopt.scaler(dropped) if dtype == "float16" else None
    for x, y in batches(5):
        loss = next_token_loss(dropped, x, y)
        loss.backward()  # type: ignore[no-untyped-call]
        if scaler is not None and _clips(more):
            scaler.unscale_(optimizer)
        if _clips(more):
            nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        assert torch.equal(step(x, y), loss.detach())
    assert equal(model, plain)


def _clips(more: list[graphopt.Pass]) -> bool:
    return any(isinstance(item, ClipGradients) for item in more)


@pytest.mark.sweep
def test_model_and_optimizer_keep_float32_and_checkpoints_leave_the_copies_out() -> None:
    model, optimizer, step = whole_step([MixedPrecision(level="O2")])
    step(*batches(1)[0])
    held = [*model.state_dict().values(), *(v for s in optimizer.state.values() for v in s.values())]
    assert {tensor.dtype for tensor in held} == {torch.float32}
    assert {tensor.dtype for tensor in copies(step).values()} == {torch.bfloat16}
    assert step.state_dict()["held"] == {}
    for name, copy in copies(step).items():
        assert torch.equal(copy, model.get_parameter(name).bfloat16())
    assert not [name for name in copies(step) if ".ln_" in name or name.startswith("ln_")]


def load(model: nn.Module) -> None:
    model.load_state_dict(build(seed=7)[0].state_dict())


def write(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("blocks.0.fc.weight").mul_(0.5)


def replace(model: nn.Module) -> None:
    parameter = model.get_parameter("blocks.0.fc.weight")
    parameter.data = parameter.data * 0.5


@pytest.mark.sweep
@pytest.mark.parametrize("change", [load, write, replace])
def test_a_parameter_that_is_changed_from_outside_is_copied_again(change: Callable[[nn.Module], None]) -> None:
    first, second = batches(2)
    model, _, step = whole_step([MixedPrecision(level="O2")])
    step(*first)
    change(model)
    fresh, optimizer, other = whole_step([MixedPrecision(level="O2")])
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(step(*second), other(*second))
    del optimizer


@pytest.mark.sweep
def test_accumulation_and_a_second_shape_share_the_copies() -> None:
    model, _, step = whole_step([MixedPrecision(level="O2")])
    step.accumulate(2)
    for x, y in batches(4):
        step(x, y)
    held = {name: copy.data_ptr() for name, copy in copies(step).items()}
    step(*(part[:1] for part in batches(1)[0]))
    step(*(part[:1] for part in batches(1)[0]))
    assert {name: copy.data_ptr() for name, copy in copies(step).items()} == held
    for name, copy in copies(step).items():
        assert torch.equal(copy, model.get_parameter(name).bfloat16())


@pytest.mark.sweep
def test_frozen_parameters_are_held_too() -> None:
    model, optimizer = build()
    model.get_parameter("blocks.0.fc.weight").requires_grad_(False)
    step = graphopt.optimize_step(model, optimizer, [MixedPrecision(level="O2")], loss=next_token_loss)
    for batch in batches(3):
        step(*batch)
    frozen = model.get_parameter("blocks.0.fc.weight")
    assert torch.equal(copies(step)["blocks.0.fc.weight"], frozen.bfloat16())


def test_gradients_wait_for_the_update_in_low_precision() -> None:
    _, _, step = whole_step([MixedPrecision(level="O2")])
    step.prepare(*batches(1)[0])
    nodes = [node for node in step.program.graph.nodes if node.op == "call_function"]
    place = {node: index for index, node in enumerate(nodes)}
    update = next(node for node in nodes if "fused_adamw" in str(node.target))
    made = {node: source for node in update.all_input_nodes if node in place for source in node.all_input_nodes}
    late = [node for node, source in made.items() if getattr(value_of(source), "dtype", None) == torch.bfloat16]
    backward = max(place[n] for n in nodes if info(n).phase is Phase.BACKWARD and n not in made)
    assert len(late) == len(copies(step))
    assert all(place[node] > backward for node in late)


@pytest.mark.sweep
def test_a_step_with_fused_updates_renews_the_copies() -> None:
    model, _, step = whole_step([MixedPrecision(level="O2"), FuseUpdate()])
    for batch in batches(3):
        step(*batch)
    for name, copy in copies(step).items():
        assert torch.equal(copy, model.get_parameter(name).bfloat16())


@pytest.mark.sweep
def test_the_peak_with_copies_is_predicted() -> None:
    _, _, step = whole_step([MixedPrecision(level="O2")])
    x, y = batches(1)[0]
    for _ in range(2):
        step(x, y)
    measured = graphopt.measure_peak(lambda: step(x, y)).allocated_peak_bytes
    assert step.program.memory().allocated_peak_bytes == measured


def test_settings_of_a_scale_that_is_not_used_are_an_error() -> None:
    with pytest.raises(graphopt.GraphoptError, match="init_scale: bfloat16 is not scaled; give scale_loss=True"):
        MixedPrecision(init_scale=1024.0)
    assert MixedPrecision(scale_loss=True, init_scale=1024.0).scaling is not None
    assert MixedPrecision("float16", scale_loss=False).scaling is None
