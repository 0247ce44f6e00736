"""The graphs that torch's Dynamo has cut out of a model or a function: each is captured and rewritten by itself.

Whoever has Dynamo cut (``parts.py``, ``dynamo_backend.py``) says when graphs run, and which are to be planned together.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import fx, nn

from graphopt import _torch
from graphopt.capture import CaptureSession
from graphopt.capture.call.tensor_classes import class_of, data_of
from graphopt.capture.call.without_memory import parameter_without_memory, without_memory
from graphopt.capture.dynamo.graph_part import GraphPart, as_it_is, cut_of
from graphopt.capture.dynamo.open_numbers import open_numbers
from graphopt.errors import CaptureError, GraphBreakError
from graphopt.ir.context import PlanStore
from graphopt.rewriting.pass_ import PassRecord
from graphopt.runtime.calls.captures import part_signature
from graphopt.runtime.compiled_joint import CompiledJoint, compile_joint
from graphopt.runtime.graph_breaks.extra_guards import Unguarded, decides_on_masks
from graphopt.runtime.graph_breaks.part_budget import PartBytes, Together, fit_together
from graphopt.runtime.runner import Capture, Runner

__all__ = ["CutGraph", "CutGraphs", "Owner", "calls_in_eager"]

logger = logging.getLogger("graphopt.runtime.graph_breaks.parts")


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

    def subject(self) -> tuple[nn.Module, object]:
        """The model that is cut, or an empty one and a function."""
        ...


@dataclass(eq=False)
class CutGraph:
    """One graph, called with the arguments that Dynamo gives it.

    Attributes:
        owner: captures it when it is called first.
        graph: as Dynamo made it.
        opened: what is captured of it: the same, with tensors in the place of numbers where that gives the same bits.
        paths: where its arguments come from.
        sources: what they are in the function that was cut.
        numbers: which of them are tensors that stand for a number of Python's, and are captured as that.
        open: which of them are numbers, or stand for one, and are captured as tensors.
        function: which function it is of, or the rest of one behind a cut.
        whole: whether it is all that is computed in a call, so that it is planned by itself.
        times: how often it runs in one call of the model, at most.
        compiled: what runs; None before the first call, and for a graph that runs in eager mode.
        reason: why it runs in eager mode.
        session: its capture.
        smallest: where there is a limit, what runs with the fewest bytes, and its joint program as lowered.
        plans: what passes have planned for it, from one share of a limit to the next (``Context.plans``).
        storages: the bytes of its arguments, and of those among them that nothing before it has computed, by storage.
        fetch: gives the arguments of what runs, one by one, from those of a call.
        variants: by what Dynamo does not look at (``part_signature``) or leaves open (sizes), what runs of this graph.
        late: whether it runs for all sizes and numbers that come after too many others.
    """

    owner: CutGraphs
    graph: fx.GraphModule
    opened: fx.GraphModule
    paths: list[str]
    sources: list[str]
    numbers: frozenset[int]
    open: frozenset[int]
    function: int
    whole: bool = False
    times: int = 0
    compiled: CompiledJoint | None = None
    reason: str = ""
    session: CaptureSession | None = None
    smallest: tuple[CompiledJoint, Any] | None = None
    plans: PlanStore = field(default_factory=PlanStore)
    storages: tuple[dict[int, int], dict[int, int]] = ({}, {})
    fetch: list[Callable[[tuple[Any, ...]], Any]] = field(default_factory=list)
    variants: dict[Hashable, CutGraph] = field(default_factory=dict)
    late: bool = False

    def __call__(self, *arguments: Any) -> Any:
        """What the graph gives."""
        given = arguments
        if self.numbers or self.open:
            given = tuple(map(self._given, range(len(arguments)), arguments))
        key = (*part_signature(given), _numbers(given))
        found = self.variants.get(key) or self.owner.variant(self, key, given)
        if found.late:
            self.owner.late_calls[self.function] += 1
        return found.run(given) if found.is_program(given) else as_it_is(self.graph)(*arguments)

    def _given(self, place: int, argument: Any) -> Any:
        """An argument as what is captured takes it."""
        if place in self.open and not isinstance(argument, torch.Tensor):
            return torch.tensor(argument)
        return argument.item() if place in self.numbers else argument

    def is_program(self, arguments: tuple[Any, ...]) -> bool:
        """Whether there is a program for these arguments; it is captured at the first call, where it can be."""
        if self.compiled is None and not self.reason:
            self.owner.capture(self, arguments)
        return self.compiled is not None

    def run(self, arguments: tuple[Any, ...]) -> Any:
        """Run the program."""
        assert self.compiled is not None
        owner = self.owner.owner
        self.owner.agree(self.compiled)
        owner.begins(self)
        result = self.compiled.call([get(arguments) for get in self.fetch])
        owner.ran(self, result)
        return result

    @property
    def why(self) -> str:
        """Why it runs in eager mode, and how often it did where it once had programs."""
        return (
            f"{self.reason}, and {calls_in_eager(self.owner.late_calls[self.function])} since"
            if self.late
            else self.reason
        )

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
        as_they_are: graphs that run in eager mode and should not; of the late ones the first of each function.
        late_calls: how often late ones ran, by their functions.
    """

    def __init__(self, owner: Owner, runner: Runner[CompiledJoint], title: str, *, resident: bool = True) -> None:
        self.owner = owner
        self.limited = any(each.has_limit for each in runner.options.pipeline.passes)
        self.as_they_are: list[CutGraph] = []
        self.late_calls: Counter[int] = Counter()
        self.title = title
        self._programs: Counter[int] = Counter()
        self._unguarded = Unguarded()
        self._told_of_masks = False
        self._runner = runner
        self._resident = resident

    def take(self, graph: fx.GraphModule, *, whole: bool = False) -> CutGraph:
        """What runs in place of a graph that Dynamo hands over; to be called while it does."""
        self._unguarded.guard(graph, *self.owner.subject())
        if not self._told_of_masks and decides_on_masks(graph):
            self._tell_masks()
        paths, sources = _torch.input_paths(graph), _torch.input_sources(graph)
        numbers = _torch.number_places(graph)
        opened, places = open_numbers(graph, numbers, sources)
        function = _torch.function_that_is_cut()
        return CutGraph(self, graph, opened, paths, sources, numbers - places, places, function, whole)

    def variant(self, graph: CutGraph, key: Hashable, arguments: tuple[Any, ...]) -> CutGraph:
        """What runs of a graph for arguments that none of its programs is for.

        Args:
            graph: that is called.
            key: of the arguments.
            arguments: of the call.

        Raises:
            GraphBreakError: for one too many, where a limit would not hold without a program.
        """
        if self._programs[graph.function] >= _torch.MOST_GRAPHS:
            if self.limited:
                raise self.too_many()
            return graph.variants.get(_LATE) or self._late(graph)
        self._programs[graph.function] += 1
        if _numbers(arguments):
            self._tell_numbers(graph, arguments)
        made = (
            replace(graph, compiled=None, reason="", times=0, plans=PlanStore(), variants={})
            if graph.variants
            else graph
        )
        graph.variants[key] = made
        return made

    def _late(self, graph: CutGraph) -> CutGraph:
        """What runs of a graph for all further sizes and numbers: the graph as it is."""
        reason = f"it has had {_torch.MOST_GRAPHS} programs, one for each size or number"
        made = replace(graph, compiled=None, reason=reason, late=True, times=0, variants={})
        graph.variants[_LATE] = made
        if graph.function not in self.late_calls:
            self._note(made)
        return made

    def _tell_masks(self) -> None:
        """Say that Dynamo does not ask what eager mode asks of masks."""
        self._told_of_masks = True
        logger.warning(
            "%s keeps its attention mask where torch cuts it, also where the mask hides nothing and positions count "
            "up: eager mode then leaves it to the attention kernel, which rounds otherwise (graphopt.optimize asks as "
            "eager mode does, for a model that is one graph)",
            self.title,
        )

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

    def too_many(self, where: str = "") -> GraphBreakError:
        """The error for one graph or size too many, where without its program a limit would not hold.

        Args:
            where: the function whose graphs are too many for torch, as torch names it.
        """
        count = f"has had {_torch.MOST_GRAPHS} graphs"
        had = f"{where} has had as many graphs as torch makes" if where else f"one function of it {count}"
        more = (
            "let torch make more (torch._dynamo.config.recompile_limit), or compile it anew"
            if where
            else ("or optimize it anew, which forgets the programs of now")
        )
        limits = ", ".join(str(each) for each in self._runner.options.pipeline.passes if each.has_limit)
        return GraphBreakError(
            f"{self.title} runs in parts, and {had}, one for each combination of sizes and values that it looked at\n"
            f"  limit: {limits} would not hold for one more, since no other program is made for it\n"
            f"  to do: give it inputs of fewer sizes (pad them), {more}"
        )

    def capture(self, graph: CutGraph, arguments: tuple[Any, ...]) -> None:
        """Capture a graph that is called for the first time, or find out why it runs in eager mode."""
        if not torch.is_grad_enabled() or not any(_requires_grad(argument) for argument in arguments):
            graph.reason = "nothing in it requires a gradient"
            return
        share = self.limited and not graph.whole
        try:
            given = self._resident_arguments(arguments)
            names = {id(given[place]): name for place, name in self._names(graph, arguments).items()}
            module = GraphPart(graph.opened, given, names, graph.paths, self.title, shared=not graph.whole)
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
        named = {name: arguments[place] for place, name in self._names(graph, arguments).items()}
        self._runner.tell_hooks(f"a part of {self.title}", named, some_missing=graph.compiled.tangents.needed)
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
        """Say that a graph runs in eager mode."""
        self.as_they_are.append(graph)
        how = "runs in eager mode from now on" if graph.late else "runs in eager mode"
        logger.warning("a part of %s %s, and its bytes are not counted: %s", self.title, how, graph.reason)

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
        compiled = compile_joint(self._runner, session, capture, before_backward=lambda _: self.owner.goes_back(graph))
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

    def agree(self, compiled: CompiledJoint) -> None:
        """Wait until all ranks that a graph exchanges with have said that they run the same.

        Raises:
            RankError: where they do not.
        """
        self._runner.wait(self._runner.agreement.begin(compiled.exchanges), compiled.rewritten.program)

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


_LATE = "late"
"""The key, beside those of arguments, of what runs for sizes and numbers that are too many."""


def calls_in_eager(calls: int) -> str:
    """That so many calls ran without a program."""
    return "1 call runs in eager mode" if calls == 1 else f"{calls} calls run in eager mode"


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
