"""Models after ``fully_shard``: drop-in and in whole steps, equal to FSDP2 to the last bit on every rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.fully_sharded import CASES, STEPS
from tests.support.ranks import run_ranks

ALL = """
from tests.support.fully_sharded import CASES, STEPS, far_apart
say({name: far_apart(case) for name, case in CASES.items()})
say({name: far_apart(case, step=True) for name, case in STEPS.items()})
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """What each of two ranks found: drop-in, in whole steps, peaks, and what is refused."""
    ranks = run_ranks(ALL + PEAKS + REFUSED, 2, tmp_path_factory.mktemp("ranks") / "store")
    assert ranks[0][:2] == ranks[1][:2]
    return ranks


def is_equal(case: dict[str, Any], what: set[str]) -> None:
    assert case["far"].keys() == what
    assert set(case["far"].values()) == {0.0}
    assert case["lower"]


@pytest.mark.parametrize("name", CASES)
def test_a_drop_in_model_trains_as_with_fsdp2(name: str, found: list[list[Any]]) -> None:
    case = found[0][0][name]
    is_equal(case, {"loss", "gradients", "parameters", "state", "evaluation"})
    assert case["records"] == [name.partition("{")[0] for name in CASES[name].passes.split(",") if name]


@pytest.mark.parametrize("name", STEPS)
def test_a_whole_step_trains_as_with_fsdp2(name: str, found: list[list[Any]]) -> None:
    is_equal(found[0][1][name], {"loss", "parameters", "state", "evaluation"})


MORE = """
from tests.support.fully_sharded import MORE_CASES, MORE_STEPS, far_apart
for case in MORE_CASES.values():
    say(far_apart(case))
for case in MORE_STEPS.values():
    say(far_apart(case, step=True))
"""

HYBRID = """
from tests.support.fully_sharded import Case, far_apart
for passes in ("", "fit-memory{budget=90%}"):
    case = Case(mesh=(2, 2), passes=passes)
    say(far_apart(case))
    say(far_apart(case, step=True))
say(far_apart(Case(options={"reshard_after_forward": 2})))
say(far_apart(Case(mesh=(2, 2), backwards=3, waits=True)))
"""


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("script", "ranks"), [(MORE, 2), (MORE, 3), (ALL, 3), (HYBRID, 4)], ids=["more", "more, three", "three", "hybrid"]
)
def test_more_cases_and_ranks(script: str, ranks: int, tmp_path: Path) -> None:
    for rank in run_ranks(script, ranks, tmp_path / "store"):
        cases = [case for said in rank for case in (said.values() if script is ALL else [said])]
        assert [set(case["far"].values()) for case in cases] == [{0.0}] * len(cases)


PEAKS = """
import logging
from torch.distributed.fsdp import fully_shard
import graphopt
from tests.support.training import Blocks
logging.getLogger("graphopt").setLevel(logging.ERROR)

class WithLoss(Blocks):
    def forward(self, tokens):
        return super().forward(tokens).square().mean()

def sharded(**options):
    torch.manual_seed(0)
    model = WithLoss(3, 32, 128)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)

x = torch.randint(0, 128, (8, 32))

def peak(model):
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = None
        model(x).backward()
    for parameter in model.parameters():
        parameter.grad = None
    measured = graphopt.measure_peak(lambda: model(x).backward()).allocated_peak_bytes
    return measured, model.program.memory() if hasattr(model, "program") else None

peaks = []
for options in ({}, {"reshard_after_forward": False}):
    theirs, _ = peak(sharded(**options))
    measured, memory = peak(graphopt.optimize(sharded(**options)))
    peaks.append([theirs, measured, memory.allocated_peak_bytes])
measured, memory = peak(graphopt.optimize(sharded(), "fit-memory{budget=75%}"))
peaks.append([measured, memory.allocated_peak_bytes, memory.peak_bytes])
say(peaks)
"""


def test_peaks_are_those_of_this_rank(found: list[list[Any]]) -> None:
    for _, _, (frees, stays, fitted), _ in found:
        for theirs, measured, predicted in (frees, stays):
            assert measured == pytest.approx(predicted, rel=0.01)
            assert measured <= theirs
        assert frees[2] < stays[2]
        assert fitted[0] == pytest.approx(fitted[1], rel=0.01)
        assert fitted[1] < frees[2]


ORDER = """
import logging
from torch.distributed.fsdp import fully_shard
import graphopt
from graphopt.ir.ops import schema
from tests.support.training import Blocks
logging.getLogger("graphopt").setLevel(logging.ERROR)

def events(passes):
    torch.manual_seed(0)
    model = Blocks(3, 32, 128)
    for block in model.blocks:
        fully_shard(block)
    model = graphopt.optimize(fully_shard(model), passes)
    model(torch.randint(0, 128, (8, 32))).square().mean().backward()
    found = ""
    for node in model.program.nodes:
        if schema.is_gather(node):
            found += "gG"  # begun and awaited at once
        elif schema.is_collective(node):
            reduces = "reduce" in schema.op_name(node if schema.starts_exchange(node) else node.all_input_nodes[0])
            reduces = reduces or "reduce" in schema.op_name(node)
            letter = "r" if reduces else "g"
            found += letter.upper() if schema.hands_on(node) else letter
        elif schema.op_name(node) in ("mm", "addmm") and not found.endswith("."):
            found += "."
    return found, model.program.memory().peak_bytes

plain, most = events("")
budget = most * 6 // 10
tight, peak = events(f"fit-memory{{budget={budget}}}")
say([plain, tight, budget - peak])
"""


def test_exchanges_run_beside_the_computation(tmp_path: Path) -> None:
    """g and r: a gather or a reduction begins; G and R: it is awaited; a dot: matrix products."""
    first, second = (found[0] for found in run_ranks(ORDER, 2, tmp_path / "store"))
    assert first == second
    plain, tight, left = first
    # the model's own group and the first block's, each next one while a block computes; in backward sums meanwhile too
    assert plain == "gGgGg.Gg.G.gGg.rGg.RrG.RrRrR"
    assert left >= 0
    assert tight.count("g") == tight.count("G") >= 4
    assert "g.G" in tight


WAITING = """
import logging
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
import graphopt
from tests.support.training import Blocks
told = []
handler = logging.Handler()
handler.emit = lambda record: told.append(record.getMessage())
logging.getLogger("graphopt").addHandler(handler)
logging.getLogger("graphopt").propagate = False

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.first(x), self.second(x)

class Again(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Tanh())), nn.Linear(8, 8)

    def forward(self, x):
        return (self.second(self.first(self.first(x))),)

class Plainly(TorchDispatchMode):  # beside which a model runs in eager mode
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        return op(*args, **(kwargs or {}))

x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))

def gradients(optimized, calls, kind=Two):
    torch.manual_seed(0)
    model = fully_shard(kind())
    model = graphopt.optimize(model) if optimized else model
    found = []
    for reduces, outputs, eager in calls:
        model.set_requires_gradient_sync(reduces)
        if eager and optimized:
            with Plainly():
                results = model(x)
        else:
            results = model(x)
        sum(results[number].square().sum() for number in outputs).backward()
        found.append([None if p.grad is None else p.grad.to_local().tolist() for p in model.parameters()])
        for parameter in model.parameters() if reduces else ():
            parameter.grad = None
    return found

both, first, second = (0, 1), (0,), (1,)
for calls in (
    [(False, first, False), (False, second, False), (True, first, False), (False, first, False), (True, first, False)],
    [(False, both, False), (False, both, True), (True, both, False), (True, second, False)],
    [(False, both, True), (False, both, False), (True, both, True), (False, first, False), (True, second, True)],
):
    say(gradients(True, calls) == gradients(False, calls))

reduced = [(reduces, first, False) for reduces in (False, False, True, False, True)]
apart = [
    (torch.tensor(a) - torch.tensor(b)).abs().max().item() if a and b else 0.0 if a is b else 1.0
    for one, other in zip(gradients(True, reduced, Again), gradients(False, reduced, Again))
    for a, b in zip(one, other)
]
say(max(apart))

class WithLoss(Blocks):
    def forward(self, tokens):
        return super().forward(tokens).square().mean()

def sharded():
    torch.manual_seed(0)
    model = WithLoss(3, 32, 128)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)

tokens = torch.randint(0, 128, (8, 32))
model = graphopt.optimize(sharded(), "fit-memory{budget=75%}")
peaks = []
for reduces in (False, True, False, False, True):
    model.set_requires_gradient_sync(reduces)
    found = graphopt.measure_peak(lambda: model(tokens).backward())
    peaks.append([found.allocated_peak_bytes, model.program.memory().allocated_peak_bytes])
    for parameter in model.parameters() if reduces else ():
        parameter.grad = None
say(peaks)

told.clear()
model.set_requires_gradient_sync(False)
loss = model(tokens)
model.set_requires_gradient_sync(True)
loss.backward()
say([p.grad is None for p in model.parameters()])
one = sharded()
step = graphopt.optimize_step(one, torch.optim.SGD(one.parameters()), loss=lambda m, x: m(x))
one.set_requires_gradient_sync(False)
step(tokens)
say([line for line in told if "set_requires_gradient_sync" in line])
"""


def test_gradients_wait_for_the_backward_that_reduces_them(tmp_path: Path) -> None:
    """Where outputs are left out, where eager mode runs in between, within a budget; what cannot wait is said."""
    for *same, apart, peaks, without, told in run_ranks(WAITING, 2, tmp_path / "store"):
        assert same == [True, True, True]
        assert apart < 1e-5  # a module that runs twice, whose gradients are reduced for each run
        for measured, predicted in peaks[2:]:
            assert measured == pytest.approx(predicted, rel=0.01)
        assert set(without) == {True}
        assert ["between forward and backward" in line for line in told] == [True, False]
        assert "has no effect on a whole step" in told[1]


REFUSED = """
import logging, warnings
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
import graphopt
from tests.support.fully_sharded import Case, fully_sharded

x = torch.randint(0, 11, (4, 7))

refused = []

def told(make):
    try:
        make()
    except graphopt.GraphoptError as error:
        return str(error)
    return ""

def parts():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model[0])
    return model

def of(model, passes=()):
    return lambda: graphopt.optimize(model, passes)(torch.randn(4, 8)).sum().backward()

refused.append(told(lambda: graphopt.optimize(parts())))
offloaded = fully_shard(nn.Linear(8, 8), offload_policy=CPUOffloadPolicy(pin_memory=False))
state = offloaded._get_fsdp_state()
(group,) = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # before torch 2.13
for parameter in group.fsdp_params:
    parameter.device = torch.device("cuda", 0)
refused.append(told(of(offloaded)))
refused.append(told(of(fully_shard(nn.Linear(8, 8)), "data-parallel")))
refused.append(told(of(fully_shard(nn.Linear(8, 8)), "scale-loss")))
whole = fully_shard(nn.Linear(8, 8))
sgd = torch.optim.SGD(whole.parameters())
refused.append(told(lambda: graphopt.optimize_step(whole, sgd, "data-parallel,shard-parameters")))
loss = lambda m, x: m(x).sum()
rows = graphopt.optimize_step(whole, torch.optim.Adafactor(whole.parameters()), loss=loss)
refused.append(told(lambda: rows(torch.randn(4, 8))))
watched = torch.optim.Muon([whole.weight])
watched.register_step_pre_hook(lambda *_: None)
refused.append(told(lambda: graphopt.optimize_step(whole, watched, loss=loss)(torch.randn(4, 8))))
hooked = fully_shard(nn.Linear(8, 8))
step = graphopt.optimize_step(hooked, torch.optim.SGD(hooked.parameters()), loss=lambda m, x: m(x).sum())
hooked.weight.register_hook(lambda gradient: 2 * gradient)
refused.append(told(lambda: step(torch.randn(4, 8))))
twice = graphopt.optimize(fully_shard(nn.Linear(8, 8)))
refused.append(told(lambda: graphopt.optimize_step(twice, torch.optim.SGD(twice.parameters()))))
refused.append(graphopt.capture(fully_sharded(Case()), (x,)).stage)
say(refused)
"""

WORDS: list[Callable[[str], bool]] = [
    lambda text: "its submodule '0'" in text and "the whole model" in text,
    lambda text: "CPUOffloadPolicy" in text and "leave offload_policy out" in text,
    lambda text: "data-parallel exchanges gradients" in text and "leave the pass out" in text,
    lambda text: "bfloat16" in text and "GradScaler" in text,
    lambda text: "data-parallel exchanges gradients" in text,
    lambda text: "Adafactor cannot be sharded" in text and "keep your loop" in text,
    lambda text: "Muon cannot be sharded" in text and "hook" in text,
    lambda text: "'weight' has a hook on its gradient" in text,
    lambda text: "as fully_shard left it" in text,
    lambda text: text == "joint",
]


def test_what_cannot_be_done_is_refused_by_name(found: list[list[Any]]) -> None:
    for *_, refused in found:
        assert [text for text, is_right in zip(refused, WORDS, strict=True) if not is_right(text)] == []


CHECKPOINTS = """
import logging
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
import graphopt
from tests.support.fully_sharded import Case, fully_sharded, whole_loss
logging.getLogger("graphopt").setLevel(logging.ERROR)
ways = ("FSDP2", "drop-in", "whole step")
x, y = torch.randint(0, 11, (2, 4, 7), generator=torch.Generator().manual_seed(0))

def trained(way, source=None):
    model = fully_sharded(Case(dropout=0.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    if source is not None:
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
        dcp.load(state, checkpoint_id=source)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    run = graphopt.optimize(model, "fit-memory{{budget=90%}}") if way == "drop-in" else model
    step = graphopt.optimize_step(model, optimizer, loss=whole_loss) if way == "whole step" else None
    for _ in range(2):
        if step is None:
            whole_loss(run, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            step(x, y)
    return run, optimizer

if world == 4:
    for way in ways:
        state = dict(zip(("model", "optimizer"), get_state_dict(*trained(way))))
        dcp.save(state, checkpoint_id="{folder}/" + way)
else:
    for way in ways:
        say([[p.full_tensor().tolist() for p in trained(way, "{folder}/" + source)[0].parameters()] for source in ways])
"""


@pytest.mark.sweep
def test_checkpoints_go_over_between_ways_and_numbers_of_ranks(tmp_path: Path) -> None:
    script = CHECKPOINTS.format(folder=tmp_path)
    run_ranks(script, 4, tmp_path / "four")
    first, second = run_ranks(script, 2, tmp_path / "two")
    assert first == second
    found = [values for way in first for values in way]
    assert len(found) == 9
    assert all(values == found[0] for values in found)
