"""Ranks that fail on purpose: killed, hanging or raising at a chosen step and phase, and what the others say."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, final

import torch
import torch.distributed as dist
from torch import nn

import graphopt
from graphopt import Changed, Pass, Phase, Program
from graphopt.errors import RankError
from graphopt.ir.node import value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.communication.collectives import ALL_REDUCE, REDUCE_SCATTER_SUM
from graphopt.passes import DataParallel, DeepGradientCompression, ShardOptimizer, ShardParameters
from graphopt.rewriting.distributed.choice import sparse_or_dense as choice
from graphopt.rewriting.pass_ import Numerics, PassStage
from graphopt.runtime.checkpoints import checkpoint, checkpoint_folder, checkpoint_formats
from graphopt.runtime.state import sharded_model
from tests.support.forking import end, start

_EXCHANGES = (ALL_REDUCE, REDUCE_SCATTER_SUM)

_step = 0
"""The step that this process is in, from 1; a pass's op is also run once where its memory is measured."""


@torch.library.custom_op("graphopt_tests::fail", mutates_args=())
def fail(x: torch.Tensor, how: str, step: int, rank: int) -> torch.Tensor:
    """A copy of ``x``; at the given step of the given rank it ends the process, hangs or raises instead."""
    if _step == step and dist.get_rank() == rank:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
        if how == "exit":
            raise SystemExit(0)
        if how == "hang":
            time.sleep(600)
        raise ValueError("this batch is broken")
    return x.clone()


@fail.register_fake
def _(x: torch.Tensor, how: str, step: int, rank: int) -> torch.Tensor:
    return torch.empty_like(x)


@final
@dataclass(frozen=True)
class FailAt(Pass):
    """Put ``fail`` into a phase: into forward, in front of the second exchange, or in front of the update."""

    name: ClassVar[str] = "fail-at"
    stage: ClassVar[PassStage] = "last"
    numerics: ClassVar[Numerics] = "bitwise"

    phase: str
    step: int
    rank: int
    how: str = "kill"

    def apply(self, program: Program) -> Changed:
        phase = Phase(self.phase)
        exchanges = [node for node in program.graph.nodes if node.target in _EXCHANGES]
        if phase is not Phase.FORWARD and len(exchanges) < 2:
            return Changed(reason="a batch that is accumulated has no update", satisfied=True)
        if phase is Phase.SYNC:
            reader = exchanges[1]
            value = next(source for source in reader.all_input_nodes if _computed(source))
        else:
            reads = [(node, source) for node in program.phase_nodes(phase) for source in node.all_input_nodes]
            reader, value = next(pair for pair in reads if _computed(pair[1]))
        new = program.insert(
            torch.ops.graphopt_tests.fail.default, (value, self.how, self.step, self.rank),
            before=reader, phase=phase, like=value, origin="fail-at",
        )  # fmt: skip
        reader.replace_input_with(value, new)
        return Changed(counts={"calls that fail": 1})


def _computed(node: torch.fx.Node) -> bool:
    """Whether a call reads its operand as well from a copy: one that is no part of an input, to which it may write."""
    value = value_of(node)
    computed = schema.storage_root(node).op == "call_function"
    return computed and isinstance(value, torch.Tensor) and value.is_floating_point()


@dataclass(frozen=True)
class FailSaving:
    """A rank that fails while all save a checkpoint, load one, or gather parameters, outside of a step.

    Attributes:
        moment: in ``graphopt.checkpoint.save``: ``packed``, while its state is put together; ``written``, while it
            writes; ``finished``, while rank 0 puts the checkpoint in its place. In ``load``: ``read``. And
            ``gathered``: in ``whole_parameters``.
        step: behind which, from 1; 0 for what is in front of the first one, or behind the last.
        rank: which one.
        how: ``kill`` or ``hang``.
    """

    moment: str
    step: int
    rank: int
    how: str = "kill"

    def arm(self) -> None:
        """Let this process fail there."""
        owner, name = {
            "packed": (checkpoint, "pack"),
            "written": (checkpoint_formats.FileSystemWriter, "write_data"),
            "finished": (checkpoint_folder, "_finish"),
            "read": (checkpoint, "_read"),
            "gathered": (sharded_model, "become_whole"),
        }[self.moment]
        plain = getattr(owner, name)

        def failing(*args: Any) -> Any:
            if _step == self.step:
                if self.how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(600)
            return plain(*args)

        setattr(owner, name, failing)


@dataclass(frozen=True)
class Task:
    """What each rank of a group does.

    Attributes:
        folder: for the group's store, saved states and results.
        steps: how many it makes; by rank, where they differ.
        fail: the pass that makes one rank fail, or where it fails while it saves, if it does.
        resume: continue from the last state that every rank has saved.
        address: of a store over TCP; a file in the folder otherwise.
        timeout: of the group, in seconds.
        way: ``whole step``, ``drop-in``, ``shard-optimizer``, ``shard-parameters`` (saved by ``graphopt.checkpoint``),
            or ``sparse``: a whole step whose ranks measure their links first.
        early: what rank 1 does in place of its first step, when all are connected: ``die`` or ``hang``; or ``die when
            measured``: while the links are measured.
        patience: for how many seconds a rank may give no sign of life.
    """

    folder: Path
    world: int = 2
    steps: tuple[int, ...] = (6,)
    fail: FailAt | FailSaving | None = None
    resume: bool = False
    address: str = ""
    timeout: float = 60.0
    way: str = "whole step"
    early: str = ""
    patience: float = 4.0


@dataclass(frozen=True)
class Outcome:
    """How a task ended.

    Attributes:
        found: by rank, a mapping with ``parameters`` or ``error``; None where the rank left nothing behind.
        codes: by rank, the exit status; None for a rank that was still alive at the end.
    """

    found: list[Any]
    codes: list[int | None]


def run_tasks(tasks: Mapping[str, Task]) -> dict[str, Outcome]:
    """Run tasks at the same time, each rank in a process of its own; how each of them ended.

    Ranks that hang are killed when all others have ended.
    """
    ranks = [(name, rank) for name, task in tasks.items() for rank in range(task.world)]
    for task in tasks.values():
        task.folder.mkdir(parents=True, exist_ok=True)
    processes = start(_rank, [(tasks[name], rank) for name, rank in ranks])
    codes = dict(zip(ranks, end(processes, alive=[_hangs(tasks[name], rank) for name, rank in ranks]), strict=True))
    return {
        name: Outcome(
            [torch.load(f, weights_only=False) if f.exists() else None for f in _results(task)],
            [codes[name, rank] for rank in range(task.world)],
        )
        for name, task in tasks.items()
    }


def _hangs(task: Task, rank: int) -> bool:
    late = task.fail is not None and task.fail.how == "hang" and task.fail.rank == rank
    return late or (task.early == "hang" and rank == 1)


def _results(task: Task) -> list[Path]:
    return [task.folder / f"result-{rank}{'-resumed' if task.resume else ''}.pt" for rank in range(task.world)]


def _rank(task: Task, rank: int) -> None:
    torch.set_num_threads(1)
    os.environ["GRAPHOPT_RANK_TIMEOUT"] = str(task.patience)
    store = f"tcp://{task.address}" if task.address else f"file://{task.folder / ('again' if task.resume else 'store')}"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=task.world,
        timeout=datetime.timedelta(seconds=task.timeout),
    )  # fmt: skip
    (task.folder / f"connected-{rank}").touch()
    while task.early and not all((task.folder / f"connected-{other}").exists() for other in range(task.world)):
        time.sleep(0.01)
    if rank == 1 and task.early == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and task.early == "hang":
        time.sleep(600)
    if rank == 1 and task.early == "die when measured":
        choice.largest_of_all = lambda *given: os.kill(os.getpid(), signal.SIGKILL)
    try:
        found: Mapping[str, Any] = {"parameters": _train(task, rank)}
    except RankError as error:
        found = {"error": str(error), "ranks": error.ranks, "cause": str(error.__cause__)}
    except ValueError as error:
        found = {"error": str(error)}
    torch.save(found, _results(task)[rank])


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4)
    )


def _loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y)


def _batch(number: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(8, 16, generator=generator), torch.randint(4, (8,), generator=generator)


def _train(task: Task, rank: int) -> torch.Tensor:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    passes: list[Pass] = [DataParallel(bucket_mb=0.01, first_bucket_mb=0.001)]
    if task.way == "sparse":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        passes.append(DeepGradientCompression(min_elements=1000, rampup_step=1, bandwidth="measured"))
    passes += {"shard-optimizer": [ShardOptimizer()], "shard-parameters": [ShardParameters(min_bytes=0)]}.get(
        task.way, []
    )
    if isinstance(task.fail, FailAt):
        passes.append(task.fail)
    elif task.fail is not None and task.fail.rank == rank:
        task.fail.arm()
    steps = task.steps[min(rank, len(task.steps) - 1)]
    if task.way == "drop-in":
        parallel = graphopt.optimize(model, passes)
        for number in _numbers(0, steps):
            _loss(parallel, *_batch(number, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return _flat(model)
    step = graphopt.optimize_step(model, optimizer, passes, loss=_loss)
    first = _load(task, rank, model, optimizer, step) if task.resume else 0
    for number in _numbers(first, steps):
        step(*_batch(number, rank))
        _save(task, rank, number + 1, model, optimizer, step)
    with step.whole_parameters() if task.way == "shard-parameters" else contextlib.nullcontext():
        return _flat(model)


def _numbers(first: int, last: int) -> Iterator[int]:
    global _step
    for number in range(first, last):
        _step = number + 1
        yield number
    _step = 0


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([tensor.detach().double().flatten() for tensor in model.state_dict().values()])


def _save(task: Task, rank: int, done: int, *parts: Any) -> None:
    if task.way == "shard-parameters":
        graphopt.checkpoint.save(task.folder / "checkpoints", {"step": parts[-1], "done": done})
        return
    file = task.folder / f"{done}-{rank}.state"
    torch.save([part.state_dict() for part in parts], file.with_suffix(".part"))
    file.with_suffix(".part").rename(file)


def _load(task: Task, rank: int, *parts: Any) -> int:
    """Restore the last state that every rank has saved; how many steps it is behind."""
    if task.way == "shard-parameters":
        values = graphopt.checkpoint.load(task.folder / "checkpoints", {"step": parts[-1], "done": 0})
        return int(values["done"])
    saved = [{int(f.name.split("-")[0]) for f in task.folder.glob(f"*-{other}.state")} for other in range(task.world)]
    last = max(set.intersection(*saved))
    for part, state in zip(parts, torch.load(task.folder / f"{last}-{rank}.state", weights_only=False), strict=True):
        part.load_state_dict(state)
    return last


def resumed(task: Task) -> Task:
    """The same task again behind a failure: nothing fails any more, and every rank continues."""
    return replace(task, fail=None, resume=True)
