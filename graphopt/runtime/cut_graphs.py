"""The graphs that torch's Dynamo has cut out of a model or a function: each is captured and rewritten by itself.

Whoever has Dynamo cut (``parts.py``, ``dynamo_backend.py``) says when graphs run, and which are to be planned together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import fx, nn

from graphopt import _torch
from graphopt.capture import CaptureSession
from graphopt.capture.graph_part import GraphPart, as_it_is, cut_of
from graphopt.capture.tensor_classes import class_of, data_of
from graphopt.capture.without_memory import parameter_without_memory, without_memory
from graphopt.errors import CaptureError, GraphBreakError
from graphopt.rewriting.pass_ import PassRecord
from graphopt.runtime.compiled_joint import CompiledJoint, compile_joint
from graphopt.runtime.part_budget import PartBytes, Together, fit_together
from graphopt.runtime.runner import Capture, Runner
from graphopt.runtime.signature import part_signature

__all__ = ["CutGraph", "CutGraphs", "Owner"]

logger = logging.getLogger("graphopt.runtime.parts")


class Owner(Protocol):
    """Whoever has Dynamo cut, as graphs know it."""

    def begins(self, graph: CutGraph) -> None:
        """A graph with a program is about to run."""
        ...

    def ran(self, graph: CutGraph, result: Any) -> None:
        """A graph with a program has run."""
        ...

    def goes_back(self, graph: CutGraph) -> None:
        """The backward of a graph is about to run."""
        ...

    def names(self) -> Mapping[int, str]:
        """What the model's parameters and buffers are called, by their ``id``."""
        ...


@dataclass(eq=False)
class CutGraph:
    """One graph, called with the arguments that Dynamo gives it.

    Attributes:
        owner: captures it when it is called first.
        graph: as Dynamo made it.
        paths: where its arguments come from.
        sources: what they are in the function that was cut.
        numbers: which of them are tensors that stand for a number of Python's.
        whole: whether it is all that is computed in a call, so that it is planned by itself.
        times: how often it runs in one call of the model, at most.
        compiled: what runs; None before the first call, and for a graph that runs as it is.
        reason: why it runs as it is.
        session: its capture.
        smallest: where there is a limit, what runs with the fewest bytes, and its joint program as lowered.
        plans: what passes have planned for it, from one share of a limit to the next (``Context.plans``).
        storages: the bytes of its arguments, and of those among them that nothing before it has computed, by storage.
        fetch: gives the arguments of what runs, one by one, from those of a call.
        variants: by what Dynamo does not look at (``part_signature``) or leaves open (sizes), what runs of this graph.
    """

    owner: CutGraphs
    graph: fx.GraphModule
    paths: list[str]
    sources: list[str]
    numbers: frozenset[int]
    whole: bool = False
    times: int = 0
    compiled: CompiledJoint | None = None
    reason: str = ""
    session: CaptureSession | None = None
    smallest: tuple[CompiledJoint, Any] | None = None
    plans: dict[Hashable, Any] = field(default_factory=dict)
    storages: tuple[dict[int, int], dict[int, int]] = ({}, {})
    fetch: list[Callable[[tuple[Any, ...]], Any]] = field(default_factory=list)
    variants: dict[Hashable, CutGraph] = field(default_factory=dict)

    def __call__(self, *arguments: Any) -> Any:
        """What the graph gives."""
        given = arguments
        if self.numbers:
            given = tuple(a.item() if place in self.numbers else a for place, a in enumerate(arguments))
        key = (*part_signature(given), _numbers(given))
        if key not in self.variants:
            self.variants[key] = self.owner.variant(self, given)
        found = self.variants[key]
        return found.run(given) if found.is_program(given) else as_it_is(self.graph)(*arguments)

    def is_program(self, arguments: tuple[Any, ...]) -> bool:
        """Whether there is a program for these arguments; it is captured at the first call, where it can be."""
        if self.compiled is None and not self.reason:
            self.owner.capture(self, arguments)
        return self.compiled is not None

    def run(self, arguments: tuple[Any, ...]) -> Any:
        """Run the program."""
        assert self.compiled is not None
        owner = self.owner.owner
        owner.begins(self)
        result = self.compiled.call([get(arguments) for get in self.fetch])
        owner.ran(self, result)
        return result

    @property
    def records(self) -> list[PassRecord]:
        """What passes did."""
        return [] if self.compiled is None else self.compiled.rewritten.records


class CutGraphs:
    """Captures graphs, and plans those that are to be within one limit.

    Args:
        owner: is told when graphs run.
        runner: whose options, pipeline and pass state count.
        title: the name of the model or the function.
        resident: whether whoever owns the graphs owns the model as well; captures hold no memory of it otherwise.

    Attributes:
        limited: whether a pass keeps programs within a limit.
        as_they_are: why graphs run as they are that should not.
    """

    def __init__(self, owner: Owner, runner: Runner[CompiledJoint], title: str, *, resident: bool = True) -> None:
        self.owner = owner
        self.limited = any(each.has_limit for each in runner.options.pipeline.passes)
        self.as_they_are: list[str] = []
        self.title = title
        self._runner = runner
        self._resident = resident

    def take(self, graph: fx.GraphModule, *, whole: bool = False) -> CutGraph:
        """What runs in place of a graph that Dynamo hands over; to be called while it does."""
        paths, sources = _torch.input_paths(graph), _torch.input_sources(graph)
        return CutGraph(self, graph, paths, sources, _torch.number_places(graph), whole)

    def variant(self, graph: CutGraph, arguments: tuple[Any, ...]) -> CutGraph:
        """What runs of a graph for arguments that none of its programs is for.

        Raises:
            GraphBreakError: for sizes too many, where a limit would not hold without a program.
        """
        numbers = _numbers(arguments)
        if numbers:
            self._tell_numbers(graph, arguments)
        if not graph.variants:
            return graph
        made = replace(graph, compiled=None, reason="", times=0, variants={})
        if numbers and len(graph.variants) >= _torch.MOST_GRAPHS:
            if self.limited:
                raise self.too_many()
            made.reason = f"it has had {_torch.MOST_GRAPHS} programs, one for each size or number"
            self._note(made)
        return made

    def _tell_numbers(self, graph: CutGraph, arguments: tuple[Any, ...]) -> None:
        """Say that a graph for any size has a program for each size."""
        given = [
            f"{source or 'a number'} is {value}"
            for source, value in zip(graph.sources, arguments, strict=True)
            if not isinstance(value, torch.Tensor)
        ]
        logger.info(
            "%s: torch has made a graph for any size or number, and a program is captured for each: %s",
            self.title,
            ", ".join(given),
        )

    def too_many(self) -> GraphBreakError:
        """The error for one graph or size too many, where without its program a limit would not hold."""
        limits = ", ".join(str(each) for each in self._runner.options.pipeline.passes if each.has_limit)
        return GraphBreakError(
            f"{self.title} runs in parts, and one function of it has had {_torch.MOST_GRAPHS} graphs, one for each "
            "combination of sizes and values that it looked at\n"
            f"  limit: {limits} would not hold for one more, since no other program is made for it\n"
            "  to do: give it inputs of fewer sizes (pad them), or optimize it anew, which forgets the programs of now"
        )

    def capture(self, graph: CutGraph, arguments: tuple[Any, ...]) -> None:
        """Capture a graph that is called for the first time, or find out why it runs as it is."""
        if not torch.is_grad_enabled() or not any(_requires_grad(argument) for argument in arguments):
            graph.reason = "nothing in it requires a gradient"
            return
        share = self.limited and not graph.whole
        try:
            given = self._resident_arguments(arguments)
            names = {id(given[place]): name for place, name in self._names(graph, arguments).items()}
            module = GraphPart(graph.graph, given, names, graph.paths, self.title, shared=not graph.whole)
            others = [arguments[place] for place in cut_of(module).others]
            session = CaptureSession(module, self._examples(list(map(data_of, others))))
            session.classes = tuple(map(class_of, others))
            with _torch.transforms_undone():
                capture = self._runner.rewrite(session, room=0 if share else None, plans=graph.plans)
        except CaptureError as error:
            graph.reason = str(error).partition("\n")[0]
            self._note(graph)
            return
        graph.storages = _storages(arguments)
        self._runner.make_ready(capture.rewritten.program)
        graph.session = session
        self._use(graph, capture)
        assert graph.compiled is not None
        graph.smallest = graph.compiled, session.joint

    def _names(self, graph: CutGraph, arguments: tuple[Any, ...]) -> dict[int, str]:
        """The names of parameters and buffers by their places: the model's, or those in the function that was cut.

        Only those of the arguments themselves: another tensor may have the ``id`` of one that is gone.
        """
        known = self.owner.names()
        names = {place: known[id(tensor)] for place, tensor in enumerate(arguments) if id(tensor) in known}
        for place, (path, tensor) in enumerate(zip(graph.paths, arguments, strict=False)):
            named = isinstance(tensor, nn.Parameter) and all(step.isidentifier() for step in path.split("."))
            if named and place not in names and path not in names.values():
                names[place] = path
        return names

    def _note(self, graph: CutGraph) -> None:
        """Say that a graph runs as it is."""
        self.as_they_are.append(graph.reason)
        logger.warning("a part of %s runs as it is, and its bytes are not counted: %s", self.title, graph.reason)

    @property
    def _numerics(self) -> bool:
        return self._runner.options.verify == "numerics"

    def _resident_arguments(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """What a graph is captured with: parameters as they are would live as long as torch keeps the graph."""
        if self._resident or self._numerics or part_signature(arguments)[0]:
            return arguments
        return tuple(parameter_without_memory(a) if isinstance(a, nn.Parameter) else a for a in arguments)

    def _examples(self, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """What a graph is captured with: activations as they are would stay alive with its capture."""
        if self._numerics or part_signature(tuple(inputs))[0]:
            return tuple(inputs)
        return tuple(map(without_memory, inputs))

    def _use(self, graph: CutGraph, capture: Capture) -> None:
        """Let a graph run what passes made of it."""
        session = graph.session
        assert session is not None
        assert session.joint is not None
        module = session.model
        assert isinstance(module, GraphPart)
        cut = cut_of(module)
        compiled = compile_joint(self._runner, session, capture, before_backward=lambda: self.owner.goes_back(graph))
        fetch: list[Callable[[tuple[Any, ...]], Any]] = []
        for spec, get in zip(session.joint.inputs, compiled.inputs, strict=True):
            fetch.append(_constant(get()) if spec.role == "constant" else _argument(cut.places[spec.target]))
        others = {f"args[{number}]": place for number, place in enumerate(cut.others)}
        places = {**cut.places, **others}
        graph.fetch = [*fetch, *map(_argument, [*cut.others, *(places[name] for name in session.repeated)])]
        graph.compiled = compiled

    def plan(self, graphs: Sequence[CutGraph], resident: int) -> Together:
        """Give each of some graphs, in the order in which they run, its share of the limit.

        Args:
            graphs: of one call.
            resident: bytes of all parameters, buffers and arguments.

        Raises:
            BudgetError: where together they do not meet it.
        """
        pipeline = self._runner.options.pipeline
        found = fit_together([_Rewrites(self._runner, graph) for graph in graphs], pipeline, resident)
        for graph, (capture, joint) in zip(graphs, found.made, strict=True):
            assert graph.smallest is not None
            if capture is graph.smallest[0]:
                self.use_smallest(graph)
            else:
                assert graph.session is not None
                graph.session.joint = joint
                self._use(graph, capture)
        return found

    def use_smallest(self, graph: CutGraph) -> None:
        """Let a graph run its program of the fewest bytes, which is compiled; a joint program can be that once."""
        assert graph.smallest is not None
        graph.compiled = graph.smallest[0]


class _Rewrites:
    """The programs that passes make of one graph, by the bytes that they may take."""

    def __init__(self, runner: Runner[CompiledJoint], graph: CutGraph) -> None:
        assert graph.session is not None
        self._runner, self._session, self._smallest = runner, graph.session, graph.smallest
        self._plans = graph.plans
        self.times = graph.times

    def within(self, room: int) -> tuple[PartBytes, Any]:
        """What passes make of the graph in so many bytes, or in as few as they can: its bytes, and the capture."""
        if room == 0 and self._smallest is not None:
            return PartBytes.of(self._smallest[0].rewritten.program, self.times), self._smallest
        capture = self._runner.rewrite(self._session, room=room, plans=self._plans)
        self._runner.make_ready(capture.rewritten.program)
        return PartBytes.of(capture.rewritten.program, self.times), (capture, self._session.joint)


def _numbers(arguments: tuple[Any, ...]) -> Hashable:
    """The arguments that are no tensors: sizes, where a graph is for any."""
    return tuple((type(other), repr(other)) for other in arguments if not isinstance(other, torch.Tensor))


def _storages(arguments: tuple[Any, ...]) -> tuple[dict[int, int], dict[int, int]]:
    """The bytes of arguments by storage, and of those that are no results of ops with a gradient."""
    tensors = [t for t in arguments if isinstance(t, torch.Tensor) and t.layout is torch.strided]
    found = [{_torch.storage_key(t): t.untyped_storage().nbytes() for t in tensors if want(t)} for want in _WANTED]
    return found[0], found[1]


_WANTED: tuple[Callable[[torch.Tensor], bool], ...] = (lambda _: True, lambda tensor: tensor.is_leaf)


def _requires_grad(argument: Any) -> bool:
    return isinstance(argument, torch.Tensor) and argument.requires_grad


def _argument(place: int) -> Callable[[tuple[Any, ...]], Any]:
    return lambda arguments: data_of(arguments[place])


def _constant(value: torch.Tensor) -> Callable[[tuple[Any, ...]], Any]:
    return lambda _arguments: value
