"""torch.compile(backend="graphopt"): eager mode's bits behind Dynamo's cuts, guards and sizes, under one budget."""

from __future__ import annotations

import copy
import gc
import logging
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import graphopt
from graphopt import ArgumentError, GraphoptError, PipelineError
from graphopt.passes import ClipGradients, DataParallel, FitMemory, Recompute
from tests.support.paths import ROOT

pytestmark = pytest.mark.filterwarnings("ignore")
"""Dynamo's own code warns, and hides it in a way that does not work where warnings are errors."""

FIT = "fit-memory{budget=80% cost=roofline}"
FULL = "fit-memory{budget=100% cost=roofline}"
EASY = "fit-memory{budget=97% cost=roofline}"


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Torch keeps what it compiled by the code of a class, for all models of the class."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Layer(nn.Module):
    def __init__(self, d: int = 16) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.drop = (
            nn.LayerNorm(d),
            nn.Linear(d, 4 * d),
            nn.Linear(4 * d, d),
            nn.Dropout(0.3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x))))) * x.sigmoid()


class Broken(nn.Module):
    """Layers, with a look at values between them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        if x.detach().abs().max() > 1e9:
            return x * 2
        return self.blocks[1](x)


class Loop(nn.Module):
    """Leaves out layers by chance, and the cut is inside of a submodule that runs several times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Looking() for _ in range(3)), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) + x
        return self.head(x)


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.other = Layer(), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return self.other(y) if y.sum().item() > 0 else y - self.other(x)


class Gpt(nn.Module):
    """Tied embeddings, causal attention, one graph."""

    def __init__(self, d: int = 16, words: int = 11) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(words, d), nn.Linear(d, 3 * d)
        self.blocks = nn.ModuleList(Layer(d) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        q, k, v = self.mix(x).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        for block in self.blocks:
            x = block(x)
        return x @ self.embed.weight.t()


class Conv(nn.Module):
    """Convolutions with BatchNorm, whose buffers are written, and a look at values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)).relu()
        if x.sum() < 0:
            return x
        return self.second(x).mean((2, 3))


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    return BertModel(BertConfig(vocab_size=11, max_position_embeddings=16, **sizes))


def numbers(rows: int = 12) -> torch.Tensor:
    return torch.randn(rows, 16)


def tokens() -> torch.Tensor:
    return torch.randint(11, (3, 8))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "broken": (Broken, numbers),
    "loop": (Loop, numbers),
    "gpt": (Gpt, tokens),
    "bert": (bert, tokens),
    "conv": (Conv, lambda: torch.randn(3, 2, 8, 8)),
}


def loss_of(result: Any) -> torch.Tensor:
    result = getattr(result, "last_hidden_state", result)
    return result.square().mean()


def trained(model: nn.Module, call: Callable[..., Any], batches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Losses, gradients, parameters, buffers and the generator's state over some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(3)
    found: dict[str, torch.Tensor] = {}
    for number, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = loss_of(call(batch))
        loss.backward()
        found[f"{number}.loss"] = loss.detach()
        found |= {f"{number}.{n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return found | {n: t.clone() for n, t in model.state_dict().items()} | {"generator": torch.get_rng_state()}


def pair(name: str) -> tuple[nn.Module, nn.Module, list[torch.Tensor]]:
    torch.manual_seed(0)
    make, batch = MODELS[name]
    model = make()
    return model, copy.deepcopy(model), [batch() for _ in range(4)]


def compiled_with(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="graphopt", options=options or None)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == []


WAYS = {"none": None, "recompute": "recompute{checkpoints=auto}", "fit": EASY}
FEW = {("broken", "fit"), ("loop", "none"), ("gpt", "recompute"), ("bert", "fit"), ("conv", "none")}
"""What runs in each test run; the sweep has all pairs."""


@pytest.mark.sweep(but=("conv-none",))
@pytest.mark.parametrize(
    ("name", "passes"),
    [
        pytest.param(name, passes, id=f"{name}-{way}", marks=() if (name, way) in FEW else pytest.mark.sweep)
        for name in MODELS
        for way, passes in WAYS.items()
    ],
)
def test_training_equals_eager_training(name: str, passes: str | None) -> None:
    model, eager, batches = pair(name)
    if name == "conv" and passes == EASY:
        passes = FULL  # nothing of it can be recomputed
    compiled = compiled_with(model, passes=passes)
    assert_equal(trained(model, compiled, batches), trained(eager, eager, batches))
    programs = [graph.program for graph in graphopt.compiled_graphs(compiled) if graph.program is not None]
    assert len(programs) >= (1 if name in ("gpt", "bert") else 2)


@pytest.mark.sweep
@pytest.mark.parametrize("passes", ["recompute{checkpoints=blocks.*}", FIT], ids=["recompute", "fit"])
def test_one_graph_is_what_optimize_makes_of_it(passes: str) -> None:
    model, eager, (batch, *_) = pair("gpt")
    compiled, optimized = compiled_with(model, passes=passes), graphopt.optimize(eager, passes)
    for call in (compiled, optimized):
        torch.manual_seed(1)
        loss_of(call(batch)).backward()
    (graph,) = graphopt.compiled_graphs(compiled)
    assert graph.program is not None
    assert calls(graph.program) == calls(optimized.program)
    assert graph.program.memory().peak_bytes == optimized.program.memory().peak_bytes
    assert [record.spec for record in graph.records] == [record.spec for record in optimized.records]
    assert {"blocks.0", "blocks.1", "blocks.0.up", "mix::linear"} - {*graph.program.names()} <= {"mix::linear"}


def calls(program: graphopt.Program) -> list[str]:
    """The calls of a program, without its signature."""
    return [line for line in program.to_text().splitlines() if " = " in line]


def peak(call: Callable[..., Any], batch: torch.Tensor) -> int:
    """The most bytes above what is there, in a step whose gradients are there."""
    return graphopt.measure_peak(lambda: loss_of(call(batch)).backward()).allocated_peak_bytes


@pytest.mark.sweep
def test_one_budget_covers_all_graphs() -> None:
    model, plain, _ = pair("broken")
    batch = numbers(64)
    free = compiled_with(plain)
    for _ in range(3):
        loss_of(free(batch)).backward()
    highest = peak(free, batch)
    torch._dynamo.reset()
    resident = sum(t.nbytes for t in (*model.parameters(), batch))
    budget = resident + int(0.77 * highest)
    compiled = compiled_with(model, passes=[FitMemory(budget, cost="roofline")])
    for _ in range(3):
        reached = peak(compiled, batch)
        assert resident + reached <= budget + 2 * batch.nbytes  # eager code between graphs, and the loss
        assert reached < 0.8 * highest
    assert len(graphopt.compiled_graphs(compiled)) == 2


@pytest.mark.sweep
def test_a_budget_that_the_graphs_do_not_meet_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    model, _, (batch, *_) = pair("broken")
    compiled = compiled_with(model, passes=[FitMemory(9_000, cost="roofline")])
    loss_of(compiled(batch)).backward()
    with pytest.raises(GraphoptError, match=r"no plan fits into 9.0 kB .*: in 2 parts the model's smallest peak is"):
        compiled(batch)


@pytest.mark.sweep
def test_a_second_batch_size_does_not_take_from_the_budget_of_the_first() -> None:
    model, eager, _ = pair("broken")
    compiled = compiled_with(model, passes=[FitMemory("100%", cost="roofline")])
    batches = [numbers(rows) for rows in (12, 12, 5, 12, 5)]
    assert_equal(trained(model, compiled, batches), trained(eager, eager, batches))
    graphs = graphopt.compiled_graphs(compiled)
    assert [graph.program is not None for graph in graphs] == [True] * len(graphs)
    assert not any(record.changed for graph in graphs for record in graph.records)  # 100 % of each is all of each


@pytest.mark.sweep
@pytest.mark.parametrize("dynamic", [None, True], ids=["automatic", "dynamic"])
def test_a_graph_for_any_size_has_a_program_for_each(dynamic: bool | None, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = Layer()
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="graphopt", dynamic=dynamic, options={"budget": "100%"})
    batches = [numbers(rows) for rows in (7, 9, 7, 11, 9, 1)]
    with caplog.at_level(logging.INFO, "graphopt"):
        assert_equal(trained(model, compiled, batches), trained(eager, eager, batches))
    lines = [r.getMessage() for r in caplog.records if "a program is captured for each" in r.getMessage()]
    assert any("x.size()[0] is 9" in line for line in lines)
    sizes = [graph.program.inputs_of("input")[-1][0] for graph in graphopt.compiled_graphs(compiled) if graph.program]
    assert len(sizes) >= 4


@pytest.mark.sweep
def test_more_sizes_than_programs_are_made_run_as_they_are_or_are_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("graphopt._torch.MOST_GRAPHS", 2)
    for budget, error in ((None, False), ("100%", True)):
        torch._dynamo.reset()
        compiled = torch.compile(nn.Linear(16, 2), backend="graphopt", dynamic=True, options={"budget": budget})
        for rows in (5, 6):
            compiled(numbers(rows)).sum().backward()
        if error:
            with pytest.raises(GraphoptError, match="would not hold"):
                compiled(numbers(7))
        else:
            compiled(numbers(7)).sum().backward()
            assert "it has had 2 programs, one for each size" in caplog.text
            assert graphopt.compiled_graphs(compiled)[-1].reason.startswith("it has had 2 programs")


@pytest.mark.sweep
def test_functions_and_modules_compiled_in_place() -> None:
    torch.manual_seed(0)
    layer, batch = Layer(), numbers()

    def step(x: torch.Tensor) -> torch.Tensor:
        return layer(x).square().mean()

    function = torch.compile(step, backend="graphopt", options={"passes": "recompute{checkpoints=up}"})
    in_place = copy.deepcopy(layer)
    in_place.compile(backend="graphopt")
    for call in (function, in_place):
        assert graphopt.compiled_graphs(call) == ()
        call(batch).sum().backward()
        (graph,) = graphopt.compiled_graphs(call)
        assert graph.program is not None
        assert {"up.weight", "up::addmm"} <= {*graph.program.names()}


def test_without_gradients_graphs_run_as_torch_made_them() -> None:
    model, eager, (batch, *_) = pair("gpt")
    compiled = compiled_with(model.eval(), budget="100%")
    with torch.no_grad():
        assert torch.equal(compiled(batch), eager.eval()(batch))
    (graph,) = graphopt.compiled_graphs(compiled)
    assert (graph.program, graph.records, graph.reason) == (None, (), "nothing in it requires a gradient")


class Checkpointed(nn.Module):
    """A checkpointed block with dropout, and for a graph that cannot be captured a hook on a tensor."""

    def __init__(self, hooked: bool) -> None:
        super().__init__()
        self.block, self.last, self.hooked = Layer(), nn.Linear(16, 16), hooked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.block, x, use_reentrant=False)
        if self.hooked:
            x.register_hook(lambda gradient: gradient * 2)
        return self.last(x)


@pytest.mark.sweep(but=("True",))
@pytest.mark.parametrize("hooked", [False, True])
def test_checkpointed_regions_draw_the_same_numbers_again(hooked: bool) -> None:
    torch.manual_seed(0)
    model = Checkpointed(hooked)
    eager, batches = copy.deepcopy(model), [numbers() for _ in range(2)]
    compiled = compiled_with(model)
    assert_equal(trained(model, compiled, batches), trained(eager, eager, batches))
    (graph,) = graphopt.compiled_graphs(compiled)
    assert (graph.program is None) == hooked
    assert ("register_hook" in graph.reason) == hooked


class Scheduled(nn.Module):
    """A rate of dropout and a factor that are set from outside, as plain numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.p, self.scale = nn.Linear(16, 16), 0.1, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.layer(x), self.p) * self.scale


@pytest.mark.sweep
def test_numbers_that_change_are_followed() -> None:
    torch.manual_seed(0)
    model, batch = Scheduled(), numbers()
    eager = copy.deepcopy(model)
    compiled = compiled_with(model)
    for p, scale in ((0.1, 1.0), (0.3, 2.0), (0.5, -0.0), (0.7, 0.0), (0.3, 2.0)):
        found = []
        for one, call in ((model, compiled), (eager, eager)):
            one.p, one.scale = p, scale
            torch.manual_seed(1)
            found.append(call(batch))
            found[-1].sum().backward()
        assert torch.equal(found[0].signbit(), found[1].signbit())
        assert torch.equal(*found)
    assert torch.equal(model.layer.weight.grad, eager.layer.weight.grad)


@pytest.mark.sweep
def test_accumulated_and_repeated_backward() -> None:
    model, eager, batches = pair("broken")
    compiled = compiled_with(model, passes=EASY)
    for call in (compiled, eager):
        torch.manual_seed(1)
        for _ in range(2):
            (loss_of(call(batches[0])) + loss_of(call(batches[1]))).backward()
        loss = loss_of(call(batches[2]))
        loss.backward(retain_graph=True)
        loss.backward()
        call(batches[3])  # whose result nothing goes back from
    assert_equal({n: p.grad for n, p in model.named_parameters()}, {n: p.grad for n, p in eager.named_parameters()})


@pytest.mark.sweep
def test_models_of_one_class_keep_their_own_parameters() -> None:
    batches = [numbers() for _ in range(3)]
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = Broken()
        eager = copy.deepcopy(model)
        assert_equal(trained(model, compiled_with(model), batches), trained(eager, eager, batches))


@pytest.mark.sweep
def test_a_model_that_is_gone_leaves_no_parameters_behind() -> None:
    model, _, (batch, *_) = pair("broken")
    weight = weakref.ref(model.blocks[0].up.weight)
    compiled = compiled_with(model, budget="100%")
    for _ in range(2):
        loss_of(compiled(batch)).backward()
    del model, compiled
    gc.collect()
    assert weight() is None


@pytest.mark.sweep
def test_under_autocast_and_with_numbers_verified() -> None:
    model, eager, (batch, *_) = pair("broken")
    compiled = compiled_with(model, passes=FULL, verify="numerics")
    for call in (compiled, eager):
        for _ in range(2):
            torch.manual_seed(1)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(call(batch))
            loss.backward()
    assert_equal({n: p.grad for n, p in model.named_parameters()}, {n: p.grad for n, p in eager.named_parameters()})


def test_one_line_is_logged_for_each_program(caplog: pytest.LogCaptureFixture) -> None:
    model, _, batches = pair("broken")
    compiled = compiled_with(model)
    with caplog.at_level(logging.INFO, "graphopt"):
        for batch in batches:
            loss_of(compiled(batch)).backward()
    lines = [record.getMessage() for record in caplog.records if record.name == "graphopt.capture"]
    assert [line.partition(":")[0] for line in lines] == ["Broken", "Broken"]


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"pases": "recompute"}, ArgumentError, r"no option 'pases'; did you mean 'passes'\? it has passes, budget"),
        ({"budget": "eight"}, GraphoptError, "eight"),
        ({"budget": "60%", "passes": FIT}, PipelineError, "'fit-memory' is given twice"),
        ({"passes": [ClipGradients(1.0)]}, PipelineError, "clip-gradients needs"),
        ({"passes": [DataParallel()]}, PipelineError, "data-parallel needs"),
        ({"verify": "strictly"}, ArgumentError, "verify='strictly' is not known"),
        ({"codegen": "inducto"}, GraphoptError, "did you mean 'inductor'"),
    ],
)
def test_what_is_wrong_with_options_is_said_at_the_first_call(
    options: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        compiled_with(nn.Linear(16, 2), **options)(numbers())


def test_a_mode_of_torchs_compiler_is_refused() -> None:
    with pytest.raises(ArgumentError, match="mode='max-autotune' is for torch's own compiler"):
        torch.compile(nn.Linear(16, 2), backend="graphopt", mode="max-autotune")(numbers())


@pytest.mark.sweep
def test_passes_that_need_a_whole_model_are_refused_where_it_is_cut() -> None:
    passes = [Recompute("auto"), graphopt.passes.ContiguousCheckpoints()]
    with pytest.raises(GraphoptError, match=r"has cut Broken into several graphs, and contiguous-checkpoints cannot"):
        compiled_with(Broken(), passes=passes)(numbers())
    whole = compiled_with(Layer(), passes=[Recompute("up"), graphopt.passes.ContiguousCheckpoints()])
    whole(numbers()).sum().backward()
    assert len(graphopt.compiled_graphs(whole)) == 1


def test_only_what_torch_has_compiled_can_be_looked_at() -> None:
    for wrong in (nn.Linear(2, 2), numbers, 3, None):
        with pytest.raises(ArgumentError, match=r"compiled is what torch.compile\(model, backend='graphopt'\)"):
            graphopt.compiled_graphs(wrong)
    assert graphopt.compiled_graphs(torch.compile(nn.Linear(2, 2), backend="eager")) == ()


@pytest.mark.sweep
def test_generated_code_may_be_compiled_by_a_callable() -> None:
    seen: list[str] = []

    def codegen(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        del inputs
        seen.append(type(module).__name__)
        return module.forward

    model, eager, batches = pair("broken")
    compiled = compiled_with(model, codegen=codegen)
    assert_equal(trained(model, compiled, batches), trained(eager, eager, batches))
    assert len(seen) == 4


def test_torch_finds_the_backend_by_its_entry_point(tmp_path: Path) -> None:
    """Without an import of graphopt, as in a project that only names the backend."""
    info = tmp_path / "elsewhere-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    declared = (ROOT / "pyproject.toml").read_text().partition("[project.entry-points.torch_dynamo_backends]\n")[2]
    (info / "entry_points.txt").write_text(
        f"[torch_dynamo_backends]\n{declared.splitlines()[0].replace(chr(34), '')}\n"
    )
    code = (
        "import sys, torch\n"
        "assert 'graphopt' not in sys.modules\n"
        "model = torch.compile(torch.nn.Linear(4, 2), backend='graphopt')\n"
        "model(torch.ones(3, 4)).sum().backward()\n"
        "import graphopt\n"
        "print(len(graphopt.compiled_graphs(model)))\n"
    )
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert done.stdout == "1\n", done.stderr
