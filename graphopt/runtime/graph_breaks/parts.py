"""A model that is not one graph, captured in parts: torch's Dynamo cuts, each part has a program, the rest is eager.

Dynamo runs the model's Python at each call as eager mode does, and hands over the graphs between the places where it
looks at values. A pass that keeps a program within so many bytes gets a share for each part. As the parts are met in
the first call, one by one, each has its smallest peak there; behind that call all of them are planned together.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from graphopt import _torch
from graphopt.capture.effects.side_effects import CAPTURE_LOCK, refuse_backward_hooks
from graphopt.errors import GraphBreakError
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import counted, format_bytes
from graphopt.rewriting.pass_ import Changed, PassRecord
from graphopt.runtime.compiled_joint import CompiledJoint
from graphopt.runtime.graph_breaks.cut_graphs import CutGraph, CutGraphs, calls_in_eager
from graphopt.runtime.runner import Runner

__all__ = ["Parts"]

logger = logging.getLogger(__name__)
capture_logger = logging.getLogger("graphopt.capture")


_BETWEEN = "eager code between them whose bytes are not counted"


@dataclass
class _Beyond:
    """A function that torch cuts no more: why, and how many calls ran none of its programs since."""

    why: str
    calls: int = 0


class Parts:
    """The parts of one optimized model.

    Args:
        original: the class that the model was made from.
        given: what its calls run, as a function of a model.
        runner: whose options, pipeline and pass state count.
        reason: why the model cannot be captured whole.

    Raises:
        GraphBreakError: where a pass cannot rewrite the parts one by one.
    """

    def __init__(
        self,
        original: type[nn.Module],
        given: Callable[..., Any],
        runner: Runner[CompiledJoint],
        reason: GraphBreakError,
    ) -> None:
        pipeline = runner.options.pipeline
        others = [
            each.name
            for each in pipeline.passes
            if not each.in_parts or each in pipeline.training or (each.has_limit and not reason.in_parts)
        ]
        if others or runner.serving.declared is not None:
            what = ", ".join(others) or "dynamic_shapes"
            raise GraphBreakError(f"{reason}\n  in parts: {what} cannot be applied to the parts of a model") from reason
        self._reason = reason
        self.given = given
        self._function = _torch.cut(given, self._cut) if reason.in_parts else given
        self._graphs = CutGraphs(self, runner, original.__name__)
        self._parts: list[CutGraph] = []
        self._names: dict[int, str] = {}
        self._model: Callable[[], nn.Module | None] = lambda: None
        self._resident = 0
        self._title = original.__name__
        self._made: Counter[CutGraph] = Counter()
        self._beyond: dict[int, _Beyond] = {}
        self._settled = self._told = False
        self._passes = len(runner.options.pipeline.passes)

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs of the parts, in the order in which they were met."""
        return tuple(part.compiled.rewritten.program for part in self._parts if part.compiled is not None)

    @property
    def captured(self) -> int:
        """How many parts have a program so far."""
        return sum(part.compiled is not None for part in self._parts)

    @property
    def records(self) -> list[PassRecord]:
        """Why the model is in parts and what runs in eager mode; then what passes did, part by part."""
        as_they_are = self._graphs.as_they_are
        lines = [_first_lines(self._reason), _BETWEEN, *(f"runs in eager mode: {graph.why}" for graph in as_they_are)]
        lines += [f"{calls_in_eager(each.calls)} since {each.why}" for each in self._beyond.values()]
        counts = {
            "parts with a program": len(self.programs),
            "parts in eager mode": len(as_they_are) + len(self._beyond),
        }
        changed = Changed(counts=counts, lines=tuple(lines))
        first = PassRecord("parts", "parts", "joint", "bitwise", changed, 0.0, 0, 0, None, None)
        return [first, *(record for part in self._parts for record in part.records)]

    def call(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a call of the model; those of several threads one after the other, as Dynamo may cut anew at any of them.

        Raises:
            CaptureError: for backward hooks of submodules, which a part would lose.
            GraphoptError: where passes keep programs within a limit that the parts together do not meet.
        """
        with CAPTURE_LOCK, _torch.cut_as_in_eager(not self._graphs.limited, self._goes_beyond):
            if not self._settled:
                self._look_at(model, args, kwargs)
            self._made.clear()
            self._model = weakref.ref(model)
            result = self._function(model, *args, **kwargs)
            self._count()
            ran = {part.function for part in self._made}
            for function, beyond in self._beyond.items():
                beyond.calls += function not in ran
        return result

    def begins(self, graph: CutGraph) -> None:
        """Take notice of a part that runs in the call of now."""
        if graph not in self._parts:
            self._settled = False
        self._made[graph] += 1

    def ran(self, graph: CutGraph, result: Any) -> None:
        """Nothing: the end of the model's call counts."""

    def goes_back(self, graph: CutGraph) -> None:
        """Nothing, likewise."""

    def names(self) -> dict[int, str]:
        """What the tensors of the model are called."""
        return self._names

    def subject(self) -> tuple[nn.Module, object]:
        """The model that is cut."""
        return self._model() or nn.Module(), None

    def _cut(self, graph: fx.GraphModule, _examples: Any) -> Callable[..., Any]:
        """What torch calls a backend: takes one of Dynamo's graphs, and gives what runs in its place."""
        return self._graphs.take(graph)

    def _goes_beyond(self, where: str) -> bool:
        """Say that torch cuts a function no more, and runs it in eager mode; count the calls in which it does."""
        function = _torch.function_that_is_cut()
        if all(part.function != function for part in self._parts):
            return True  # of another model, in another thread
        why = f"{where} has had {_torch.MOST_GRAPHS} graphs, one for each size and value that it looked at"
        self._beyond[function] = _Beyond(why)
        logger.warning(
            "a part of %s runs in eager mode from now on, and its bytes are not counted: %s", self._title, why
        )
        return False

    def _look_at(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Remember what the model's tensors are called, and what is resident in any case."""
        refuse_backward_hooks(model)
        named = [*model.named_parameters(), *model.named_buffers()]
        self._names = {id(tensor): name for name, tensor in named}
        given = [leaf for leaf in _torch.pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        dense = (part for tensor in (*(t for _, t in named), *given) for part in _dense_parts(tensor))
        storages = {_torch.storage_key(part): part.untyped_storage().nbytes() for part in dense}
        self._resident = sum(storages.values())

    def _count(self) -> None:
        """Behind a call of the model: plan all parts together where there are new ones, or one runs more often."""
        if self._settled and all(count <= part.times for part, count in self._made.items()):
            return
        position, new = 0, []
        for part, count in self._made.items():
            if part not in self._parts:
                self._parts.insert(position, part)
                new.append(part)
            part.times = max(part.times, count)
            position = self._parts.index(part) + 1
        if self._graphs.limited and self._parts:
            self._plan()
        self._settled = True
        if new:
            self._log_capture(new)
        if not self._told:
            self._tell()

    def _log_capture(self, new: list[CutGraph]) -> None:
        """One line for the parts that a call has captured, as there is for each capture of a whole model."""
        made = [part.compiled.rewritten for part in new if part.compiled is not None]
        peak = max((rewritten.program.memory().peak_bytes for rewritten in made), default=0)
        loaded = sum(rewritten.loaded for rewritten in made)
        capture_logger.info(
            "%s: %s captured%s, largest peak of a part %s predicted, %s, %.1f s",
            self._title,
            counted(len(made), "parts"),
            f", {loaded} of them loaded from the cache" if loaded else "",
            format_bytes(peak),
            counted(self._passes, "passes") if self._passes else "no passes",
            sum(rewritten.seconds for rewritten in made),
        )

    def tell_beforehand(self) -> None:
        """Say that example inputs have captured nothing, since parts are met where the model runs."""
        logger.warning(
            "%s will run in parts, which are captured at its first call and not for the example inputs, since it "
            "cannot be captured whole: %s",
            self._title,
            _first_lines(self._reason),
        )

    def _tell(self) -> None:
        """Say once that the model is not one program; and before, that it has no part with a program so far."""
        self._told = bool(self._parts) or not self._reason.in_parts
        how = f"in parts, {len(self._parts)} so far, with {_BETWEEN}"
        logger.warning(
            "%s runs %s, since it cannot be captured whole: %s",
            self._title,
            how if self._parts else f"as it is in {'this call' if self._reason.in_parts else 'each call'}",
            _first_lines(self._reason),
        )

    def _plan(self) -> None:
        """Give each part its share of the limit."""
        found = self._graphs.plan(self._parts, self._resident)
        logger.info(
            "%s: the programs of its %s take %s together at most (predicted), of %s",
            self._title,
            counted(len(self._parts), "parts"),
            format_bytes(found.peak),
            format_bytes(found.limit),
        )


def _first_lines(reason: GraphBreakError) -> str:
    """What cannot be captured, and where."""
    return "; ".join(line.strip() for line in str(reason).splitlines()[:2])


def _dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What a sparse tensor consists of; the tensor itself where it is none."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]
