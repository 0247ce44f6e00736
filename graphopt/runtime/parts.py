"""A model that is not one graph, captured in parts: torch's Dynamo cuts, each part has a program, the rest is eager.

Dynamo runs the model's Python at each call as eager mode does, and hands over the graphs between the places where it
looks at values. A pass that keeps a program within so many bytes gets a share for each part. As the parts are met in
the first call, one by one, each has its smallest peak there; behind that call all of them are planned together.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from graphopt import _torch
from graphopt.capture import CaptureSession
from graphopt.capture.graph_part import GraphPart
from graphopt.capture.hidden_effects import CAPTURE_LOCK, refuse_backward_hooks
from graphopt.errors import CaptureError, GraphBreakError
from graphopt.ir.ops.values import format_bytes
from graphopt.ir.program import Program
from graphopt.rewriting.pass_ import Changed, PassRecord
from graphopt.runtime.compiled_joint import CompiledJoint, compile_joint
from graphopt.runtime.part_budget import PartBytes, fit_together
from graphopt.runtime.runner import Capture, Runner
from graphopt.runtime.signature import part_signature

__all__ = ["Parts"]

logger = logging.getLogger(__name__)
capture_logger = logging.getLogger("graphopt.capture")


_BETWEEN = "eager code between them whose bytes are not counted"


@dataclass(eq=False)
class _Part:
    """One graph of a model, called with the arguments that Dynamo gives it.

    Attributes:
        owner: captures it when it is called first.
        graph: as Dynamo made it.
        paths: where its arguments come from.
        times: how often it runs in one call of the model, at most.
        compiled: what runs; None before the first call, and for a part that runs as it is.
        reason: why it runs as it is.
        session: its capture.
        smallest: where there is a limit, what runs with the fewest bytes, and its joint program as lowered.
        fetch: gives the arguments of what runs, one by one, from those of a call.
        variants: by what Dynamo does not look at (``part_signature``), the part of the same graph that runs.
    """

    owner: Parts
    graph: fx.GraphModule
    paths: list[str]
    times: int = 0
    compiled: CompiledJoint | None = None
    reason: str = ""
    session: CaptureSession | None = None
    smallest: tuple[CompiledJoint, Any] | None = None
    fetch: list[Callable[[tuple[Any, ...]], Any]] = field(default_factory=list)
    variants: dict[Hashable, _Part] = field(default_factory=dict)

    def __call__(self, *arguments: Any) -> Any:
        key = part_signature(arguments)
        if key not in self.variants:
            first = not self.variants
            self.variants[key] = self if first else replace(self, compiled=None, reason="", times=0)
        return self.variants[key].run(arguments)

    def run(self, arguments: tuple[Any, ...]) -> Any:
        """Run the program for these arguments, which is captured where there is none."""
        if self.compiled is None and not self.reason:
            self.owner.capture(self, arguments)
        if self.compiled is None:
            return self.graph(*arguments)
        self.owner.note(self)
        return self.compiled.call([get(arguments) for get in self.fetch])


class Parts:
    """The parts of one optimized model.

    Args:
        original: the class that the model was made from.
        runner: whose options, pipeline and pass state count.
        reason: why the model cannot be captured whole.

    Raises:
        GraphBreakError: where a pass cannot rewrite the parts one by one.
    """

    def __init__(self, original: type[nn.Module], runner: Runner[CompiledJoint], reason: GraphBreakError) -> None:
        pipeline = runner.options.pipeline
        others = [each.name for each in pipeline.passes if not each.in_parts or each in pipeline.training]
        if others or runner.options.dynamic_shapes is not None:
            what = ", ".join(others) or "dynamic_shapes"
            raise GraphBreakError(f"{reason}\n  in parts: {what} cannot be applied to the parts of a model") from reason
        self._runner = runner
        self._reason = reason
        self._function = _torch.cut(original.forward, self._cut)
        self._limited = any(each.has_limit for each in pipeline.passes)
        self._parts: list[_Part] = []
        self._names: dict[int, str] = {}
        self._resident = 0
        self._title = original.__name__
        self._made: Counter[_Part] = Counter()
        self._graphs: Counter[int] = Counter()
        self._settled = self._told = False
        self._as_they_are: list[str] = []

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs of the parts, in the order in which they were met."""
        return tuple(part.compiled.rewritten.program for part in self._parts if part.compiled is not None)

    @property
    def records(self) -> list[PassRecord]:
        """Why the model is in parts and what runs as it is; then what passes did, part by part."""
        lines = (_first_lines(self._reason), _BETWEEN, *(f"runs as it is: {reason}" for reason in self._as_they_are))
        counts = {"parts with a program": len(self.programs), "parts as they are": len(self._as_they_are)}
        changed = Changed(counts=counts, lines=lines)
        first = PassRecord("parts", "parts", "joint", "bitwise", changed, 0.0, 0, 0, None, None)
        return [first, *(record for part in self._parts if part.compiled for record in part.compiled.rewritten.records)]

    def call(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a call of the model; those of several threads one after the other, as Dynamo may cut anew at any of them.

        Raises:
            CaptureError: for backward hooks of submodules, which a part would lose.
            GraphoptError: where passes keep programs within a limit that the parts together do not meet.
        """
        with CAPTURE_LOCK, _torch.cut_as_in_eager(limited=not self._limited):
            if not self._settled:
                self._look_at(model, args, kwargs)
            self._made.clear()
            result = self._function(model, *args, **kwargs)
            self._count()
        return result

    def note(self, part: _Part) -> None:
        """Take notice of a part that runs in the call of now."""
        self._made[part] += 1

    def capture(self, part: _Part, arguments: tuple[Any, ...]) -> None:
        """Capture a part that is called for the first time, or find out why it runs as it is."""
        if not torch.is_grad_enabled() or not any(_requires_grad(argument) for argument in arguments):
            part.reason = "nothing in it requires a gradient"
            return
        self._settled = False
        try:
            module = GraphPart(part.graph, arguments, self._names, part.paths, self._title)
            session = CaptureSession(module, self._examples([arguments[place] for place in module.others]))
            capture = self._runner.rewrite(session, room=0 if self._limited else None)
        except CaptureError as error:
            part.reason = str(error).partition("\n")[0]
            self._as_they_are.append(part.reason)
            logger.warning("a part of %s runs as it is, and its bytes are not counted: %s", self._title, part.reason)
            return
        self._runner.make_ready(capture.rewritten.program)
        part.session = session
        self._use(part, capture)
        assert part.compiled is not None
        part.smallest = part.compiled, session.joint

    def _examples(self, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """What a part is captured with: activations as they are would stay alive with its capture."""
        if self._runner.options.verify == "numerics" or part_signature(tuple(inputs))[0]:
            return tuple(inputs)
        return tuple(map(_stand_in, inputs))

    def _use(self, part: _Part, capture: Capture) -> None:
        """Let a part run what passes made of it."""
        session = part.session
        assert session is not None
        assert session.joint is not None
        module = session.model
        assert isinstance(module, GraphPart)
        compiled = compile_joint(self._runner, session, capture)
        fetch: list[Callable[[tuple[Any, ...]], Any]] = []
        for spec, get in zip(session.joint.inputs, compiled.inputs, strict=True):
            fetch.append(_constant(get()) if spec.role == "constant" else _argument(module.places[spec.target]))
        others = {f"args[{number}]": place for number, place in enumerate(module.others)}
        places = {**module.places, **others}
        part.fetch = [*fetch, *map(_argument, [*module.others, *(places[name] for name in session.repeated)])]
        part.compiled = compiled

    def _cut(self, graph: fx.GraphModule, _examples: Any) -> Callable[..., Any]:
        """What torch calls a backend: takes one of Dynamo's graphs, and gives what runs in its place.

        Dynamo does not raise what a backend raises, so that what cannot be within a limit is said when it is to run.
        """
        function = _torch.function_that_is_cut()
        self._graphs[function] += 1
        if self._limited and self._graphs[function] > _torch.MOST_GRAPHS:
            return self._refuse_another
        return _Part(self, graph, _torch.input_paths(graph))

    def _refuse_another(self, *_arguments: Any) -> Any:
        """Runs in place of one graph too many, where without its program a limit would not hold."""
        raise GraphBreakError(
            f"{self._title} runs in parts, and one function of it has had {_torch.MOST_GRAPHS} graphs, one for each "
            "combination of sizes and values that it looked at\n"
            f"  limit: {', '.join(str(each) for each in self._runner.options.pipeline.passes if each.has_limit)} would "
            "not hold for one more, since no other program is made for it\n"
            "  to do: give it inputs of fewer sizes (pad them), or optimize it anew, which forgets the programs of now"
        )

    def _look_at(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Remember what the model's tensors are called, and what is resident in any case."""
        refuse_backward_hooks(model)
        named = [*model.named_parameters(), *model.named_buffers()]
        self._names = {id(tensor): name for name, tensor in named}
        given = [leaf for leaf in _torch.pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in (*(t for _, t in named), *given)}
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
        if self._limited and self._parts:
            self._plan()
        self._settled = True
        if new:
            self._log_capture(new)
        if not self._told:
            self._tell()

    def _log_capture(self, new: list[_Part]) -> None:
        """One line for the parts that a call has captured, as there is for each capture of a whole model."""
        made = [part.compiled.rewritten for part in new if part.compiled is not None]
        peak = max((rewritten.program.memory().peak_bytes for rewritten in made), default=0)
        count = len(self._runner.options.pipeline.passes)
        capture_logger.info(
            "%s: %s captured, largest peak of a part %s predicted, %s, %.1f s", self._title,
            "1 part" if len(made) == 1 else f"{len(made)} parts", format_bytes(peak),
            {0: "no passes", 1: "1 pass"}.get(count, f"{count} passes"), sum(rewritten.seconds for rewritten in made),
        )  # fmt: skip

    def tell_beforehand(self) -> None:
        """Say that example inputs have captured nothing, since parts are met where the model runs."""
        logger.warning(
            "%s will run in parts, which are captured at its first call and not for the example inputs, since it "
            "cannot be captured whole: %s", self._title, _first_lines(self._reason),
        )  # fmt: skip

    def _tell(self) -> None:
        """Say once that the model is not one program; and before, that it has no part with a program so far."""
        self._told = bool(self._parts)
        how = f"in parts, {len(self._parts)} so far, with {_BETWEEN}"
        logger.warning(
            "%s runs %s, since it cannot be captured whole: %s", self._title,
            how if self._parts else "as it is in this call", _first_lines(self._reason),
        )  # fmt: skip

    def _plan(self) -> None:
        """Give each part its share of the limit."""
        found = fit_together(
            [_Rewrites(self._runner, part) for part in self._parts],
            self._runner.options.pipeline,
            self._resident,
        )
        logger.info(
            "%s: the programs of its %d parts take %s together at most (predicted), of %s", self._title,
            len(self._parts), format_bytes(found.peak), format_bytes(found.limit),
        )  # fmt: skip
        for part, (capture, joint) in zip(self._parts, found.made, strict=True):
            assert part.session is not None
            assert part.compiled is not None
            assert part.smallest is not None
            if capture is part.smallest[0]:  # which is compiled; a joint program can be that once
                part.compiled = part.smallest[0]
            else:
                part.session.joint = joint
                self._use(part, capture)


class _Rewrites:
    """The programs that passes make of one part, by the bytes that they may take."""

    def __init__(self, runner: Runner[CompiledJoint], part: _Part) -> None:
        assert part.session is not None
        self._runner, self._session, self._smallest = runner, part.session, part.smallest
        self.times = part.times

    def within(self, room: int) -> tuple[PartBytes, Any]:
        """What passes make of the part in so many bytes, or in as few as they can: its bytes, and the capture."""
        if room == 0 and self._smallest is not None:
            return PartBytes.of(self._smallest[0].rewritten.program, self.times), self._smallest
        capture = self._runner.rewrite(self._session, room=room)
        self._runner.make_ready(capture.rewritten.program)
        return PartBytes.of(capture.rewritten.program, self.times), (capture, self._session.joint)


def _requires_grad(argument: Any) -> bool:
    return isinstance(argument, torch.Tensor) and argument.requires_grad


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like another one, without memory of its own."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return tensor
    with torch.no_grad():
        like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        like.untyped_storage().resize_(0)
    return like.requires_grad_(tensor.requires_grad)


def _argument(place: int) -> Callable[[tuple[Any, ...]], Any]:
    return lambda arguments: arguments[place]


def _constant(value: torch.Tensor) -> Callable[[tuple[Any, ...]], Any]:
    return lambda _arguments: value


def _first_lines(reason: GraphBreakError) -> str:
    """What cannot be captured, and where."""
    return "; ".join(line.strip() for line in str(reason).splitlines()[:2])
