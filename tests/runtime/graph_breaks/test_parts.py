"""Models that are not one graph: captured in parts, with eager mode's bits, under one budget."""

from __future__ import annotations

import copy
import gc
import logging
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import graphopt
from graphopt import CaptureError, Changed, GraphoptError, Pass, Program, TrainingPass
from graphopt.passes import ContiguousCheckpoints, FitMemory, MixedPrecision, Offload, Recompute
from graphopt.planning import Problem
from tests.support.fitting import searches_counted
from tests.support.properties import examples

pytestmark = pytest.mark.filterwarnings("ignore")
"""Dynamo's own code warns, and hides it in a way that does not work where warnings are errors."""


class Layer(nn.Module):
    """A residual layer; its input is used twice, and by a cast that changes nothing."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.drop = (
            nn.LayerNorm(d),
            nn.Linear(d, 4 * d),
            nn.Linear(4 * d, d),
            nn.Dropout(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = x.to(torch.float32)
        return low + self.drop(self.down(F.gelu(self.up(self.norm(low))))) * x.sigmoid()


class Skipping(nn.Module):
    """Leaves out layers by chance, as LayerDrop does; the first result is used by all that follow."""

    def __init__(self, layers: int = 3, d: int = 8, drop: float = 0.3) -> None:
        super().__init__()
        self.layers, self.head, self.p = nn.ModuleList(Layer(d) for _ in range(layers)), nn.Linear(d, 3), drop
        self.register_buffer("scale", torch.full((d,), 1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = x * self.scale
        for layer in self.layers:
            if self.training and torch.rand([]) < self.p:
                continue
            x = layer(x) + first
        return self.head(x)


class Routed(nn.Module):
    """Sends each row through one of two experts, chosen by values; the experts get as many rows as there are."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(d, 2), nn.ModuleList(nn.Linear(d, d) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.router(x)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (scores.argmax(-1) == number).nonzero().flatten()
            result = result.index_add(0, rows, expert(x[rows]) * scores[rows, number, None])
        return x + result


class Clamp(torch.autograd.Function):
    """Passes on less of a gradient than there is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient.clamp(-0.01, 0.01) * torch.tensor(0.5) * (x > 0)


class Checked(nn.Module):
    """Looks at values between two layers, writes a buffer, and has a backward of its own."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(d, d), nn.BatchNorm1d(d), nn.Linear(d, d)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        x = Clamp.apply(self.norm(self.first(x)))
        large = x.abs().max().item() > 1
        return {"y": self.last(x / 2 if large else x), "large": large, "x": x}


class Keeping(nn.Module):
    """Keeps what it computed last in an attribute, and uses it at the next call."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.layer = nn.Linear(d, d)
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x if self.last is None else x + self.last)
        self.last = x.detach()
        return x


MODELS: dict[str, Callable[[], nn.Module]] = {
    "skipping": Skipping, "routed": Routed, "checked": Checked, "keeping": Keeping,
}  # fmt: skip


def value_of_output(result: Any) -> torch.Tensor:
    if isinstance(result, dict):
        return result["y"].square().mean() + result["x"].square().sum() * 0.01
    return result.square().mean()


def trained(model: nn.Module, batches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Losses, gradients, parameters and buffers over some steps, and the random stream behind them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(3)
    found: dict[str, torch.Tensor] = {}
    for number, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = value_of_output(model(batch))
        loss.backward()
        found[f"{number}.loss"] = loss.detach()
        found |= {f"{number}.{n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return found | {n: t.clone() for n, t in model.state_dict().items()} | {"generator": torch.get_rng_state()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == []


def batches(count: int, rows: int = 16, d: int = 8) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(rows, d) for _ in range(count)]


@pytest.mark.sweep(but=("none-keeping",))
@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize(
    "passes",
    [[], [Recompute("auto")], [FitMemory("100%", cost="roofline")], [Offload(tier="disk", min_bytes=1)]],
    ids=["none", "recompute", "fit", "offload"],
)
def test_training_equals_eager_training(name: str, passes: list[Pass]) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    expected = trained(copy.deepcopy(model), batches(5))
    optimized = graphopt.optimize(model, passes)
    assert_equal(trained(optimized, batches(5)), expected)
    assert bool(optimized.programs) == (name != "routed")  # whose loop Dynamo does not cut
    first, *records = optimized.records
    assert first.changed.counts["parts with a program"] == len(optimized.programs)
    assert [record.name for record in records] == [current.name for current in passes] * len(optimized.programs)


@pytest.mark.sweep
@examples(3)
@given(st.integers(0, 2**20), st.integers(1, 4), st.floats(0, 0.9), st.booleans())
def test_any_choice_of_layers_and_sizes(seed: int, layers: int, drop: float, transposed: bool) -> None:
    """Layers in any order and number, inputs of several shapes and strides."""
    torch.manual_seed(seed)
    model = Skipping(layers, drop=drop)
    given = [*batches(2), *batches(2, rows=5)]
    given = [batch.t().contiguous().t() for batch in given] if transposed else given
    expected = trained(copy.deepcopy(model), given)
    assert_equal(trained(graphopt.optimize(model), given), expected)


@pytest.mark.sweep
def test_why_it_is_in_parts_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = graphopt.optimize(Checked())
    with caplog.at_level(logging.WARNING, "graphopt"):
        trained(model, batches(3))
    (text,) = [record.getMessage() for record in caplog.records if record.name.startswith("graphopt")]
    assert "Checked runs in parts, 2 so far, with eager code between them whose bytes are not counted" in text
    assert "test_parts.py" in text
    assert "Python needs the value of a tensor here" in text
    assert model.records[0].changed.lines[0] in text
    assert model.records[0].changed.lines[1] == "eager code between them whose bytes are not counted"
    with pytest.raises(GraphoptError, match=r"Checked runs in parts.*\.programs has those of its parts"):
        _ = model.program


@pytest.mark.sweep
def test_each_call_that_captures_parts_is_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x)
            return self.second(hidden * 2 if hidden.sum() > 0 else -hidden)

    model = graphopt.optimize(Two())
    with caplog.at_level(logging.INFO, logger="graphopt.capture"):
        for rows in (2, 2, 3):
            model(torch.ones(rows, 4)).sum().backward()
    lines = [record.getMessage() for record in caplog.records if record.name == "graphopt.capture"]
    assert len(lines) in (1, 2)  # whether another number of rows is another capture is Dynamo's choice
    assert lines[0].startswith("Two: 2 parts captured, largest peak of a part ")
    assert " B predicted, no passes, " in lines[0]


@pytest.mark.sweep
def test_example_inputs_capture_nothing_of_a_model_in_parts(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    base, (batch,) = Checked(), batches(1)
    with caplog.at_level(logging.WARNING, "graphopt"):
        model = graphopt.optimize(copy.deepcopy(base), example_inputs=(batch,))
    assert model.programs == ()
    assert "Checked will run in parts, which are captured at its first call" in caplog.text
    assert_equal(trained(model, [batch]), trained(base, [batch]))
    assert len(model.programs) == 2


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["skipping", "checked"])
def test_numbers_of_parts_are_verified(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    expected = trained(copy.deepcopy(model), batches(2))
    optimized = graphopt.optimize(model, [FitMemory("100%", cost="roofline")], verify="numerics")
    assert_equal(trained(optimized, batches(2)), expected)
    assert optimized.programs


@pytest.mark.sweep
def test_nothing_of_torchs_own_advice_is_logged() -> None:
    program = textwrap.dedent("""
        import random, torch, graphopt
        class Looking(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer, self.drop = torch.nn.Linear(4, 4), 0.0
            def forward(self, x):
                x = self.layer(x)
                if random.random() < self.drop:
                    return x
                return x * 2 if x.abs().max().item() > 1e9 else self.layer(x)
        model = graphopt.optimize(Looking())
        model(torch.ones(3, 4)).sum().backward()
        print(len(model.programs))
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    parts = int(done.stdout)
    assert parts >= 2
    ours = (
        "graphopt: warning: Looking runs in parts",
        f"graphopt: Looking: {parts} parts captured",
        "graphopt: capturing Looking",
    )
    assert [line for line in done.stderr.splitlines() if not line.startswith(ours)] == []


def test_a_whole_model_is_one_part() -> None:
    model = graphopt.optimize(nn.Linear(8, 2))
    model(batches(1)[0]).sum().backward()
    assert model.programs == (model.program,)


def test_tensors_keep_their_names() -> None:
    model = graphopt.optimize(Skipping(drop=0.0))
    trained(model, batches(1))
    names = {name for part in model.programs for name in part.names()}
    assert {"layers.0.up.weight", "layers.0.norm::native_layer_norm", "layers.0.up::addmm"} <= names


class Looking(nn.Module):
    """Blocks, with a look at values between them."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(16) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        if x.detach().abs().max() > 1e9:
            return x
        return self.blocks[1](x)


def peak(model: nn.Module, batch: torch.Tensor) -> int:
    """The most bytes above what is there, in a step whose gradients are made anew."""

    def step() -> None:
        model(batch).square().mean().backward()

    step()
    model.zero_grad()
    return graphopt.measure_peak(step).allocated_peak_bytes


@pytest.fixture
def searched() -> Iterator[list[Problem]]:
    """The problems that are searched."""
    with searches_counted() as searched:
        yield searched


def test_one_budget_covers_all_parts(searched: list[Problem]) -> None:
    torch.manual_seed(0)
    base, batch = Looking(), torch.randn(64, 16)
    highest = peak(graphopt.optimize(copy.deepcopy(base)), batch)
    resident = sum(t.nbytes for t in (*base.parameters(), *base.buffers(), batch))
    budget = resident + int(0.77 * highest)
    model = graphopt.optimize(copy.deepcopy(base), [FitMemory(budget, cost="roofline")])
    reached = peak(model, batch)
    assert reached < 0.8 * highest
    assert resident + reached <= budget + 2 * batch.nbytes  # eager code between parts, and the loss
    assert len(model.programs) == 2
    assert len(searched) == 2  # one for each part, whatever share it gets
    losses = []
    for one in (model, base):
        torch.manual_seed(1)
        losses.append(one(batch).sum())
    assert torch.equal(*losses)


@pytest.mark.sweep
def test_the_first_step_is_within_the_budget_as_well() -> None:
    torch.manual_seed(0)
    base, batch = Looking(), torch.randn(64, 16)
    highest = peak(graphopt.optimize(copy.deepcopy(base)), batch)
    resident = sum(t.nbytes for t in (*base.parameters(), *base.buffers(), batch))
    model = graphopt.optimize(copy.deepcopy(base), [FitMemory(resident + int(0.77 * highest), cost="roofline")])
    loss = model(batch).square().mean()  # parts are captured, and planned behind them
    assert graphopt.measure_peak(loss.backward).allocated_peak_bytes <= 0.77 * highest


@pytest.mark.sweep
def test_no_activation_of_the_first_call_stays_alive() -> None:
    model, batch = graphopt.optimize(Looking()), torch.randn(67, 16)  # a shape of no other test
    model(batch).sum().backward()
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor and thing.shape == batch.shape]
    assert [tensor for tensor in tensors if tensor is not batch and tensor.untyped_storage().nbytes()] == []


@pytest.mark.sweep
def test_a_budget_that_the_parts_do_not_meet_is_refused_with_the_smallest_peak() -> None:
    model = graphopt.optimize(Looking(), [FitMemory(9_000, cost="roofline")])
    with pytest.raises(
        GraphoptError, match=r"no plan fits into 9.0 kB .*: in 2 parts the model's smallest peak is \d+"
    ):
        model(torch.randn(64, 16))


class Prepared(TrainingPass):
    """A pass that acts between steps, although its class says that it rewrites parts."""

    name, stage, in_parts = "prepared", "joint", True

    def apply(self, program: Program) -> Changed:
        del program
        return Changed()

    def prepare(self, model: nn.Module) -> None:
        del model


class Choosing(nn.Module):
    """Looks at a text behind a cut, so that torch makes a graph for each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
        x = self.first(x)
        if x.detach().abs().max() > 1e9:
            return x
        return self.second(x) * len(name)


@pytest.mark.sweep
def test_more_graphs_than_are_made_end_where_a_budget_would_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphopt._torch.MOST_GRAPHS", 3)
    base = Looking()
    model = graphopt.optimize(copy.deepcopy(base), [FitMemory("100%", cost="roofline")])
    for rows in (4, 5, 6):
        model(torch.randn(rows, 16)).sum().backward()
    with pytest.raises(CaptureError, match=r"has had 3 graphs.*\n  limit: fit-memory.* would not hold"):
        model(torch.randn(7, 16))
    batch = torch.randn(5, 16)
    found = []
    for one in (model, base):
        torch.manual_seed(1)
        found.append(one(batch))
    assert torch.equal(*found)


def test_more_graphs_of_torchs_than_are_made_end_where_a_budget_would_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphopt._torch.MOST_GRAPHS", 2)
    model = graphopt.optimize(Choosing(), [FitMemory("100%", cost="roofline")])
    x = torch.ones(7, 16)
    for name in ("a", "bb"):
        model(x, name).sum().backward()
    with pytest.raises(CaptureError, match=r"has had 2 graphs.*\n  limit: fit-memory.* would not hold"):
        model(x, "ccc")
    model(x, "a").sum().backward()


@pytest.mark.parametrize("what", ["programs", "graphs"])
def test_going_over_to_eager_mode_is_said_in_the_call_that_does_and_counted(
    what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a graph has had as many programs as are made, and where torch makes no more graphs."""
    monkeypatch.setattr(
        "graphopt._torch.MOST_GRAPHS" if what == "programs" else "graphopt._torch.compilers.dynamo.MOST_GRAPHS", 2
    )
    base = Choosing()
    model = graphopt.optimize(copy.deepcopy(base))
    said = []
    for number in range(1, 6):
        x, name = (torch.ones(6 + number, 16), "a") if what == "programs" else (torch.ones(7, 16), "a" * number)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "graphopt"):
            assert torch.equal(model(x, name), base(x, name))
        said.append("in eager mode from now on" in caplog.text)
    assert said == [False, False, True, False, False]
    lines = [line for line in model.records[0].changed.lines if "since" in line]
    assert any("3 calls run in eager mode" in line for line in lines), lines
    assert len(model.programs) == (4 if what == "programs" else 3)


@pytest.mark.sweep(cases=("passes0-mixed-precision",))
@pytest.mark.parametrize(
    ("passes", "named"),
    [
        ([MixedPrecision()], "mixed-precision"),
        ([Recompute("auto"), ContiguousCheckpoints()], "contiguous-checkpoints"),
        ([Prepared()], "prepared"),
    ],
)
def test_passes_that_act_on_more_than_a_part_are_refused(passes: list[Pass], named: str) -> None:
    model = graphopt.optimize(Checked(), passes)
    with pytest.raises(CaptureError, match=f"(?s)where: .*test_parts.*in parts: {named}.* cannot be applied"):
        model(batches(1)[0])


def test_numbers_that_forward_reads_from_tensors_and_returns(caplog: pytest.LogCaptureFixture) -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, float]:
            y = self.layer(x)
            return y, y.mean().item()

    model = Reading()
    optimized = graphopt.optimize(copy.deepcopy(model))
    for scale in (1.0, 2.0):
        (y, number), (expected, wanted) = optimized(torch.ones(3, 4) * scale), model(torch.ones(3, 4) * scale)
        assert torch.equal(y, expected)
        assert number == wanted
    assert "the result holds a number that is read from a tensor (.item())" in caplog.text


def test_a_whole_step_names_the_way_out() -> None:
    model = Checked()
    step = graphopt.optimize_step(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda m, x: m(x)["y"].mean()
    )
    with pytest.raises(CaptureError, match=r"graphopt\.optimize captures such a model in parts"):
        step(batches(1)[0])


def test_errors_of_the_model_are_its_own() -> None:
    torch.manual_seed(0)
    model = Checked()
    optimized = graphopt.optimize(copy.deepcopy(model))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        optimized(torch.randn(4, 5))
    assert_equal(trained(optimized, batches(2)), trained(model, batches(2)))


@pytest.mark.sweep
def test_hooks_added_later_act(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = Checked()
    plain, optimized = copy.deepcopy(model), graphopt.optimize(copy.deepcopy(model))
    assert_equal(trained(optimized, batches(2)), trained(plain, batches(2)))
    for one in (plain, optimized):
        one.last.register_forward_hook(lambda _m, _args, result: result * 2)
    assert_equal(trained(optimized, batches(2)), trained(plain, batches(2)))


class Attending(nn.Module):
    """Attention, whose kernel torch's settings choose, behind a look at values; a hook halves a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.scale = nn.Linear(8, 24), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.abs().max() > 1e9:
            return x
        q, k, v = self.qkv(x).view(1, -1, 3, 8).unbind(2)
        v.register_hook(lambda gradient: gradient / 2)
        return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None]) * self.scale


def test_what_is_around_a_call_counts() -> None:
    """Settings of torch, attributes that change, hooks inside of forward."""
    torch.manual_seed(0)
    model = Attending()
    optimized = graphopt.optimize(copy.deepcopy(model))
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        for one in (model, optimized):
            one.scale += 0.5
        with sdpa_kernel(backend):
            assert_equal(trained(optimized, batches(2, rows=300)), trained(model, batches(2, rows=300)))


@pytest.mark.sweep
def test_arguments_that_share_memory() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if x.abs().max() > 1e9:
                return x
            y = y.add_(1)
            return self.layer(x) + y

    torch.manual_seed(0)
    model = Adds()
    optimized = graphopt.optimize(copy.deepcopy(model))
    for shared in (False, True, False):
        found = []
        for one in (model, optimized):
            x = batches(1)[0]
            y = x[:] if shared else x.clone()
            found.append([one(x, y), x, y])
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_backward_hooks_of_submodules_are_refused() -> None:
    model = Checked()
    model.last.register_full_backward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match="the submodule 'last' has a backward hook"):
        graphopt.optimize(model)(batches(1)[0])


@pytest.mark.sweep
def test_without_gradients_and_in_eval_mode_the_plain_forward_runs() -> None:
    torch.manual_seed(0)
    model = Checked()
    optimized = graphopt.optimize(copy.deepcopy(model))
    with torch.no_grad():
        assert torch.equal(optimized(batches(1)[0])["y"], model(batches(1)[0])["y"])
    assert torch.equal(optimized.eval()(batches(1)[0])["y"], model.eval()(batches(1)[0])["y"])
    with pytest.raises(GraphoptError, match="nothing is captured yet"):
        _ = optimized.program


@pytest.mark.sweep
def test_under_autocast() -> None:
    def run(model: nn.Module) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = value_of_output(model(batches(1)[0]))
        loss.backward()
        return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    torch.manual_seed(0)
    for model in (Skipping(drop=0.3), Checked()):
        assert_equal(run(graphopt.optimize(copy.deepcopy(model))), run(model))


@pytest.mark.sweep
def test_accumulated_gradients_and_copies() -> None:
    torch.manual_seed(0)
    model = Skipping()
    plain, optimized = copy.deepcopy(model), graphopt.optimize(copy.deepcopy(model), [Recompute("auto")])
    for one in (plain, optimized):
        torch.manual_seed(3)
        for batch in batches(3):
            one(batch).square().mean().backward()
    assert_equal({n: p.grad for n, p in optimized.named_parameters()}, {n: p.grad for n, p in plain.named_parameters()})
    assert_equal(trained(copy.deepcopy(optimized), batches(2)), trained(copy.deepcopy(plain), batches(2)))


@pytest.mark.sweep
def test_several_threads() -> None:
    torch.manual_seed(0)
    model = Checked().requires_grad_(True)
    model.norm.eval()
    optimized = graphopt.optimize(copy.deepcopy(model))
    expected = [model(batch)["y"] for batch in batches(4)]
    found: dict[int, torch.Tensor] = {}

    def call(number: int, batch: torch.Tensor) -> None:
        found[number] = optimized(batch)["y"]

    threads = [threading.Thread(target=call, args=pair) for pair in enumerate(batches(4))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [torch.equal(found[number], value) for number, value in enumerate(expected)] == [True] * 4
