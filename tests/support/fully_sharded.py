"""Models after ``fully_shard``, trained by FSDP2 alone and with programs, and how far apart they are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import graphopt

__all__ = [
    "CASES", "MORE_CASES", "MORE_STEPS", "STEPS", "Case", "Net", "by_mesh", "far_apart", "fully_sharded",
    "loss_of", "whole_loss",
]  # fmt: skip


class Net(nn.Module):
    """An embedding, two blocks with dropout, and a head, of sizes that ranks divide evenly or not."""

    def __init__(self, width: int, tied: bool, dropout: float) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, width), nn.GELU(), nn.Linear(width, 8), nn.Dropout(dropout))
            for _ in range(2)
        )
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


def loss_of(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Cross entropy over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())


def whole_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The loss of a batch, as a whole step takes it."""
    return loss_of(model(x), y)


@dataclass(frozen=True)
class Case:
    """One way to give a model to ``fully_shard``, and passes.

    Attributes:
        passes: as text.
        width: of the blocks.
        tied: whether embedding and head share their weight.
        frozen: whether one weight of a block is.
        dropout: of the blocks; on a CPU eager mode rounds it otherwise in half precision than a trace does.
        checkpoint: where a wrapper for activation checkpointing is: ``inside`` or ``outside`` of ``fully_shard``.
        backwards: how many are accumulated for an update.
        waits: whether gradients are reduced in the last of them only.
        policy: for mixed precision, of the blocks and of the whole.
        mesh: in two dimensions, replicated and sharded.
        together: whether the last block and the head were given to one ``fully_shard``.
        late: whether ``optimize`` comes before ``fully_shard``.
        options: of ``fully_shard``.
        tokens: of each row of a batch.
    """

    passes: str = ""
    width: int = 6
    tied: bool = False
    frozen: bool = False
    dropout: float = 0.1
    checkpoint: str = ""
    backwards: int = 1
    waits: bool = False
    policy: tuple[MixedPrecisionPolicy, MixedPrecisionPolicy] | None = None
    mesh: tuple[int, int] | None = None
    together: bool = False
    late: bool = False
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    tokens: int = 7

    def batch_of(self, rank: int) -> int:
        """Which batch a rank has."""
        return rank


def _half(**roots: Any) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy]:
    half, single = torch.bfloat16, torch.float32
    return MixedPrecisionPolicy(half, single), MixedPrecisionPolicy(half, single, **roots)


CASES = {
    "rows that ranks do not divide, tied": Case(width=5, tied=True),
    "bfloat16, whole parameters stay": Case(
        dropout=0.0, policy=_half(output_dtype=torch.float32), options={"reshard_after_forward": False}
    ),
    "gradients wait, bfloat16": Case(backwards=3, waits=True, dropout=0.0, policy=_half()),
    "optimized before, checkpoint outside, frozen": Case(
        frozen=True, late=True, checkpoint="outside", passes="fit-memory{budget=90%}"
    ),
}
"""Drop-in, by name."""

STEPS = {
    "rows that ranks do not divide, FitMemory": Case(width=5, passes="fit-memory{budget=85%}"),
}
"""Whole steps, by name."""

MORE_CASES = {
    "float32": Case(),
    "FitMemory, frozen": Case(frozen=True, passes="fit-memory{budget=85%}"),
    "accumulated": Case(backwards=2),
    "gradients wait": Case(backwards=2, waits=True),
    "gradients wait, FitMemory, tied, frozen": Case(
        backwards=3, waits=True, width=5, tied=True, frozen=True, passes="fit-memory{budget=90%}"
    ),
    "gradients wait, two modules together": Case(backwards=2, waits=True, together=True),
    "two modules together": Case(together=True, passes="fit-memory{budget=90%}"),
    "two modules together, bfloat16": Case(together=True, dropout=0.0, policy=_half(output_dtype=torch.float32)),
    "bfloat16, rows that ranks do not divide": Case(width=5, dropout=0.0, policy=_half()),
    "checkpoint inside": Case(checkpoint="inside", passes="fit-memory{budget=90%}"),
    "Recompute": Case(passes="recompute{checkpoints=blocks.*}"),
    "Offload": Case(passes="offload{tier=disk min-bytes=1}"),
    "optimized before": Case(late=True),
    "on the host": Case(options={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
}
"""More of the same, for `make sweep`."""

MORE_STEPS = {
    "accumulated, frozen": Case(backwards=2, frozen=True, passes="fit-memory{budget=92%}"),
    "float32": Case(),
    "tied": Case(tied=True, width=5),
    "bfloat16": Case(dropout=0.0, policy=_half()),
    "Recompute": Case(passes="recompute{checkpoints=blocks.*}"),
    "OffloadState": Case(passes="offload-state{min-bytes=1}"),
}


def fully_sharded(case: Case, optimized: Callable[[nn.Module], nn.Module] = lambda model: model) -> nn.Module:
    """A model after ``fully_shard``, the same on every rank; ``optimized`` is applied before or behind that."""
    torch.manual_seed(0)
    model: Any = Net(case.width, case.tied, case.dropout)
    model.blocks[0][1].weight.requires_grad_(not case.frozen)
    if case.late:
        model = optimized(model)
    options = dict(case.options)
    if case.mesh is not None:
        options["mesh"] = init_device_mesh("cpu", case.mesh, mesh_dim_names=("replicated", "sharded"))
    of_blocks, of_root = ({"mp_policy": each} for each in case.policy) if case.policy else ({}, {})
    for place, block in enumerate(list(model.blocks)[: 1 if case.together else None]):
        if case.checkpoint == "inside":
            block = model.blocks[place] = checkpoint_wrapper(block)
        fully_shard(block, **options, **of_blocks)
        if case.checkpoint == "outside":
            model.blocks[place] = checkpoint_wrapper(block)
    if case.together:
        fully_shard([model.blocks[1], model.head], **options, **of_blocks)
    fully_shard(model, **options, **of_root)
    return model if case.late else optimized(model)


def far_apart(
    case: Case, *, step: bool = False, updates: int = 2, make: Callable[..., nn.Module] = fully_sharded
) -> dict[str, Any]:
    """Train as torch does and with programs side by side, and say where they differ, the worst of all ranks.

    Args:
        case: what is trained.
        step: as a whole step.
        updates: of the optimizer, with evaluation behind each.
        make: the model, as ``fully_sharded`` does.
    """
    logging.getLogger("graphopt").setLevel(logging.ERROR)
    theirs = make(case)
    ours = make(case, (lambda m: m) if step else (lambda m: graphopt.optimize(m, case.passes or ())))
    optimizers = [torch.optim.AdamW(by_mesh(model), lr=0.05, fused=True) for model in (theirs, ours)]
    run: Any = None
    if step:
        run = graphopt.optimize_step(ours, optimizers[1], case.passes or (), loss=whole_loss)
        run.accumulate(case.backwards)
    generator = torch.Generator().manual_seed(case.batch_of(dist.get_rank()))
    x, y = torch.randint(0, 11, (2, 4, case.tokens), generator=generator)
    far: dict[str, float] = {}

    def compare(what: str, one: Sequence[Any], other: Sequence[Any]) -> None:
        for a, b in zip(one, other, strict=True):
            assert type(a) is type(b), f"{what}: {type(a).__name__} and {type(b).__name__}"
            a, b = (t.full_tensor() if hasattr(t, "full_tensor") else t.detach() for t in (a, b))
            far[what] = max(far.get(what, 0.0), 0.0 if torch.equal(a, b) else float((a - b).abs().max()))

    for number in range(updates * case.backwards):
        last = (number + 1) % case.backwards == 0
        _let_wait(case, last, theirs, ours)
        torch.manual_seed(10 * number + dist.get_rank())
        loss = whole_loss(theirs, x, y)
        (loss / case.backwards if step else loss).backward()
        torch.manual_seed(10 * number + dist.get_rank())
        if step:
            other = run(x, y)
        else:
            other = whole_loss(ours, x, y)
            other.backward()
            compare("gradients", *_gradients(theirs, ours))
        compare("loss", [loss.detach()], [other.detach()])
        if last:
            for optimizer in optimizers[: 1 if step else 2]:
                optimizer.step()
                optimizer.zero_grad()
        compare("parameters", list(theirs.parameters()), list(ours.parameters()))
        for (_, one), (_, two) in zip(optimizers[0].state.items(), optimizers[1].state.items(), strict=True):
            compare("state", list(one.values()), list(two.values()))
        with torch.no_grad():
            compare("evaluation", [theirs.eval()(x)], [ours.eval()(x)])
        theirs.train(), ours.train()
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, far)
    records = (run if step else ours).records if case.passes else ()
    return {
        "far": {what: max(each[what] for each in everything) for what in far},
        "records": [str(record.name) for record in records],
        "lower": all(record.peak_after <= record.peak_before for record in records),
    }


def _let_wait(case: Case, last: bool, *models: Any) -> None:
    for model in models if case.waits else ():
        model.set_requires_gradient_sync(last)


def _gradients(theirs: nn.Module, ours: nn.Module) -> tuple[list[Any], list[Any]]:
    """The gradients of both, which the same parameters have."""
    pairs = [(p.grad, q.grad) for p, q in zip(theirs.parameters(), ours.parameters(), strict=True)]
    assert all((a is None) == (b is None) for a, b in pairs)
    return [a for a, _ in pairs if a is not None], [b for _, b in pairs if b is not None]


def by_mesh(model: nn.Module) -> list[dict[str, Any]]:
    """Groups of trained parameters that one fused kernel takes: all of them on one mesh of ranks, or on none."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{"params": members} for members in groups.values()]
