"""Ranks that run out of batches before others: they go on with the exchanges, and their gradients count no more."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from graphopt import _torch
from graphopt.errors import GraphoptError
from graphopt.ir.ops.communication.groups import Group, find_group, talking
from graphopt.ir.program import Program
from graphopt.rewriting.pipeline import Pipeline
from graphopt.rewriting.training_pass import TrainingPass
from graphopt.runtime.programs.accumulate import WEIGHT
from graphopt.runtime.state.state_store import StateStore

__all__ = ["UnevenEnds", "joined_group"]

Batch = tuple[tuple[Any, ...], Mapping[str, Any]]


def joined_group(pipeline: Pipeline) -> Group | None:
    """The group over which gradients are averaged; None with one process, or without a pass that does.

    Raises:
        GraphoptError: for passes that let parameters differ between ranks for a while (``TrainingPass.settle``).
    """
    settling = (current.name for current in pipeline.training if type(current).settle is not TrainingPass.settle)
    wrong = next(settling, None)
    if wrong is not None:
        raise GraphoptError(
            f"join takes the mean of gradients over the ranks that still have batches, and {wrong} lets ranks train by "
            "themselves: give every rank as many batches"
        )
    exchanging = next((current for current in pipeline.passes if current.name == "data-parallel"), None)
    if exchanging is None or not dist.is_initialized():
        return None
    if getattr(exchanging, "groups", ()):
        raise GraphoptError("join needs one group for all gradients, and data-parallel has several (groups=)")
    group = find_group(str(getattr(exchanging, "group", "")))
    return group if group.size > 1 else None


@dataclass(frozen=True, slots=True)
class _Said:
    """What all ranks together have at one call.

    Attributes:
        active: how many have a batch.
        rows: in all of these.
        uneven: whether these are of several sizes.
        lost: whether a rank without a batch cannot go on.
    """

    active: int
    rows: int
    uneven: bool
    lost: bool


class UnevenEnds:
    """Lets ranks end at different times.

    Args:
        group: whose gradients are averaged.
        model: that is trained.
        store: has the weight of this rank's gradients.
        meeting: around what ranks tell each other.
        example: a batch for a rank that gets none at all.
        by_rows: weigh ranks by the rows of their batches; they count alike otherwise.
    """

    def __init__(
        self,
        group: Group,
        model: nn.Module,
        store: StateStore,
        meeting: Callable[[], contextlib.AbstractContextManager[None]],
        example: Batch | None,
        by_rows: bool,
    ) -> None:
        self._group, self._model, self._store, self._meeting = group, model, store, meeting
        self._batch, self._by_rows = example, by_rows
        self._device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._ended = self._uneven = False
        self._weight = 1.0

    def announce(self, batch: Batch) -> bool:
        """Before a call with a batch; returns whether ranks weigh differently in it.

        Raises:
            GraphoptError: where a rank that has ended cannot take part.
        """
        if self._ended:
            return self._uneven
        self._batch = batch
        self._agree(_rows(batch) if self._by_rows else 1)
        return self._uneven

    def put_weight(self, program: Program) -> None:
        """Set the weight that a program reads, where it reads one."""
        if WEIGHT in program.pass_state:
            self._store[WEIGHT].fill_(self._weight)

    def go_on(self, run: Callable[..., object]) -> None:
        """Behind the last batch of this rank: take part in the others' steps until all of them have ended.

        Args:
            run: the step.
        """
        self._ended = True
        while self._agree(0).active:
            assert self._batch is not None
            with self._same_buffers():
                run(*self._batch[0], **self._batch[1])

    def _agree(self, rows: int) -> _Said:
        lost = rows == 0 and self._batch is None
        found = self._tell(rows, lost)
        if found.active and found.lost:
            raise GraphoptError(
                "a rank has had no batch at all, so that it cannot take part in the others' steps"
                + (": this one; give join(example=batch)" if lost else "; give join(example=batch) there")
            )
        self._uneven = found.active < self._group.size or found.uneven
        self._weight = rows * self._group.size / max(found.rows, 1) if self._uneven else 1.0
        return found

    def _tell(self, rows: int, lost: bool) -> _Said:
        told = torch.tensor([rows > 0, rows, rows**2, lost], dtype=torch.float64, device=self._device)
        with self._meeting(), talking():
            dist.all_reduce(told, group=self._group.handle)
        active, total, squares, without = (int(number) for number in told.tolist())
        return _Said(active, total, active * squares != total**2, without > 0)

    @contextlib.contextmanager
    def _same_buffers(self) -> Iterator[None]:
        """Leave the model's buffers as they are: what forward does to them here counts no more."""
        kept = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        yield
        with torch.no_grad():
            for buffer, values in kept:
                buffer.copy_(values)


def _rows(batch: Batch) -> int:
    """The size of the first axis of the first tensor of a batch."""
    tensors = [leaf for leaf in _torch.pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if not tensors or not tensors[0].shape[0]:
        raise GraphoptError("join(by_rows=True) weighs by the rows of a batch, and this one has no tensor with rows")
    return int(tensors[0].shape[0])
