"""What several test files need: small models, op lists, and training in eager mode against graphopt."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

import graphopt
from graphopt import Changed, Pass, Phase, Pipeline, Program
from graphopt.capture.call.flatten import flatten
from graphopt.ir.node import OutputSpec, Stage, info
from graphopt.ir.ops import schema
from graphopt.passes import Recompute
from graphopt.rewriting.pass_ import Numerics
from graphopt.runtime.programs.binding import Binding

Loss = Callable[..., torch.Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Passes = str | Sequence[Pass]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, foreach=True),
}
"""The implementation is named, so that eager and the captured step run the same kernels."""


class Net(nn.Module):
    """Calls ``net`` one module after the other: the tensors are ``net.0``, ``net.1`` and so on."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class Block(nn.Module):
    """A small pre-norm attention block with dropout; its tensors have ``d`` features."""

    def __init__(self, d: int = 8, heads: int = 2, p: float = 0.1) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d), nn.Dropout(p))
        self.heads, self.p = heads, p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, d = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        drop = self.p if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=drop)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, d))
        return x + self.mlp(x)


class Blocks(nn.Module):
    """An embedding, blocks and a head: a language model of ``vocabulary`` tokens."""

    def __init__(self, layers: int = 3, d: int = 8, vocabulary: int = 11, p: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, d)
        self.blocks = nn.ModuleList(Block(d, p=p) for _ in range(layers))
        self.head = nn.Linear(d, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def mean_square(model: nn.Module, *batch: Any) -> torch.Tensor:
    """The mean of the squares of what the model returns."""
    return model(*batch).square().mean()


def next_token(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each next token."""
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@dataclass(frozen=True)
class Plain(Pass):
    """A pass that does nothing, for others to derive from."""

    name: ClassVar[str] = "plain"
    stage: ClassVar[Stage] = "joint"
    numerics: ClassVar[Numerics] = "bitwise"

    def apply(self, program: Program) -> Changed:
        return Changed(reason="it is a test")


# --- looking at programs ---------------------------------------------------------------------------------------------


def captured(model: nn.Module, *batch: Any, loss: Loss = mean_square) -> Program:
    """The joint program of a loss."""
    return graphopt.capture(model, batch, loss=loss)


def rewritten(model: nn.Module, *batch: Any, passes: Passes, loss: Loss = mean_square) -> Program:
    """The joint program of a loss after passes."""
    program = captured(model, *batch, loss=loss)
    Pipeline(passes).run(program)
    return program


def recomputed(program: Program, *checkpoints: str) -> Program:
    """A copy of a program after ``Recompute``."""
    changed = program.copy()
    Pipeline([Recompute(checkpoints)]).run(changed)
    return changed


def ops(program: Program, *phases: Phase) -> list[str]:
    """The ops of the given phases in order; elements of tuples are not ops."""
    return [schema.op_name(node) for node in program.phase_nodes(*phases) if node.target is not operator.getitem]


def saved(program: Program) -> list[str]:
    """The first names of what forward computes and something later reads, in program order."""
    return [
        info(node).names[0] if info(node).names else node.name
        for node in program.phase_nodes(Phase.FORWARD)
        if any(user.op != "output" and info(user).phase is not Phase.FORWARD for user in node.users)
    ]


def peaks(program: Program, model: nn.Module, *batch: Any) -> tuple[int, int]:
    """(predicted, measured) bytes that running a program with a loss adds at its peak."""
    module, held = program.to_graph_module(), copy.deepcopy(model)  # what runs must not be the only owner of parameters
    inputs = Binding(program, held).gather(flatten(batch, paths=False)[0])

    def run() -> Any:
        with torch.no_grad():
            return module.forward(inputs)

    return program.memory().allocated_peak_bytes, graphopt.measure_peak(run).allocated_peak_bytes


def results(
    program: Program, model: nn.Module, *batch: Any, seed: int = 0
) -> tuple[dict[OutputSpec, Any], torch.Tensor]:
    """What a program with a loss returns, by description, and the generator's state afterwards.

    Buffers of ``model`` are updated as the program says.
    """
    inputs = Binding(program, model).gather(flatten(copied(batch), paths=False)[0])
    torch.manual_seed(seed)
    with torch.no_grad():
        values = program.to_graph_module().forward(inputs)
    return dict(zip(program.outputs, values, strict=True)), torch.get_rng_state()


def identical(one: Any, other: Any) -> bool:
    """Equal to the last bit; not-a-number equals itself."""
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return one is None and other is None
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one, other) or torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


# --- training --------------------------------------------------------------------------------------------------------


@dataclass
class Training:
    """Everything that a training run left behind, by name."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, value: Any) -> None:
        """Keep a copy of ``value``, which may be a tensor or hold tensors."""
        if isinstance(value, torch.Tensor):
            self.tensors[name] = value.detach().clone()
        elif isinstance(value, dict):
            for key, item in value.items():
                self.add(f"{name}.{key}", item)
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                self.add(f"{name}[{index}]", item)
        else:
            self.values[name] = value

    def end(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Training:
        """Add what is left at the end: parameters, buffers, the optimizer's state, the generator's state."""
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            self.add(f"model.{name}", tensor)
        self.add("optimizer", optimizer.state_dict()["state"])
        self.add("generator", torch.get_rng_state())
        return self


def copied(value: Any) -> Any:
    """A list like ``value`` whose tensors are new leaves."""
    return [
        v.detach().clone().requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) else copy.deepcopy(v)
        for v in value
    ]


def train(model: nn.Module, make_optimizer: MakeOptimizer, loss: Loss, batches: Sequence[Sequence[Any]]) -> Training:
    """Train as everyone does, on a model that may have been optimized."""
    optimizer, found = make_optimizer(model.parameters()), Training()
    torch.manual_seed(1)
    for number, batch in enumerate(batches):
        inputs = copied(batch)
        optimizer.zero_grad()
        value = loss(model, *inputs)
        value.backward()
        found.add(f"{number}.loss", value)
        for name, parameter in model.named_parameters():
            found.add(f"{number}.gradient.{name}", parameter.grad)
        found.add(f"{number}.gradient of inputs", [x.grad for x in inputs if isinstance(x, torch.Tensor)])
        optimizer.step()
    return found.end(model, optimizer)


def train_whole_step(
    model: nn.Module, make_optimizer: MakeOptimizer, loss: Loss, batches: Sequence[Sequence[Any]], passes: Passes
) -> Training:
    """Train with ``optimize_step``; gradients of parameters stay inside of the step."""
    return _train_whole_step(model, make_optimizer, loss, batches, passes)[0]


def _train_whole_step(
    model: nn.Module, make_optimizer: MakeOptimizer, loss: Loss, batches: Sequence[Sequence[Any]], passes: Passes
) -> tuple[Training, Program]:
    """What training with ``optimize_step`` left behind, and the joint program of the first step, as it was captured."""
    optimizer, found = make_optimizer(model.parameters()), Training()
    step = graphopt.optimize_step(model, optimizer, passes, loss=loss)
    torch.manual_seed(1)
    for number, batch in enumerate(batches):
        inputs = copied(batch)
        found.add(f"{number}.loss", step(*inputs))
        found.add(f"{number}.gradient of inputs", [x.grad for x in inputs if isinstance(x, torch.Tensor)])
        if number == 0:
            joint = next(program for label, program in step.snapshots if label == "captured joint")
    return found.end(model, optimizer), joint


def assert_same(eager: Training, other: Training, what: str, *, skip: str = "\n") -> None:
    """Fail naming everything that is not equal to the last bit; ``skip`` is a part of names that ``other`` hides."""
    names = [name for name in eager.tensors if skip not in name]
    wrong = [
        name for name in names
        if name not in other.tensors or not identical(eager.tensors[name], other.tensors[name])
    ]  # fmt: skip
    wrong += [name for name, value in eager.values.items() if skip not in name and other.values.get(name) != value]
    wrong += [
        f"unexpected {name}"
        for name in {**other.tensors, **other.values}
        if name not in {**eager.tensors, **eager.values}
    ]
    assert not wrong, f"{what}: {len(wrong)} of {len(names)} differ from eager: {', '.join(wrong[:8])}"


def assert_same_gradients(
    eager: Training, model: nn.Module, joint: Program, batch: Sequence[Any], passes: Passes
) -> None:
    """Compare the gradients inside a joint program, after passes, with those of an eager run's first step, bitwise."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    known = dict(model.named_parameters(remove_duplicate=False))
    program = joint.copy()
    Pipeline(passes).run(program)
    found, _ = results(program, copy.deepcopy(model), *batch, seed=1)
    gradients = {names[id(known[s.target])]: v for s, v in found.items() if s.role == "gradient" and s.target in known}
    expected = {n.removeprefix("0.gradient."): v for n, v in eager.tensors.items() if n.startswith("0.gradient.")}
    assert gradients.keys() == expected.keys()
    wrong = [name for name, value in expected.items() if not identical(value, gradients[name])]
    assert not wrong, f"gradients in the joint program differ from eager: {wrong}"


def assert_same_training(
    model: nn.Module,
    optimizer: str | MakeOptimizer,
    loss: Loss,
    batches: Sequence[Sequence[Any]],
    passes: Passes = (),
    *,
    steps: int = 5,
    whole_step: bool = True,
) -> None:
    """Train copies of ``model`` for ``steps`` steps in eager mode, drop-in and as whole steps; all must be equal.

    Losses, every gradient, every buffer, parameters, optimizer state and the generator's state are compared bitwise.
    """
    make = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    run = [batches[number % len(batches)] for number in range(steps)]
    eager = train(copy.deepcopy(model), make, loss, run)
    drop_in = graphopt.optimize(copy.deepcopy(model), passes)
    assert_same(eager, train(drop_in, make, loss, run), "drop-in")
    if whole_step:
        stepped, joint = _train_whole_step(copy.deepcopy(model), make, loss, run, passes)
        assert_same(eager, stepped, "whole step", skip=".gradient.")
        assert_same_gradients(eager, model, joint, run[0], passes)
