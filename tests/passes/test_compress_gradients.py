"""CompressGradients: casts as torch's hooks make them, PowerSGD's factors, and what is kept between steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import graphopt
from graphopt import GraphoptError, PassError, Pipeline, PipelineError, Program
from graphopt.ir.node import info, value_of
from graphopt.ir.ops.communication import low_rank as powersgd
from graphopt.ir.ops.communication.collectives import ALL_REDUCE
from graphopt.ir.ops.values import storage_bytes
from graphopt.passes import ClipGradients, DataParallel, LocalSGD, ScaleLoss
from graphopt.passes.compress_gradients import CompressGradients
from graphopt.rewriting.distributed.sparse.low_rank_exchange import Factors, Settings, factors_of
from graphopt.rewriting.registry import find_pass
from graphopt.rewriting.text.spec import parse_passes
from graphopt.rewriting.training_pass import Clock
from tests.support.ranks import run_ranks

FACTORS = CompressGradients("powersgd", start_step=0)

# --- the ops ---------------------------------------------------------------------------------------------------------


def matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(st.integers(1, 9), st.integers(0, 20), st.integers(0, 99))
def test_orthonormal_columns_span_those_of_the_matrix(columns: int, more: int, seed: int) -> None:
    given_matrix = matrix(columns + more, columns, seed)
    found = powersgd.orthonormal(given_matrix)
    torch.testing.assert_close(found.T @ found, torch.eye(columns, dtype=torch.float64), atol=1e-9, rtol=0)
    torch.testing.assert_close(found @ (found.T @ given_matrix), given_matrix, atol=1e-9, rtol=0)


def test_columns_of_zeros_stay_zeros() -> None:
    assert torch.equal(powersgd.orthonormal(torch.zeros(4, 2)), torch.zeros(4, 2))
    assert not powersgd.orthonormal(torch.tensor([[0.0, 1], [0, 2], [0, 2]])).isnan().any()


@given(st.integers(1, 6), st.integers(0, 40), st.integers(0, 2**31 - 1))
def test_a_basis_of_nothing_is_a_function_of_shape_and_key(columns: int, more: int, key: int) -> None:
    state, empty = torch.get_rng_state(), torch.zeros(columns + more, columns, dtype=torch.float64)
    found = powersgd.warm_basis(empty, key)
    assert torch.equal(found, powersgd.warm_basis(empty.clone(), key))
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(found.T @ found, torch.eye(columns, dtype=torch.float64), atol=1e-6, rtol=0)
    if more > 1:
        assert not torch.equal(found, powersgd.warm_basis(empty, key + 1))


def test_a_kept_factor_is_the_basis_and_a_cold_one_differs_at_each_step() -> None:
    kept = matrix(7, 2)
    assert torch.equal(powersgd.warm_basis(kept, 3), powersgd.orthonormal(kept))
    one, other = (powersgd.cold_basis(matrix(5, 7), 2, 3, torch.tensor(step)) for step in (4, 5))
    assert one.shape == (7, 2)
    assert not torch.allclose(one, other)


def test_what_is_left_out_is_remembered_unless_it_must_not_be() -> None:
    error, m = torch.ones(2, 3), torch.full((2, 3), torch.nan)
    powersgd.remember_(error, m, m, torch.tensor(False))
    assert torch.equal(error, torch.ones(2, 3))
    powersgd.remember_(error, torch.full((2, 3), 3.0), torch.ones(2, 3, dtype=torch.bfloat16), torch.tensor(True))
    assert torch.equal(error, torch.full((2, 3), 2.0))


def test_the_ops_are_as_torch_wants_them() -> None:
    for op, args in (
        (powersgd.warm_basis, (torch.zeros(5, 2), 1)),
        (powersgd.cold_basis, (torch.zeros(4, 5), 2, 1, torch.tensor(3))),
        (powersgd.orthonormal, (torch.randn(6, 3),)),
        (powersgd.remember_, (torch.zeros(2, 3), torch.ones(2, 3), torch.ones(2, 3), torch.tensor(True))),
    ):
        torch.library.opcheck(op, args)
    with pytest.raises(GraphoptError, match="graphopt::orthonormal: it takes a matrix of float32 or float64"):
        powersgd.orthonormal(torch.ones(2, 3))
    with pytest.raises(GraphoptError, match="m must have the residual's shape"):
        powersgd.remember_(torch.ones(2, 3), torch.ones(3, 2), torch.ones(2, 3), torch.tensor(True))


# --- which gradients -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gradient", "settings", "expected"),
    [
        (torch.empty(100), Settings(), None),
        (torch.empty(5, 5), Settings(), Factors(5, 5, 1)),
        (torch.empty(4, 4), Settings(), None),  # (4 + 4) * 2 is no less than 4 * 4
        (torch.empty(4, 4), Settings(rate=1.9), Factors(4, 4, 1)),
        (torch.empty(64, 32), Settings(rank=2), Factors(64, 32, 2)),
        (torch.empty(8, 4, 3, 3), Settings(), Factors(8, 36, 1)),
        (torch.empty(8, 4, 3, 3).to(memory_format=torch.channels_last), Settings(), Factors(8, 36, 1)),
        (torch.empty(64, 32).t(), Settings(), Factors(64, 32, 1)),
        (torch.empty(2, 1000), Settings(rank=4), None),
        (torch.empty(0, 1000), Settings(), None),
    ],
)
def test_factors_have_to_be_few_enough(gradient: torch.Tensor, settings: Settings, expected: Factors | None) -> None:
    assert factors_of(gradient, settings) == expected


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        (("bf61",), {}, "how='bf61' is unknown; did you mean 'bf16'"),
        (("zip",), {}, "how='zip' is unknown; use 'bf16', 'fp16' or 'powersgd'"),
        (("bf16",), {"rank": 2, "seed": 1}, "rank, seed would mean nothing with 'bf16'; give how='powersgd'"),
        (("powersgd",), {"rank": 0, "start_step": -1}, "rank must be at least 1, not 0; start_step is a number"),
        (("powersgd",), {"min_compression_rate": 0}, "min_compression_rate must be above 0"),
        (("powersgd",), {"seed": -1}, "seed must be at least 0"),
    ],
)
def test_wrong_options_are_errors(args: tuple[str, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphoptError, match=message):
        CompressGradients(*args, **options)


def test_options_as_text() -> None:
    wanted = CompressGradients("powersgd", rank=2, start_step=10, warm_start=False)
    assert str(wanted) == "compress-gradients{how=powersgd rank=2 start-step=10 warm-start=false}"
    assert parse_passes(str(wanted), find_pass) == [wanted]


def test_dense_steps_come_first() -> None:
    late = CompressGradients("powersgd", start_step=3)
    assert [late.form(Clock(steps=number)) for number in range(5)] == ["dense"] * 3 + [""] * 2
    assert CompressGradients("fp16").form(Clock()) == ""


def test_combinations_that_make_no_sense_name_both_passes() -> None:
    with pytest.raises(PipelineError, match="'compress-gradients' needs 'data-parallel'"):
        Pipeline([CompressGradients()])
    with pytest.raises(PipelineError, match="'compress-gradients' and 'local-sgd' cannot be used together"):
        Pipeline([DataParallel(), CompressGradients(), LocalSGD()])


def test_gradients_are_clipped_behind_the_exchange_whatever_the_order() -> None:
    given_passes = [ClipGradients(1.0), FACTORS, ScaleLoss(), DataParallel()]
    assert [p.name for p in Pipeline(given_passes).of("step")] == [
        "data-parallel", "scale-loss", "compress-gradients", "clip-gradients",
    ]  # fmt: skip


# --- the program -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[None]:
    """A process group of four ranks of which only this one exists; its exchanges do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 48), nn.BatchNorm1d(48), nn.Linear(48, 4))


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def step_program(model: nn.Module, *passes: graphopt.Pass) -> tuple[Program, list[graphopt.PassRecord]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    dtype = next(model.parameters()).dtype
    program = graphopt.capture(model, (torch.randn(8, 32, dtype=dtype),), loss=mean_square, optimizer=optimizer)
    return program, Pipeline(passes).run(program)


def travelling(program: Program) -> dict[str, list[int]]:
    """The bytes of each all-reduce of gradients, by dtype, in order."""
    found: dict[str, list[int]] = {}
    for node in program.graph.find_nodes(op="call_function", target=ALL_REDUCE):
        found.setdefault(str(value_of(node).dtype), []).append(storage_bytes(value_of(node)))
    return found


@pytest.mark.sweep(but=("fp16-torch.float16",))
@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize(("how", "dtype"), [("bf16", "torch.bfloat16"), ("fp16", "torch.float16")])
def test_each_bucket_is_cast_and_cast_back(how: str, dtype: str) -> None:
    model, buckets = small(), DataParallel(bucket_mb=0.01, first_bucket_mb=0.001)
    plain, _ = step_program(model, buckets)
    program, (_, record) = step_program(model, buckets, CompressGradients(how))
    before, after = travelling(plain), travelling(program)
    assert after == {dtype: [size // 2 for size in before["torch.float32"]]}
    total = sum(before["torch.float32"])
    assert record.changed.counts == {"gradients compressed": 8, "all-reduces": len(before["torch.float32"])}
    assert record.changed.lines[0] == (
        f"8 gradients travel in {how}: {total / 1000:.1f} kB -> {total / 2000:.1f} kB per step and rank"
    )
    for name, parameter in model.named_parameters():
        assert value_of(program.names()[f"{name}~"]).dtype is parameter.dtype
    (again,) = Pipeline([DataParallel(), CompressGradients(how)]).run(program)[1:]
    assert again.changed.reason == "the gradients of this program are compressed already"


@pytest.mark.sweep
@pytest.mark.usefixtures("four_ranks")
def test_gradients_of_16_bits_are_left_alone_and_the_record_says_so() -> None:
    _, (_, record) = step_program(small().bfloat16(), DataParallel(), CompressGradients("bf16"))
    assert record.changed.reason == "the gradients travel in 16 bits already"
    mixed = nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 4).bfloat16())
    mixed.forward = lambda x: mixed[1](mixed[0](x).bfloat16())  # type: ignore[method-assign]
    program, (_, record) = step_program(mixed, DataParallel(), CompressGradients("bf16"))
    assert record.changed.lines[-1] == "left as they are, of 16 bits already: 1.bias, 1.weight"
    assert travelling(program) == {"torch.bfloat16": [72, 528]}


@pytest.mark.sweep
@pytest.mark.usefixtures("four_ranks")
def test_a_drop_in_model_casts_too_and_has_no_factors() -> None:
    model = graphopt.optimize(small(), [DataParallel(), CompressGradients()], example_inputs=(torch.randn(8, 32),))
    assert list(travelling(model.program)) == ["torch.bfloat16"]  # type: ignore[arg-type]
    with pytest.raises(PassError, match="'powersgd' keeps what is not sent from step to step"):
        graphopt.optimize(small(), [DataParallel(), FACTORS], example_inputs=(torch.randn(8, 32),))


@pytest.mark.usefixtures("four_ranks")
def test_factors_travel_together_and_the_record_lists_what_is_dense() -> None:
    program, (_, record) = step_program(small(), DataParallel(), CompressGradients("powersgd", rank=2, start_step=0))
    first, second, dense = 4 * 2 * (64 + 48), 4 * 2 * (32 + 64), 4 * (64 + 48 * 3 + 4 + 4 * 48)
    assert sorted(travelling(program)["torch.float32"]) == sorted([first, second, dense])
    assert record.changed.counts == {"gradients compressed": 2, "dense gradients": 6}
    assert record.changed.tensors == ("2.weight", "0.weight")
    summary, left = record.changed.lines[:2]
    assert summary.startswith("2 of 8 gradients travel as factors of rank 2: ")
    assert summary.endswith(f"-> {(first + second + dense) / 1000:.1f} kB per step and rank")
    assert left.startswith("dense, as their factors would have about as many elements: ")
    assert {spec.target for _, spec in program.inputs_of("pass_state")} == {
        f"compress-gradients/{what}/{name}.weight" for what in ("error", "q") for name in (0, 2)
    }
    assert "graphopt.remember_" in program.to_text()
    assert Program.from_json(program.to_json()).to_text() == program.to_text()
    (again,) = Pipeline([DataParallel(), FACTORS]).run(program)[1:]
    assert again.changed.reason == "the gradients of this program are compressed already"


@pytest.mark.sweep
@pytest.mark.usefixtures("four_ranks")
def test_first_factors_start_beside_backward() -> None:
    program, _ = step_program(small(), DataParallel(bucket_mb=0.01, first_bucket_mb=0.001), FACTORS)
    place = {node: index for index, node in enumerate(program.graph.nodes)}
    end = max(place[node] for node in program.phase_nodes(graphopt.Phase.BACKWARD))
    starts = [node for node in place if node.target is ALL_REDUCE]
    early = [info(node).origin for node in starts if place[node] < end]
    late = [info(node).origin for node in starts if place[node] > end]
    assert early.count("compress-gradients: first factors") == 2
    assert late == ["compress-gradients: first factors"] + ["compress-gradients: second factors"] * 3


@pytest.mark.usefixtures("four_ranks")
def test_without_feedback_and_warm_start_nothing_but_a_count_is_kept() -> None:
    bare = CompressGradients("powersgd", start_step=0, error_feedback=False, warm_start=False)
    program, _ = step_program(small().bfloat16(), DataParallel(), bare)
    assert [spec.target for _, spec in program.inputs_of("pass_state")] == ["compress-gradients/step"]


@pytest.mark.sweep
@pytest.mark.usefixtures("four_ranks")
def test_where_no_matrix_is_large_enough_nothing_changes() -> None:
    _, (_, record) = step_program(small(), DataParallel(), CompressGradients("powersgd", rank=40, start_step=0))
    assert record.changed.reason == "every gradient has about as few elements as its factors would have"


@pytest.mark.usefixtures("four_ranks")
def test_accumulated_gradients_are_compressed_once() -> None:
    model = small()
    step = graphopt.optimize_step(
        model, torch.optim.SGD(model.parameters(), lr=0.1), [DataParallel(), FACTORS], loss=mean_square
    ).accumulate(2)
    for _ in range(4):
        step(torch.randn(8, 32))
    counts = {name.partition(",")[0]: len(travelling(program)) for name, program in step.programs.items()}
    assert counts["begin"] == 0
    assert counts["update"] == 1


# --- several processes -----------------------------------------------------------------------------------------------

SCRIPT = """
import copy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook as hooks
import graphopt
from graphopt.passes import DataParallel, MixedPrecision
from graphopt.passes.compress_gradients import CompressGradients
from graphopt.runtime.state.state_dict import plain_state
from graphopt.runtime.state.state_dict import plain_state

def build(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 4)).to(dtype)

def loss(model, x, y):
    return nn.functional.mse_loss(model(x), y)

def batch(number, dtype=torch.float32, bad=()):
    generator = torch.Generator().manual_seed(100 * number + rank)
    x = torch.randn(8, 32, generator=generator)
    y = x[:, :4] * 2 - x[:, 4:8].sin()
    return (x * torch.inf if number in bad else x).to(dtype), y.to(dtype)

def sgd(model, lr=0.1, momentum=0.9):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, fused=True)

def copies(model):
    return [parameter.detach().clone() for parameter in model.parameters()]

def gathered(tensor):
    found = [torch.empty_like(tensor) for _ in range(world)]
    dist.all_gather(found, tensor.contiguous())
    return found

def same(tensors):
    mine, *others = gathered(torch.cat([tensor.detach().double().flatten() for tensor in tensors]))
    return all(torch.equal(mine, other) for other in others)

def off(one, other):
    return max(((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item() for a, b in zip(one, other))

class Run:
    def __init__(self, *passes, dtype=torch.float32, lr=0.1, momentum=0.9, bad=()):
        self.dtype, self.bad, self.done = dtype, bad, 0
        self.model = build(dtype)
        self.optimizer = sgd(self.model, lr, momentum)
        passes = [DataParallel(), *passes]
        self.step = graphopt.optimize_step(self.model, self.optimizer, passes, loss=loss, verify=False)
        self.losses, self.agreed = [], []

    def __call__(self, steps):
        for number in range(self.done, self.done + steps):
            self.losses.append(float(self.step(*batch(number, self.dtype, self.bad))))
            self.agreed.append(same(self.model.parameters()))
        self.done += steps
        return self

    @property
    def held(self):
        return plain_state(self.step.state_dict())["held"]

def theirs(state, hook, steps):
    model = build()
    parallel = nn.parallel.DistributedDataParallel(model)
    parallel.register_comm_hook(state, lambda state, bucket: hook(state, bucket))  # by name, bf16 is refused on a CPU
    optimizer = sgd(model)
    for number in range(steps):
        loss(parallel, *batch(number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return copies(model)

def drop_in(how, steps):
    model = build()
    parallel, optimizer = graphopt.optimize(model, [DataParallel(), CompressGradients(how)]), sgd(model)
    for number in range(steps):
        loss(parallel, *batch(number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return copies(model)

said = {}
for how, hook in (("bf16", default_hooks.bf16_compress_hook), ("fp16", default_hooks.fp16_compress_hook)):
    reference = theirs(None, hook, 8)
    said[how] = [off(copies(Run(CompressGradients(how))(8).model), reference), off(drop_in(how, 8), reference)]

# torch's hook, from the same first factors
COLUMNS = {"4.weight": 48, "2.weight": 64, "0.weight": 32}
for rank_of_factors in (1, 2, 3):
    def make():
        return hooks.PowerSGDState(None, matrix_approximation_rank=rank_of_factors, start_powerSGD_iter=2)
    reference = theirs(make(), hooks.powerSGD_hook, 12)
    run = Run(CompressGradients("powersgd", rank=rank_of_factors, start_step=2))
    run.step.prepare(*batch(0))
    state = run.step.state_dict()
    with torch.random.fork_rng():
        torch.manual_seed(make().rng.randint(1_000_000_000))
        for name, columns in COLUMNS.items():
            if f"compress-gradients/q/{name}" in state["held"]:
                state["held"][f"compress-gradients/q/{name}"] = torch.randn(1, columns, rank_of_factors)[0]
    run.step.load_state_dict(state)
    run(12)
    said[f"powersgd {rank_of_factors}"] = [off(copies(run.model), reference), all(run.agreed)]

# one step in float64: what is sent, and what is kept
run = Run(CompressGradients("powersgd", rank=2, start_step=1), dtype=torch.float64, lr=1.0, momentum=0.0)(3)
before, held = copies(run.model), run.held
loss(run.model, *batch(3, torch.float64)).backward()
gradients = [parameter.grad for parameter in run.model.parameters()]
run.optimizer.zero_grad()
run(1)
after, kept = copies(run.model), run.held
found = []
for name, place in (("0.weight", 0), ("2.weight", 2)):
    sent = before[place] - after[place]
    m = gradients[place] + held[f"compress-gradients/error/{name}"]
    mean = sum(gathered(m)) / world
    q, _ = torch.linalg.qr(held[f"compress-gradients/q/{name}"])
    p, _ = torch.linalg.qr(mean @ q)
    left = kept[f"compress-gradients/error/{name}"]
    found.append([
        int(torch.linalg.matrix_rank(sent, atol=1e-10)),
        (sent - p @ (mean.T @ p).T).abs().max().item(),
        (m - sent - left).abs().max().item(),
        m.abs().max().item(),
    ])
said["one step"] = found
said["dense"] = max(
    (before[i] - after[i] - sum(gathered(gradients[i])) / world).abs().max().item() for i in (1, 3, 4, 5)
)
said["kept"] = [
    same(kept[f"compress-gradients/{what}/{name}.weight"] for name in (0, 2)) for what in ("q", "error")
]

# convergence on something that can be learnt
losses = {
    name: sum(Run(*passes, lr=0.05, momentum=0.0)(100).losses[-20:]) / 20
    for name, passes in {
        "dense": (),
        "rank 1": (CompressGradients("powersgd", start_step=0),),
        "rank 1, cold": (CompressGradients("powersgd", start_step=0, warm_start=False),),
        "rank 1, no feedback": (CompressGradients("powersgd", start_step=0, error_feedback=False),),
    }.items()
}
said["losses"] = losses

# a resumed run
passes = [CompressGradients("powersgd", start_step=2)]
whole, second = Run(*passes)(5), Run(*passes)
second.model.load_state_dict(whole.model.state_dict())
second.optimizer.load_state_dict(copy.deepcopy(whole.optimizer.state_dict()))
second.step.load_state_dict(whole.step.state_dict())
second.done = 5
whole(4)
second(4)
said["resumed"] = all(torch.equal(a, b) for a, b in zip(copies(whole.model), copies(second.model)))

# gradients that are not finite, on one rank only
run = Run(CompressGradients("powersgd", start_step=0), bad={2} if rank else ())(2)
before = run.held
run(1)
same_held = all(torch.equal(before[name], tensor) for name, tensor in run.held.items())
said["not finite"] = [same_held, any(bool(p.isnan().any()) for p in run.model.parameters())]
scaled = Run(
    CompressGradients("powersgd", start_step=0), MixedPrecision(dtype="float16"), bad={2} if rank else ()
)(2)
before, parameters = scaled.held, copies(scaled.model)
scaled(1)
after = scaled.held
said["skipped"] = [
    all(torch.equal(before[name], after[name]) for name in after if name.startswith("compress-gradients")),
    all(torch.equal(a, b) for a, b in zip(copies(scaled.model), parameters)),
    float(before["loss-scale/scale"]) / float(after["loss-scale/scale"]),
    all(scaled(2).agreed), scaled.losses[-1] < float("inf"),
    all(bool(tensor.isfinite().all()) for tensor in scaled.held.values()),
]
say(said)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks said."""
    store: Path = tmp_path_factory.mktemp("ranks") / "store"
    return [found[0] for found in run_ranks(SCRIPT, 2, store)]


@pytest.mark.sweep
@pytest.mark.parametrize("how", ["bf16", "fp16"])
def test_casts_equal_torch_s_hook_to_the_last_bit(said: list[dict[str, Any]], how: str) -> None:
    assert [found[how] for found in said] == [[0.0, 0.0]] * 2


@pytest.mark.sweep
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_factors_train_as_torch_s_hook_does(said: list[dict[str, Any]], rank: int) -> None:
    """Parameters after 12 steps, 10 of them compressed, from the same first factors."""
    for found in said:
        difference, same = found[f"powersgd {rank}"]
        assert difference < 1e-4
        assert same


@pytest.mark.sweep
def test_what_is_sent_is_a_power_iteration_of_the_mean_and_the_rest_is_kept(said: list[dict[str, Any]]) -> None:
    for found in said:
        for rank, from_iteration, lost, largest in found["one step"]:
            assert rank == 2
            assert from_iteration < 1e-12 * max(1.0, largest)
            assert lost < 1e-12 * max(1.0, largest)
        assert found["dense"] < 1e-12
        assert found["kept"] == [True, False], "factors are the same on all ranks, residuals are not"


@pytest.mark.sweep
def test_training_converges_as_with_dense_exchange_thanks_to_feedback(said: list[dict[str, Any]]) -> None:
    losses = said[0]["losses"]
    assert losses["rank 1"] < 1.1 * losses["dense"]
    assert losses["rank 1, cold"] < 1.1 * losses["dense"]
    assert losses["rank 1, no feedback"] > 2 * losses["dense"]


@pytest.mark.sweep
def test_a_resumed_run_is_the_same_to_the_last_bit(said: list[dict[str, Any]]) -> None:
    assert all(found["resumed"] for found in said)


@pytest.mark.sweep
def test_what_is_not_finite_is_not_kept(said: list[dict[str, Any]]) -> None:
    """The update gets it, as from dense exchange."""
    assert [found["not finite"] for found in said] == [[True, True]] * 2


@pytest.mark.sweep
def test_under_loss_scaling_all_ranks_skip_and_keep_what_they_had(said: list[dict[str, Any]]) -> None:
    assert [found["skipped"] for found in said] == [[True, True, 2.0, True, True, True]] * 2
