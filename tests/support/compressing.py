"""What several processes run to try DeepGradientCompression, each in its own; what they find is a dict, by name.

``compressing_published.py`` and ``compressing_momentum.py`` have what it is compared with.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

import graphopt
from graphopt import Pass
from graphopt.ir.ops.communication.selection import select
from graphopt.passes import DataParallel, DeepGradientCompression, FuseUpdate, MixedPrecision, Recompute, ScaleLoss
from graphopt.rewriting.distributed.sparse import sparse_update
from graphopt.runtime.state.state_dict import plain_state
from graphopt.runtime.step.train_step import TrainStep

NAME = "deep-gradient-compression"
RAMP: dict[str, Any] = {"sparsity": (0.9, 0.98), "rampup_begin_step": 1, "rampup_step": 4, "min_elements": 500}
F64 = torch.float64
Found = dict[str, Any]


class Net(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32, bias=False)
        self.last = nn.Linear(32, 4)
        if tied:
            self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


def build(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    torch.manual_seed(0)
    return Net(**options).to(dtype)


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor, poison: torch.Tensor | None = None) -> torch.Tensor:
    value = nn.functional.cross_entropy(model(x), y)
    return value if poison is None else value + (poison * model.second.weight).sum()  # one gradient is not finite


def batch(
    number: int, dtype: torch.dtype = torch.float32, rank: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of this rank, or of another one."""
    generator = torch.Generator().manual_seed(100 * number + (dist.get_rank() if rank is None else rank))
    return torch.randn(8, 32, generator=generator).to(dtype), torch.randint(4, (8,), generator=generator)


def sgd(model: nn.Module, lr: float = 0.1, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, foreach=True, **options)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def made(model: nn.Module, optimizer: torch.optim.Optimizer, *passes: Pass) -> TrainStep:
    exchange = DataParallel(bucket_mb=0.005, first_bucket_mb=0)
    return graphopt.optimize_step(model, optimizer, [exchange, *passes], loss=loss)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in model.parameters()])


def furthest(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one - other).abs().max().item()


def gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor.contiguous())
    return found


def same_on_all(model: nn.Module) -> bool:
    own = flat(model)
    return bool(own.isfinite().all()) and all(torch.equal(own, other) for other in gathered(own))


def held(step: TrainStep, what: str) -> dict[str, torch.Tensor]:
    found = plain_state(step.state_dict())["held"]
    return {name: tensor for name, tensor in found.items() if f"{NAME}/{what}" in name}


def calls(step: TrainStep) -> list[str]:
    return [str(node.target) for node in step.program.graph.nodes]


def touching_entries() -> Any:
    """Inside, updates touch the entries that arrive alone, however many they are of tensors as small as these."""
    return mock.patch.object(sparse_update, "FEWEST", 2)


def bits(states: Any) -> Any:
    """The same with bytes for tensors, to be compared."""
    return pytree.tree_map(lambda value: value.numpy().tobytes() if isinstance(value, torch.Tensor) else value, states)


# --- equal parameters on all ranks -----------------------------------------------------------------------------------


def dgc(**options: Any) -> DeepGradientCompression:
    return DeepGradientCompression(**{**RAMP, **options})


WAYS = {
    "plain": lambda: (build(), sgd, [dgc()], 1),
    "nesterov, clipping, decay": lambda: (build(), sgd, [dgc(nesterov=True, clip_norm=0.1, weight_decay=0.01)], 1),
    "no masking, bfloat16 wire": lambda: (build(), sgd, [dgc(masking=False, wire="bfloat16")], 1),
    "feedback, float16 wire": lambda: (build(), adamw, [dgc(correction="feedback", wire="float16")], 1),
    "bfloat16, O2": lambda: (build(), sgd, [dgc(), MixedPrecision(level="O2")], 1),
    "bfloat16, O1": lambda: (build(), sgd, [dgc(), MixedPrecision()], 1),
    "float16": lambda: (build(), sgd, [dgc(clip_norm=1.0), MixedPrecision("float16")], 1),
    "accumulated": lambda: (build(), sgd, [dgc()], 3),
    "tied": lambda: (build(tied=True), sgd, [dgc()], 1),
    "with other passes": lambda: (build(), sgd, [dgc(), FuseUpdate(), Recompute(("first", "second"))], 1),
    "bfloat16 parameters": lambda: (build(torch.bfloat16), sgd, [dgc()], 1),
}
ENTRIES = ("plain", "nesterov, clipping, decay", "bfloat16, O2", "float16", "accumulated")


def train(name: str) -> tuple[torch.Tensor, list[bool], bool, list[str]]:
    """Parameters at the end, whether ranks were equal after each step, whether anything moved, and what was called."""
    model, optimizer, passes, every = WAYS[name]()
    before, dtype = flat(model).clone(), next(model.parameters()).dtype
    step = made(model, optimizer(model), *passes).accumulate(every)
    same = []
    for number in range(6 * every):
        step(*batch(number, dtype))
        same.append(same_on_all(model))
    return flat(model), same, not torch.equal(before, flat(model)), calls(step)


def equal(names: Sequence[str], entries: Iterable[str]) -> Found:
    """Of ways to train; of ``entries`` again with updates that touch what arrives, beside those with dense sums."""
    said: Found = {}
    trained = {}
    for name in names:
        trained[name], same, moved, called = train(name)
        said[name] = [same, moved, sum("all_gather" in call for call in called)]
    for name in entries:
        with touching_entries():
            found, same, _, called = train(name)
        alone = any("sum_entries" in call for call in called)
        said[f"{name}, entries"] = [same, alone, furthest(found, trained[name])]
    if "with other passes" in trained:
        said["other passes change nothing"] = torch.equal(trained["plain"], trained["with other passes"])
    return said


# --- dense steps -----------------------------------------------------------------------------------------------------

MOMENTA: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.8, "weight_decay": 0.01, "nesterov": True},
}


def dense(name: str) -> Found:
    """Before the first sparsity parameters are those of SGD with momentum; the first sparse step goes on from it."""
    options = MOMENTA[name]
    whole, half, zero = build(), build(), build()
    theirs = sgd(whole, **options)
    late = DeepGradientCompression(**options, **{**RAMP, "rampup_begin_step": 6, "masking": False})
    ours = made(half, sgd(half), late)
    steps = made(whole, theirs), ours, made(zero, sgd(zero), DeepGradientCompression(sparsity=(0.0,), **options))
    same = []
    for number in range(6):
        for step in steps:
            step(*batch(number))
        same.append(torch.equal(flat(whole), flat(half)) and torch.equal(flat(whole), flat(zero)))
    scale = options["momentum"] if "nesterov" in options else 1.0
    buffers = {key: theirs.state[p]["momentum_buffer"] * scale for key, p in whole.named_parameters()}
    momenta = {key.rsplit("/", 1)[1]: u for key, u in held(ours, "momentum").items()}
    carried = all(torch.equal(momenta[key], buffers[key].flatten()) for key in buffers)
    gradient = torch.autograd.grad(loss(half, *batch(6)), half.second.weight)[0].flatten()
    gradient = gradient.add(half.second.weight.detach().flatten(), alpha=options.get("weight_decay", 0.0))
    before = momenta["second.weight"]
    ours(*batch(6))
    after = held(ours, "momentum/second.weight").popitem()[1]
    expected = (before + gradient) * scale if "nesterov" in options else before * options["momentum"] + gradient
    return {f"dense, {name}": [same, carried, furthest(after, expected)]}


# --- a gradient of one rank that is not finite -----------------------------------------------------------------------

CHECKED = {
    "float16": lambda: [MixedPrecision("float16", init_scale=1024.0)],
    "float32, checked": lambda: [ScaleLoss(init_scale=1.0, dynamic=False)],
}


def poisoned(*passes: Pass) -> tuple[Found, list[str], bool]:
    model = build()
    step = made(model, sgd(model), *passes)
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("graphopt").addHandler(handler)
    found: Found = {}
    for number in range(7):
        poison = torch.tensor(float("inf") if number == 4 and dist.get_rank() == 1 else 0.0)
        before = (flat(model).clone(), held(step, "") if number else {})
        step(*batch(number), poison)
        if number == 4:
            found["before"], found["after"] = before, (flat(model).clone(), held(step, ""))
            state = step.state_dict()["held"]
            found["scale"] = {key: value.item() for key, value in state.items() if "loss-scale" in key}
    logging.getLogger("graphopt").removeHandler(handler)
    return found, [line for line in warnings if "not finite" in line], same_on_all(model)


def skipped(name: str) -> Found:
    found, warned, same = poisoned(dgc(rampup_step=8), *CHECKED[name]())
    (old, before), (new, after) = found["before"], found["after"]
    kept = len(before) > 3 and all(torch.equal(after[key], value) for key, value in before.items())
    moving = all(bool(value.any()) for key, value in before.items() if "residual" in key)
    return {f"skipped, {name}": [kept, torch.equal(new, old), moving, same, found["scale"], warned]}


def left_out() -> Found:
    found, warned, same = poisoned(dgc(rampup_step=8))
    key = f"{NAME}/residual/second.weight"
    old_u, old_v = (found["before"][1][key.replace("residual", what)] for what in ("momentum", "residual"))
    new_u, new_v = (found["after"][1][key.replace("residual", what)] for what in ("momentum", "residual"))
    indices = select(old_v, 102)[0].long()
    masked_u, rest_v = old_u.clone(), old_v.clone()
    masked_u[indices], rest_v[indices] = 0.0, 0.0
    return {"left out": [torch.equal(new_u, masked_u), torch.equal(new_v, rest_v), same, warned]}


# --- going on in other processes -------------------------------------------------------------------------------------

KINDS: dict[str, Any] = {
    "momentum": (sgd, {"nesterov": True, "clip_norm": 0.5}),
    "feedback": (adamw, {"correction": "feedback", "wire": "bfloat16"}),
}


def place(folder: str, kind: str) -> Path:
    return Path(folder, f"{kind}-{dist.get_rank()}.pt")


def start(kind: str) -> list[Any]:
    """Model, optimizer and step, all of which have a state."""
    make, options = KINDS[kind]
    model = build()
    optimizer = make(model)
    return [model, optimizer, made(model, optimizer, dgc(rampup_step=6, **options))]


def states(owners: Sequence[Any]) -> list[Any]:
    return [owner.state_dict() for owner in owners]


def save(folder: str) -> Found:
    """In the middle of the warm-up, and at the end."""
    for kind in KINDS:
        owners = start(kind)
        for number in range(3):
            owners[2](*batch(number))
        torch.save(copy.deepcopy(states(owners)), place(folder, kind))
        for number in range(3, 9):
            owners[2](*batch(number))
        torch.save(states(owners), place(folder, f"{kind}, whole"))
    return {}


def load(folder: str) -> Found:
    """Go on from what was saved, to what came of it there."""
    said: Found = {}
    for kind in KINDS:
        owners = start(kind)
        for owner, state in zip(owners, torch.load(place(folder, kind)), strict=True):
            owner.load_state_dict(state)
        for number in range(3, 9):
            owners[2](*batch(number))
        said[kind] = bits(states(owners)) == bits(torch.load(place(folder, f"{kind}, whole")))
        said[f"{kind}, programs"] = list(owners[2].programs)
    return said
