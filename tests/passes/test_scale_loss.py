"""Loss scaling in a whole step: bad steps leave everything as it is, and all equal eager steps with a GradScaler."""

from __future__ import annotations

import copy
import io
import math
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt import GraphoptError, PassError, Phase, Pipeline, Program, TrainStep
from graphopt.ir.node import InputSpec, info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.updates.scale import FOUND_INF
from graphopt.passes import FitMemory, FuseUpdate, Offload, Recompute, ScaleLoss
from graphopt.rewriting.precision.scaling import GOOD, SCALE, SKIPPED, checked_gradients
from tests.support.covering import some_of
from tests.support.ranks import run_ranks
from tests.support.running import Compiler
from tests.support.scaling import NAMES, Fragile, batch, batches, eager, loss_of
from tests.support.training import (
    OPTIMIZERS,
    Blocks,
    MakeOptimizer,
    Net,
    Training,
    assert_same,
    captured,
    identical,
    mean_square,
    next_token,
)

MORE: dict[str, MakeOptimizer] = {
    **OPTIMIZERS,
    "dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, fused=True),
    "list momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, fused=True),
    "centered": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5, foreach=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, foreach=True),
    "tensor rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), fused=True),
    "one by one": lambda p: torch.optim.RMSprop(p, lr=0.01, foreach=False),
}
KINDS = some_of(MORE, "sgd", "adamw", "rmsprop", "list momentum", "amsgrad", "tensor rate", "one by one")
FAST = ScaleLoss(growth_interval=2)


def scale(step: TrainStep, target: str = SCALE) -> float:
    return float(step.state_dict()["held"][target])


def stepping(
    model: nn.Module, make: MakeOptimizer, run: list[Any], passes: Any = (FAST,), *, every: int = 1,
    loss: Any = loss_of, **options: Any,
) -> tuple[Training, list[float], TrainStep]:  # fmt: skip
    """Train with whole steps: what is left, the scale after each batch, the step."""
    optimizer, found, scales = make(model.parameters()), Training(), []
    step = graphopt.optimize_step(model, optimizer, passes, loss=loss, **options).accumulate(every)
    for number, inputs in enumerate(run):
        found.add(f"{number}.loss", step(*inputs))
        scales.append(scale(step))
    return found.end(model, optimizer), scales, step


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Copies of the parameters and of all optimizer state."""
    state = [value for entry in optimizer.state_dict()["state"].values() for value in entry.values()]
    tensors = [*model.parameters(), *(value for value in state if isinstance(value, torch.Tensor))]
    return [tensor.detach().clone() for tensor in tensors]


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_gradient_leaves_everything_as_it_is(kind: str) -> None:
    model = Fragile()
    optimizer = MORE[kind](model.parameters())
    step = graphopt.optimize_step(model, optimizer, [FAST], loss=loss_of)
    for number in range(2):
        step(*batch(number))
    for place in range(4):
        before, level = everything(model, optimizer), scale(step)
        step(*batch(9, [place]))
        after = everything(model, optimizer)
        assert len(before) == len(after)
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        assert scale(step) == level / 2
        assert scale(step, SKIPPED) == place + 1
    step(*batch(3))
    assert not torch.equal(everything(model, optimizer)[0], before[0])
    assert scale(step, SKIPPED) == 0


@pytest.mark.sweep(but=("adamw",))
@pytest.mark.parametrize("kind", KINDS)
def test_steps_equal_eager_ones(kind: str) -> None:
    run = batches("bbgggbggbbgggg")
    expected, scales = eager(Fragile(), MORE[kind], run, growth_interval=2)
    found, levels, step = stepping(Fragile(), MORE[kind], run)
    assert_same(expected, found, kind)
    assert levels == scales
    assert len(step._runner.captures.all()) == 1


def test_state_is_created_by_the_first_good_step() -> None:
    model = Fragile()
    optimizer = MORE["momentum"](model.parameters())
    step = graphopt.optimize_step(model, optimizer, [FAST], loss=loss_of)
    step(*batch(0, [1]))
    step(*batch(1, [0, 3]))
    assert not optimizer.state_dict()["state"]
    step(*batch(2))
    assert len(optimizer.state_dict()["state"]) == 4


@pytest.mark.sweep
@pytest.mark.parametrize(("kind", "every"), [("adamw", 2), ("rmsprop", 3), ("momentum", 3)])
def test_accumulation_unscales_once(kind: str, every: int) -> None:
    run = batches("bggggg ggbggg bbbggg gggggb".replace(" ", ""))
    expected, scales = eager(Fragile(), MORE[kind], run, every=every, growth_interval=2)
    found, levels, step = stepping(Fragile(), MORE[kind], run, every=every)
    assert_same(expected, found, kind)
    assert levels == scales
    kinds = {key[0]: variant.program for key, variant in step._latest().variants.items()}
    assert {kind: checked_gradients(program) is not None for kind, program in kinds.items()} == {
        "begin": False, **({"middle": False} if every > 2 else {}), "first update": True, "update": True,
    }  # fmt: skip


def test_scaled_gradients_are_unscaled_exactly() -> None:
    small = 1e-30
    plain, scaled = Fragile(), Fragile()
    make = MORE["sgd"]
    inputs = [(x * small, f) for x, f in batches("gggg")]
    one, _, _ = stepping_plain(plain, make, inputs)
    two, _, _ = stepping(scaled, make, inputs)
    assert_same(one, two, "small gradients")


def stepping_plain(model: nn.Module, make: MakeOptimizer, run: list[Any]) -> tuple[Training, None, TrainStep]:
    optimizer, found = make(model.parameters()), Training()
    step = graphopt.optimize_step(model, optimizer, loss=loss_of)
    for number, inputs in enumerate(run):
        found.add(f"{number}.loss", step(*inputs))
    return found.end(model, optimizer), None, step


# --- other passes, backends, models ----------------------------------------------------------------------------------

TOKENS = [(torch.randint(11, (4, 12), generator=torch.Generator().manual_seed(i)),) for i in range(4)]
TOGETHER = {
    "recompute": [FAST, Recompute("blocks.*")],
    "fit-memory": [FAST, FitMemory("90%", cost="roofline", time_limit=1.0)],
    "offload": [FAST, Recompute("blocks.*"), Offload(min_bytes=1)],
    "fuse-update": [FAST, FuseUpdate()],
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", list(TOGETHER))
def test_with_other_passes(name: str) -> None:
    torch.manual_seed(3)
    model = Blocks(layers=1)
    torch.manual_seed(1)
    expected, scales = eager(copy.deepcopy(model), MORE["sgd"], TOKENS, loss=next_token, growth_interval=2)
    torch.manual_seed(1)
    found, levels, step = stepping(copy.deepcopy(model), MORE["sgd"], TOKENS, TOGETHER[name], loss=next_token)
    assert_same(expected, found, name)
    assert levels == scales
    assert all(record.changed for record in step.records if record.name in ("scale-loss", "recompute", "fit-memory"))


def test_fuse_update_says_why_it_waits() -> None:
    _, _, step = stepping(Fragile(), MORE["adamw"], batches("g"), [FAST, FuseUpdate()])
    (record,) = [record for record in step.records if record.name == "fuse-update"]
    assert not record.changed
    assert "check_and_unscale_) depends on 4 gradients" in record.changed.reason


@pytest.mark.sweep
def test_behind_a_compiler() -> None:
    compiler = Compiler()
    expected, scales = eager(Fragile(), MORE["adam"], batches("ggbgg"), growth_interval=2)
    found, levels, _ = stepping(Fragile(), MORE["adam"], batches("ggbgg"), backend=compiler)
    assert_same(expected, found, "compiled")
    assert levels == scales


@pytest.mark.sweep
def test_with_sizes_that_vary() -> None:
    run = [(x[: 3 + number % 3], f) for number, (x, f) in enumerate(batches("gggbgg"))]
    shapes = {"x": {0: torch.export.Dim("rows", min=2, max=64)}, "factors": None}
    expected, _ = eager(Fragile(), MORE["adam"], run, growth_interval=2)
    found, _, step = stepping(Fragile(), MORE["adam"], run, dynamic_shapes=shapes)
    assert_same(expected, found, "varying sizes")
    assert len(step._runner.captures.all()) == 1


class Twice(nn.Module):
    """Two parameters with one gradient, and one whose gradient is broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4, 3))
        self.c = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.a + self.b).square().sum() + self.c.sum()


def test_gradients_in_one_memory() -> None:
    def own(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x)

    torch.manual_seed(0)
    model, run = Twice(), [(torch.randn(4, 3),) for _ in range(4)]
    expected, _ = eager(copy.deepcopy(model), MORE["momentum"], run, loss=own)
    found, _, step = stepping(copy.deepcopy(model), MORE["momentum"], run, loss=own)
    assert_same(expected, found, "shared gradients")
    checked = checked_gradients(step.program)
    assert checked is not None
    assert sorted(site.tensor for site in checked.sites) == ["a and b", "c"]


@pytest.mark.sweep
def test_a_loss_in_half_precision_overflows_as_in_torch() -> None:
    def half(model: nn.Module, x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        return loss_of(model, x, factors).half()

    expected, scales = eager(Fragile(), MORE["adam"], batches("gggggg"), loss=half, growth_interval=2)
    found, levels, _ = stepping(Fragile(), MORE["adam"], batches("gggggg"), loss=half)
    assert_same(expected, found, "half loss")
    assert levels == scales
    assert levels[0] == 32768.0  # 65536 is infinite in float16


@pytest.mark.sweep
def test_under_autocast() -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return mean_square(model, x).float()

    torch.manual_seed(0)
    model = Net(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    run = [(torch.randn(6, 8) * (1e5 if number == 3 else 1.0),) for number in range(12)]
    expected, scales = eager(copy.deepcopy(model), MORE["adamw"], run, loss=loss, growth_interval=2)
    found, levels, _ = stepping(copy.deepcopy(model), MORE["adamw"], run, loss=loss)
    assert_same(expected, found, "autocast")
    assert levels == scales
    assert min(levels) < max(levels)


@pytest.mark.sweep
def test_half_precision_parameters() -> None:
    model = Fragile().half()
    run = [(x.half(), f.half()) for x, f in batches("gggg")]
    _, levels, step = stepping(model, MORE["list momentum"], run)
    assert all(p.dtype is torch.float16 and p.isfinite().all() for p in model.parameters())
    assert levels[-1] >= 16384.0
    assert step.program.outputs_of("loss")


@pytest.mark.sweep(but=("1",))
@pytest.mark.parametrize("every", [1, 2])
def test_gradients_of_inputs_are_unscaled(every: int) -> None:
    found = []
    for passes in ([], [FAST]):
        model = Fragile()
        optimizer = MORE["sgd"](model.parameters())
        step = graphopt.optimize_step(model, optimizer, passes, loss=loss_of).accumulate(every)
        inputs = []
        for number in range(4):
            x, factors = batch(number)
            step(x.requires_grad_(), factors)
            inputs.append(x.grad)
        found.append(inputs)
    assert all(identical(one, other) for one, other in zip(*found, strict=True))


RANKS = """
from graphopt import optimize, optimize_step, scaler
from graphopt.passes import ClipGradients, DataParallel, ScaleLoss
from tests.support.scaling import Fragile, batch, loss_of
from tests.support.training import OPTIMIZERS

scaling, clip = ScaleLoss(growth_interval=2), torch.nn.utils.clip_grad_norm_
run = [batch(10 * n + rank, (2,) if (n == 2 and rank == 1) else ()) for n in range(5)]
results = []
for mode in ("eager", "step", "drop-in"):
    model = Fragile()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    scales = []
    if mode == "step":
        step = optimize_step(model, optimizer, [ClipGradients(0.05), scaling, DataParallel()], loss=loss_of)
        for inputs in run:
            step(*inputs)
            scales.append(float(step.state_dict()["held"]["loss-scale/scale"]))
        assert "memory of its own" not in step.program.to_text()
    else:
        optimizer._step_supports_amp_scaling = False
        used = optimize(model, [scaling, DataParallel()]) if mode == "drop-in" else model
        amp = scaler(used) if mode == "drop-in" else torch.amp.GradScaler("cpu", growth_interval=2)
        for inputs in run:
            optimizer.zero_grad()
            amp.scale(loss_of(used, *inputs)).backward()
            for parameter in model.parameters() if mode == "eager" else ():
                parameter.grad.mul_(0.5)
                dist.all_reduce(parameter.grad)
            amp.unscale_(optimizer)
            clip(model.parameters(), 0.05)
            amp.step(optimizer)
            amp.update()
            scales.append(amp.get_scale())
    results.append([*(p.detach() for p in model.parameters()), torch.tensor(scales)])
say([all(torch.equal(a, b) for a, b in zip(results[0], result)) for result in results])
say(scales)
"""


def test_ranks_skip_together(tmp_path: Path) -> None:
    found = run_ranks(RANKS, 2, tmp_path / "store")
    assert found == [[[True] * 3, [65536.0, 131072.0, 65536.0, 65536.0, 131072.0]]] * 2


# --- limits and state ------------------------------------------------------------------------------------------------


def test_too_many_skipped_steps_name_the_gradient() -> None:
    model = Fragile()
    step = graphopt.optimize_step(model, MORE["adamw"](model.parameters()), [ScaleLoss(max_skipped=3)], loss=loss_of)
    for number in range(2):
        step(*batch(number, [1, 2]))
    step(*batch(2))
    for number in range(2):
        step(*batch(number, [1, 2]))
    with pytest.raises(GraphoptError) as caught:
        step(*batch(5, [1, 2]))
    text = str(caught.value)
    assert text.startswith(
        "3 steps in a row were skipped because gradients are not finite, and the loss scale is 2048 now"
    )
    assert (
        "the first of 2 gradients that are not finite (of 4, in the order of backward) is that of second.weight" in text
    )
    assert "scaling.py:" in text
    with pytest.raises(GraphoptError, match=r"(?s)4 steps in a row .* the one gradient .* is that of first\.weight"):
        step(*batch(6, [0]))


def test_the_gradient_is_named_with_its_module() -> None:
    model = Net(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    step = graphopt.optimize_step(model, MORE["sgd"](model.parameters()), "scale-loss{max-skipped=1}", loss=mean_square)
    place = r"is that of net\.2\.bias \(module net\.2, .*training\.py:\d+ in forward\)"
    with pytest.raises(GraphoptError, match=place):
        step(torch.full((2, 3), math.nan))


def test_no_limit() -> None:
    model = Fragile()
    step = graphopt.optimize_step(model, MORE["sgd"](model.parameters()), [ScaleLoss(max_skipped=None)], loss=loss_of)
    for number in range(60):
        step(*batch(number, [3]))
    assert scale(step, SKIPPED) == 60
    assert scale(step) == 2.0**-44


@pytest.mark.sweep
def test_state_continues_elsewhere() -> None:
    run = batches("ggbgggbggg")
    expected, scales, _ = stepping(Fragile(), MORE["adam"], run)
    for captured_before in (False, True):
        model = Fragile()
        optimizer = MORE["adam"](model.parameters())
        step = graphopt.optimize_step(model, optimizer, [FAST], loss=loss_of)
        for inputs in run[:5]:
            step(*inputs)
        saved = io.BytesIO()
        torch.save({"step": step.state_dict(), "model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
        saved.seek(0)
        state = torch.load(saved, weights_only=True)
        other = Fragile()
        again = MORE["adam"](other.parameters())
        resumed = graphopt.optimize_step(other, again, [FAST], loss=loss_of)
        if captured_before:
            for inputs in run[:3]:
                resumed(*inputs)
        other.load_state_dict(state["model"])
        again.load_state_dict(state["optimizer"])
        resumed.load_state_dict(state["step"])
        assert scale(resumed) == scales[4]
        levels = []
        for inputs in run[5:]:
            resumed(*inputs)
            levels.append(scale(resumed))
        assert levels == scales[5:]
        found = Training().end(other, again)
        assert all(identical(tensor, expected.tensors[name]) for name, tensor in found.tensors.items())


def test_the_scale_is_one_for_all_signatures() -> None:
    model = Fragile()
    step = graphopt.optimize_step(model, MORE["adam"](model.parameters()), [ScaleLoss(growth_interval=4)], loss=loss_of)
    x, factors = batch(0)
    for rows in (5, 4, 5, 4):
        step(x[:rows], factors)
    assert len(step._runner.captures.all()) == 2
    assert (scale(step), scale(step, GOOD)) == (131072.0, 0.0)
    model.first.weight.requires_grad_(False)  # another set of gradients
    step(x, torch.tensor([1.0, 1.0, 1.0, math.inf]))
    assert scale(step) == 65536.0


# --- the program -----------------------------------------------------------------------------------------------------


def update_ops(program: Program) -> list[str]:
    return [schema.op_name(n) for n in program.phase_nodes(Phase.UPDATE) if n.target is not operator.getitem]


def test_what_the_program_is() -> None:
    _, _, step = stepping(Fragile(), MORE["adamw"], batches("gg"))
    program = step.program
    assert update_ops(program) == [
        "_foreach_add_", "zero_", "_to_copy", "reciprocal", "_to_copy", "check_and_unscale_", "amax", "_fused_adamw_",
        "_foreach_sub_", "update_scale_",
    ]  # fmt: skip
    found = program.find(FOUND_INF)[FOUND_INF]
    assert value_of(found).shape == ()
    assert {schema.op_name(user) for user in found.users} == {"_fused_adamw_", "_foreach_sub_", "update_scale_"}
    assert program.inputs.count(InputSpec("pass_state", SCALE)) == 1
    scaled = program.find("loss~")["loss~"].users
    assert [schema.op_name(user) for user in scaled] == ["mul"]
    assert not [op for op in update_ops(program) if op in ("item", "_local_scalar_dense", "is_nonzero", "nonzero")]
    checked = checked_gradients(program)
    assert checked is not None
    assert {site.tensor for site in checked.sites} == set(NAMES)


@pytest.mark.sweep
def test_the_program_survives_a_file() -> None:
    _, _, step = stepping(Fragile(), MORE["rmsprop"], batches("gg"))
    again = Program.from_json(step.program.to_json())
    assert again.pass_state == step.program.pass_state
    assert again.inputs == step.program.inputs
    assert again.to_text() == step.program.to_text()


def kept(kind: str) -> Iterator[int]:
    _, _, step = stepping(Fragile(), MORE[kind], batches("gg"))
    for record in step.records:
        yield from (count for what, count in record.changed.counts.items() if "kept" in what)


@pytest.mark.sweep
def test_only_what_no_fused_op_skips_is_kept() -> None:
    assert [list(kept(kind)) for kind in ("momentum", "adagrad")] == [[]] * 2
    assert list(kept("rmsprop")) == [12]


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["adamw", "momentum", "rmsprop"])
def test_predicted_and_measured_peak(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    step = graphopt.optimize_step(model, MORE[kind](model.parameters()), [FAST], loss=mean_square)
    x = torch.randn(16, 64)
    for _ in range(2):
        step(x)
    measured = graphopt.measure_peak(lambda: step(x)).allocated_peak_bytes
    predicted = step.program.memory()
    assert abs(measured - predicted.allocated_peak_bytes) <= 16
    assert predicted.categories["pass state"] == 4 * 4 + 4 * 4


def test_scaling_twice_is_refused() -> None:
    program = captured(Fragile(), *batch(0), loss=loss_of)
    Pipeline([FAST]).run(program, last=False)
    with pytest.raises(PassError, match="scale-loss: the loss is scaled already; leave one of the passes"):
        Pipeline([FAST]).run(program, last=False)
    _, _, step = stepping(Fragile(), MORE["sgd"], batches("gg"))
    with pytest.raises(PassError, match="the gradients are checked already"):
        Pipeline([FAST]).run(step.program)


def test_a_step_without_a_scaled_backward_is_refused() -> None:
    model = Fragile()
    program = graphopt.capture(model, batch(0), loss=loss_of, optimizer=MORE["sgd"](model.parameters()))
    with pytest.raises(PassError, match="this step program's backward is not scaled"):
        Pipeline([FAST]).run(program)


@pytest.mark.sweep
def test_provenance() -> None:
    _, _, step = stepping(Fragile(), MORE["rmsprop"], batches("gg"))
    origins = {info(node).origin for node in step.program.nodes if info_of(node) and "scale-loss" in info(node).origin}
    assert origins == {
        "scale-loss: scaled", "scale-loss: unscale", "scale-loss: check", "scale-loss: kept for a skipped step",
        "scale-loss: a skipped step", "scale-loss: update of the scale",
    }  # fmt: skip


def info_of(node: Any) -> bool:
    return node.op != "output"


def run_to_the_end(step: TrainStep, inputs: tuple[torch.Tensor, ...], steps: int) -> None:
    """Step, each time until the device is done, without a call that waits for it."""
    for _ in range(steps):
        step(*inputs)
        end = torch.cuda.Event()
        end.record()
        while not end.query():
            pass


@pytest.mark.gpu
def test_on_a_gpu_the_error_comes_without_waiting() -> None:
    model = Fragile().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = graphopt.optimize_step(model, optimizer, [ScaleLoss(max_skipped=4)], loss=loss_of)
    good, bad = (tuple(tensor.cuda() for tensor in batch(0, places)) for places in ([], [1]))
    run_to_the_end(step, good, 2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(GraphoptError, match=r"that of first\.bias"):
            run_to_the_end(step, bad, 64)
    finally:
        torch.cuda.set_sync_debug_mode("default")
