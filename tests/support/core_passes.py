"""What the core tests run: each pass behind both doors on four small models, beside a plain loop of eager PyTorch.

``ROWS`` has a row for each registered pass: the pipeline that shows it, and what a plain loop does in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TypedDict
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import graphopt
from graphopt import Program
from graphopt.ir.ops.storage.quantize import rounding_seed
from graphopt.rewriting.pass_ import PassRecord
from tests.support.float8_reference import float8_linear
from tests.support.training import OPTIMIZERS, Training, identical

DOORS = ("drop-in", "whole step")
MODELS = ("plain", "dropout", "tied", "frozen")
STEPS = 3
Batch = tuple[torch.Tensor, torch.Tensor]
Call = Callable[[], object]


class Block(nn.Module):
    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.drop = nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.mlp(x))


class LanguageModel(nn.Module):
    """Gives the loss of a batch, as models of ``transformers`` do: then it is in the program behind both doors."""

    def __init__(self, words: int, blocks: int, *, p: float = 0.0, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, 16)
        self.blocks = nn.ModuleList(Block(16, p) for _ in range(blocks))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if frozen:
            self.blocks[0].requires_grad_(False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


# --- what a plain loop does in the place of a pass -------------------------------------------------------------------


class Eager:
    """A plain loop's own code at the places where passes act; this one has none.

    Attributes:
        within: how far a pass may be from it, by the largest element of each tensor; 0 for the same bits.
    """

    within: float = 0.0

    def forward(self) -> AbstractContextManager[object]:
        """Around the model's call."""
        return nullcontext()

    def gradients(self, model: nn.Module, number: int) -> None:
        """Between backward and the update."""

    def updated(self, model: nn.Module, number: int) -> None:
        """Behind the update."""


@dataclass
class Within(Eager):
    """The same as eager mode, with sums in another order or rounded values."""

    within: float


class Autocast(Eager):
    def forward(self) -> AbstractContextManager[object]:
        return torch.autocast("cpu", torch.bfloat16)


class Clipped(Eager):
    def gradients(self, model: nn.Module, number: int) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)


class In8Bits(Eager):
    """Layers whose features are multiples of 16 compute their products in float8, with one scale for a matrix."""

    @contextmanager
    def forward(self) -> Iterator[None]:
        with mock.patch.object(nn.Linear, "forward", float8_linear):
            yield


class Rounding(Eager):
    """Values that wait for backward are rounded, by a number that is drawn in front of forward."""

    within = 0.05

    @contextmanager
    def forward(self) -> Iterator[None]:
        rounding_seed()
        yield


class Mean(Eager):
    """Gradients are averaged over the ranks."""

    wire = torch.float32

    def gradients(self, model: nn.Module, number: int) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.copy_(mean_of(parameter.grad.to(self.wire)))


class MeanIn16Bits(Mean):
    wire = torch.bfloat16


@dataclass
class Sparse(Eager):
    """Deep gradient compression without momentum: the largest entries of what has accumulated are sent."""

    share: float
    within: float = 1e-6
    kept: dict[int, torch.Tensor] = field(default_factory=dict)

    def gradients(self, model: nn.Module, number: int) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None and parameter.ndim > 1:
                grown = parameter.grad.flatten() + self.kept.get(id(parameter), 0.0)
                sent = torch.zeros_like(grown)
                places = grown.abs().topk(max(1, int(grown.numel() * self.share))).indices
                sent[places] = grown[places]
                self.kept[id(parameter)] = grown - sent
                parameter.grad.copy_(mean_of(sent).view_as(parameter))
            elif parameter.grad is not None:
                parameter.grad.copy_(mean_of(parameter.grad))


class Local(Eager):
    """Each rank updates by itself; parameters are averaged behind every second update."""

    def updated(self, model: nn.Module, number: int) -> None:
        if number % 2:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data.copy_(mean_of(parameter.data))


@dataclass
class Outer(Eager):
    """DiLoCo with an outer step behind every second update: SGD with Nesterov momentum on the common parameters."""

    common: dict[nn.Parameter, torch.Tensor] = field(default_factory=dict)
    outer: torch.optim.Optimizer | None = None

    def gradients(self, model: nn.Module, number: int) -> None:
        if self.outer is None:
            self.common = {p: p.detach().clone() for p in model.parameters() if p.requires_grad}
            self.outer = torch.optim.SGD(self.common.values(), lr=0.7, momentum=0.9, nesterov=True)

    def updated(self, model: nn.Module, number: int) -> None:
        if number % 2:
            assert self.outer is not None
            for own, common in self.common.items():
                common.grad = mean_of(common - own.detach())
            self.outer.step()
            for own, common in self.common.items():
                own.data.copy_(common)


def mean_of(tensor: torch.Tensor) -> torch.Tensor:
    """Over the ranks; of two, so that no order of adding them up is another one."""
    total = tensor / dist.get_world_size()
    dist.all_reduce(total)
    return total


# --- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """How a pass is tested.

    Attributes:
        passes: a pipeline in which it has something to do in each of the models.
        eager: makes what a plain loop does in its place.
        refused: what the error says where it has no meaning in a drop-in model; empty where it has one.
        nothing: what the record says where it does nothing in a drop-in model; empty where it does something.
        ranks: how many processes train together.
        alike: whether all of these have the same data.
        optimizer: of ``OPTIMIZERS``.
        sharded: whether each rank has a part of the optimizer's state.
        words: of the vocabulary; few where logits would be the peak.
        blocks: how many.
        sequences: of a batch; many where checkpoints have to be larger than gradients.
    """

    passes: str
    eager: Callable[[], Eager] = Eager
    refused: str = ""
    nothing: str = ""
    ranks: int = 1
    alike: bool = False
    optimizer: str = "adamw"
    sharded: bool = False
    words: int = 100
    blocks: int = 2
    sequences: int = 4

    def model(self, kind: str) -> LanguageModel:
        torch.manual_seed(0)
        p = 0.1 if kind == "dropout" else 0.0
        return LanguageModel(self.words, self.blocks, p=p, tied=kind == "tied", frozen=kind == "frozen")

    def batch(self, number: int) -> Batch:
        """Of a step, on this rank."""
        rank = dist.get_rank() if self.ranks > 1 and not self.alike else 0
        drawn = torch.randint(
            self.words, (2, self.sequences, 12), generator=torch.Generator().manual_seed(100 * rank + number)
        )
        return drawn[0], drawn[1]


UPDATES = "rewrites the optimizer's update, which a drop-in model does not hold: use optimize_step"
SEGMENTS = "recompute{checkpoints=blocks.*}"
# Rounding in a gradient close to 0 turns a step of Adam around; momentum keeps the first gradient as it is.
ROUNDED = {"eager": lambda: Within(1e-5), "optimizer": "momentum"}

ROWS = {
    "adaptive-local-sgd": Row(
        "data-parallel,adaptive-local-sgd{init-k-steps=2 max-k-steps=2}", Local, UPDATES, ranks=2, optimizer="momentum"
    ),
    "checkpoint-boundaries": Row(f"{SEGMENTS},checkpoint-boundaries"),
    "chunk": Row("chunk{pattern=blocks.*.mlp chunks=2}", **ROUNDED),
    "chunk-loss": Row("chunk-loss{chunks=2}", refused="the loss is not part of this program", **ROUNDED),
    "clip-gradients": Row("clip-gradients{max-norm=0.1}", Clipped, UPDATES),
    "compress-activations": Row("compress-activations{min-bytes=100}", Rounding, optimizer="momentum"),
    "compress-gradients": Row("data-parallel,compress-gradients{how=bf16}", MeanIn16Bits, ranks=2),
    "contiguous-checkpoints": Row(f"{SEGMENTS},contiguous-checkpoints"),
    "data-parallel": Row("data-parallel", Mean, ranks=2),
    "deep-gradient-compression": Row(
        "data-parallel,deep-gradient-compression{sparsity=0.9 rampup-step=1 min-elements=1 correction=feedback}",
        lambda: Sparse(0.1), UPDATES, ranks=2, optimizer="sgd",
    ),
    "diloco": Row("data-parallel,diloco{every=2}", Outer, UPDATES, ranks=2),
    "fit-memory": Row("fit-memory{budget=85% cost=roofline}"),
    "float8": Row("float8", In8Bits),
    "fuse-update": Row("fuse-update", nothing="there is no update in this program"),
    "local-sgd": Row("data-parallel,local-sgd{k-steps=2}", Local, UPDATES, ranks=2),
    "microbatch": Row("microbatch{slices=2}", refused="needs the loss in the program", **ROUNDED),
    "mixed-precision": Row("mixed-precision", Autocast),
    "offload": Row("offload{tensors=blocks.* min-bytes=1 cost=roofline}"),
    "offload-state": Row("offload-state{min-bytes=1 cost=roofline}", refused=UPDATES),
    "partition-checkpoints": Row(
        f"{SEGMENTS},partition-checkpoints{{min-bytes=1}}",
        ranks=2, alike=True, optimizer="sgd", words=8, blocks=3, sequences=48,
    ),
    "recompute": Row(SEGMENTS),
    "recompute-evenly": Row("recompute-evenly{number=2}"),
    "scale-loss": Row("scale-loss{init-scale=1024.0}"),
    "shard-optimizer": Row("data-parallel,shard-optimizer", Mean, UPDATES, ranks=2, optimizer="rmsprop", sharded=True),
    "shard-parameters": Row(
        "data-parallel,shard-parameters{min-bytes=1}", Mean, UPDATES, ranks=2, optimizer="rmsprop", sharded=True
    ),
}  # fmt: skip


# --- one case --------------------------------------------------------------------------------------------------------


class Verdict(TypedDict):
    """What came of a case: as a dict, which a rank can tell.

    Attributes:
        wrong: names of what is not as a plain loop has it.
        predicted: bytes at the peak of a later call, as the program says.
        measured: the same, as torch's allocator says.
        record: what the pass says that it did.
        did: whether it did something.
    """

    wrong: Sequence[str]
    predicted: int
    measured: int
    record: str
    did: bool


def verdict_of(name: str, door: str, kind: str) -> Verdict:
    """Train with a pass, and by a plain loop."""
    row = ROWS[name]
    batches = [row.batch(number) for number in range(STEPS)]
    expected = trained(row.model(kind), row, batches, row.eager())
    return (drop_in if door == "drop-in" else whole_step)(name, row.model(kind), batches, expected)


def verdicts_of_rank(name: str) -> dict[str, Verdict]:
    """All cases of a pass, by door and model, in a process of a group."""
    doors = DOORS[1:] if ROWS[name].refused else DOORS
    return {f"{door}, {kind}": verdict_of(name, door, kind) for door in doors for kind in MODELS}


def drop_in(name: str, model: nn.Module, batches: Sequence[Batch], expected: Training) -> Verdict:
    row = ROWS[name]
    optimized = graphopt.optimize(model, row.passes)
    found = trained(optimized, row, batches, Eager())

    def call() -> None:
        optimized.zero_grad()
        optimized(*batches[0]).backward()

    wrong = differences(expected, found, row.eager().within)
    call()  # gradients are there, and given back before the next ones are made
    return verdict(name, wrong, optimized.program, call, optimized.records)


def whole_step(name: str, model: nn.Module, batches: Sequence[Batch], expected: Training) -> Verdict:
    row, found = ROWS[name], Training()
    optimizer = OPTIMIZERS[row.optimizer](model.parameters())
    step = graphopt.optimize_step(model, optimizer, row.passes)
    torch.manual_seed(1)
    for number, batch in enumerate(batches):
        found.add(f"{number}.loss", step(*batch))
    with step.whole_parameters():
        found.end(model, optimizer)
    if row.sharded:
        found, expected = without_state(found), without_state(expected) if dist.get_rank() else expected
        found.add("optimizer", step.full_state_dict().get("optimizer", {}).get("state", {}))  # the first rank has it
    wrong = differences(expected, found, row.eager().within, skip=".gradient.")
    return verdict(name, wrong, step.program, lambda: step(*batches[0]), step.records)


def trained(model: nn.Module, row: Row, batches: Sequence[Batch], own: Eager) -> Training:
    """What a plain loop with ``own`` code left behind."""
    optimizer, found = OPTIMIZERS[row.optimizer](model.parameters()), Training()
    torch.manual_seed(1)
    for number, batch in enumerate(batches):
        optimizer.zero_grad()
        with own.forward():
            loss = model(*batch)
        loss.backward()
        own.gradients(model, number)
        found.add(f"{number}.loss", loss)
        for name, parameter in model.named_parameters():
            found.add(f"{number}.gradient.{name}", parameter.grad)
        optimizer.step()
        own.updated(model, number)
    return found.end(model, optimizer)


def without_state(training: Training) -> Training:
    """The same without the state of the optimizer."""
    kept = [
        {name: value for name, value in values.items() if not name.startswith("optimizer.")}
        for values in (training.tensors, training.values)
    ]
    return Training(*kept)


def differences(expected: Training, found: Training, within: float, *, skip: str = "\n") -> list[str]:
    """Names of what one training left behind and the other not, or not as near as it has to be."""
    wrong = [
        name
        for name, value in expected.tensors.items()
        if skip not in name and not near(value, found.tensors.get(name), within)
    ]
    names = {name for name in {**expected.tensors, **expected.values} if skip not in name}
    return wrong + sorted(names ^ {*found.tensors, *found.values})


def near(one: torch.Tensor, other: torch.Tensor | None, within: float) -> bool:
    """The same bits, or so near by the largest element."""
    if not within or other is None or not one.is_floating_point():
        return identical(one, other)
    return bool((one - other).abs().max() <= within * one.abs().max())


def verdict(name: str, wrong: Sequence[str], program: Program, call: Call, records: Sequence[PassRecord]) -> Verdict:
    record = next(record for record in records if record.name == name)
    # Threads of an exchange may let go of what they sent a moment after it has arrived: then a run counts it twice.
    measured = [graphopt.measure_peak(call).allocated_peak_bytes for _ in range(4 if ROWS[name].ranks > 1 else 1)]
    return Verdict(
        wrong=wrong,
        predicted=program.memory().allocated_peak_bytes,
        measured=min(measured),
        record=str(record),
        did=bool(record.changed),
    )
