"""A random program trained in eager mode, and drop-in or as a whole step with passes: the same bits, or why not.

``python -m tests.support.random_trials 17`` says what program 17 is, what comes of it, and the least that fails alike.
"""

from __future__ import annotations

import copy
import logging
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, cast
from unittest import mock

import torch
from torch import nn
from torch.utils import _pytree as pytree

import graphopt
from graphopt import Pass
from graphopt.capture.call.flatten import flatten_call
from graphopt.ir.node import value_of
from graphopt.passes import (
    CheckpointBoundaries,
    ContiguousCheckpoints,
    FitMemory,
    FuseUpdate,
    Offload,
    OffloadState,
    Recompute,
    RecomputeEvenly,
)
from tests.support.bits import SAME, close, first_difference
from tests.support.random_programs import Recipe, Scrambled, batches, describe, loss_of, recipe_of, shrunk

__all__ = ["Verdict", "try_programs"]

Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: list[Make] = [
    lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True),
    lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, foreach=True),
]

_ALL = ("optimizer", "parameters")

DROP_IN: dict[str, Callable[[], list[Pass]]] = {
    "none": list,
    "recompute": lambda: [Recompute("auto")],
    "recompute some": lambda: [Recompute("even.*")],
    "recompute between all": lambda: [Recompute(("even.*", "odd.*"))],
    "recompute evenly": lambda: [RecomputeEvenly(3)],
    "offload": lambda: [Offload(tier="disk", min_bytes=1)],
    "recompute, offload": lambda: [Recompute("auto"), Offload(min_bytes=1, tier="disk")],
    "fit": lambda: [FitMemory("90%", cost="roofline")],
    "contiguous": lambda: [Recompute("auto"), ContiguousCheckpoints(), CheckpointBoundaries()],
}
WHOLE_STEP = {
    **DROP_IN,
    "fuse": lambda: [FuseUpdate()],
    "fuse, recompute": lambda: [FuseUpdate(), Recompute("auto")],
    "fuse, fit": lambda: [FuseUpdate(), FitMemory("90%", cost="roofline")],
    "state": lambda: [OffloadState(_ALL, min_bytes=1, cost="roofline")],
    "state, recompute": lambda: [OffloadState(min_bytes=1, cost="roofline"), Recompute("auto")],
    "state, fit": lambda: [OffloadState(_ALL, min_bytes=1, cost="roofline"), FitMemory("90%", cost="roofline")],
}


SLACK = 64
"""Bytes by which a peak may differ from its prediction: an alignment; the programs themselves take some thousand."""


@dataclass(frozen=True)
class Verdict:
    """What came of one program.

    Attributes:
        number: of the program.
        way: ``drop-in`` or ``whole step``, and the passes.
        kind: ``equal``, ``refused``, ``told`` (rounded otherwise, as a warning says), ``different``, ``crash``,
            ``peak``; or ``invalid`` where eager mode fails.
        detail: the message, or the first difference.
        aot_eager: for what is different, how torch's own tracing compares: with the program, else with eager mode.
    """

    number: int
    way: str
    kind: str
    detail: str = ""
    aot_eager: str = ""


def try_programs(first: int, last: int) -> Iterator[dict[str, Any]]:
    """What comes of the programs of some numbers: verdicts as dictionaries."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(first, last):
            yield asdict(verdict_of(number, recipe_of(number)))


def verdict_of(number: int, recipe: Recipe, *, explained: bool = True) -> Verdict:
    """What comes of a recipe; ``explained`` with what torch's own tracing gives, where it is different."""
    chance = random.Random(recipe.pipeline)
    whole = chance.random() < 0.5
    name, passes = chance.choice(list((WHOLE_STEP if whole else DROP_IN).items()))
    make = chance.choice(OPTIMIZERS)
    way = f"{'whole step' if whole else 'drop-in'}: {name}"
    try:
        expected = _trained(recipe, make, whole)
    except Exception as error:
        return Verdict(number, way, "invalid", f"{type(error).__name__}: {error}")
    told: list[str] = []
    try:
        with _warnings_into(told):
            found = _rewritten(recipe, make, whole, passes())
    except graphopt.GraphoptError as error:
        return Verdict(number, way, "refused", str(error))
    except Exception as error:
        return Verdict(number, way, "crash", f"{type(error).__name__}: {error}")
    if different := first_difference(found.results, expected.results):
        if any("may round" in line for line in told) and close(found.results, expected.results):
            return Verdict(number, way, "told", different)
        theirs = _torchs_own(recipe, make, whole, found, expected) if explained else ""
        return Verdict(number, way, "different", different, theirs)
    bounded = any(op == "product" for op, _, _ in recipe.lines)  # its backward takes more where a factor is zero
    beyond = found.measured - found.predicted
    if beyond > SLACK or (beyond < -SLACK and not bounded):
        return Verdict(number, way, "peak", f"{found.predicted} predicted, {found.measured} measured")
    return Verdict(number, way, "equal")


@contextmanager
def _warnings_into(lines: list[str]) -> Iterator[None]:
    """What graphopt logs goes into a list."""
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("graphopt")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@dataclass(frozen=True)
class _Run:
    """What a training run left behind, and the peak of a further whole step in bytes."""

    results: list[Any]
    predicted: int = 0
    measured: int = 0


def _model(recipe: Recipe) -> Scrambled:
    torch.manual_seed(0)
    return Scrambled(recipe)


def _end(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return [{name: value.detach().clone() for name, value in named.items()}, optimizer.state_dict()["state"]]


def _inputs(batch: Any) -> Any:
    """The arguments anew, with what they share."""
    return copy.deepcopy(batch)


def _whole(model: nn.Module, *batch: Any) -> torch.Tensor:
    return loss_of(model(*batch), batch, model.recipe.parts)  # type: ignore[arg-type]


def _trained(recipe: Recipe, make: Make, whole: bool, change: Callable[[nn.Module], nn.Module] | None = None) -> _Run:
    """Train as everyone does; ``change`` gives the model that is called."""
    plain = _model(recipe)
    optimizer, results = make(plain.parameters()), []
    model = plain if change is None else change(plain)
    torch.manual_seed(2)
    for batch in batches(recipe):
        given = _inputs(batch)
        optimizer.zero_grad()
        outputs = model(*given)
        loss = loss_of(outputs, given, recipe.parts)
        loss.backward()
        results += [pytree.tree_map_only(torch.Tensor, _kept, outputs), loss.detach().clone(), given]
        results += [{name: p.grad for name, p in plain.named_parameters()}]
        results += [[x.grad for x in pytree.tree_leaves(given) if isinstance(x, torch.Tensor) and x.is_leaf]]
        optimizer.step()
    if whole:  # outputs and gradients stay inside of a whole step
        results = [results[place] for place in range(1, len(results), 5)]
    return _Run([*results, *_end(model, optimizer), torch.get_rng_state()])


def _rewritten(recipe: Recipe, make: Make, whole: bool, passes: list[Pass]) -> _Run:
    """Train with passes; where a budget cannot be met, with the smallest one that the message says there is."""
    run = _stepped if whole else _dropped_in
    for _ in range(4):  # another signature may have another one
        try:
            return run(recipe, make, passes)
        except graphopt.GraphoptError as error:
            smallest = re.search(
                r"the smallest peak found is (\d+) bytes|every plan takes [^(]*\((\d+) bytes\) or more", str(error)
            )
            if smallest is None:
                raise
        least = FitMemory(int(smallest[1] or smallest[2]), cost="roofline")
        passes = [least if isinstance(given, FitMemory) else given for given in passes]
    return run(recipe, make, passes)


def _dropped_in(recipe: Recipe, make: Make, passes: list[Pass]) -> _Run:
    return _trained(recipe, make, False, lambda model: graphopt.optimize(model, passes))


def _torchs_own(recipe: Recipe, make: Make, whole: bool, found: _Run, expected: _Run) -> str:
    """How training with torch's own tracing compares with that of a program and of eager mode."""
    try:
        with mock.patch.object(graphopt, "name", lambda value, name: value):
            theirs = _trained(recipe, make, whole, _compiled).results
    except Exception as error:
        return f"fails: {type(error).__name__}: {str(error).splitlines()[0]}"
    if not first_difference(theirs, found.results):
        return SAME
    return "other bits" if first_difference(theirs, expected.results) else "the bits of eager mode"


def _compiled(model: nn.Module) -> nn.Module:
    torch.compiler.reset()
    made: Any = torch.compile(model, backend="aot_eager")
    return cast(nn.Module, made)


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that says in its strides, and whether it is trained, what the tensor was."""
    copied = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    with torch.no_grad():
        if 0 in tensor.stride():
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)
        copied.copy_(tensor)
    return copied.requires_grad_(tensor.requires_grad)


def _stepped(recipe: Recipe, make: Make, passes: list[Pass]) -> _Run:
    """Train with whole steps."""
    model = _model(recipe)
    optimizer, results = make(model.parameters()), []
    step = graphopt.optimize_step(model, optimizer, passes, loss=_whole)
    torch.manual_seed(2)
    for batch in batches(recipe):
        results.append(step(*_inputs(batch)).detach().clone())
    found = [*results, *copy.deepcopy(_end(model, optimizer)), torch.get_rng_state()]
    given = _inputs(batches(recipe)[-1])
    measured = graphopt.measure_peak(lambda: step(*given)).allocated_peak_bytes
    return _Run(found, step.program.memory(sizes=_sizes(step.program, given)).allocated_peak_bytes, measured)


def _sizes(program: graphopt.Program, batch: Any) -> dict[str, int]:
    """The values that the symbols in sizes have for a batch: a program may be planned for larger ones."""
    examples = [value_of(node) for node, _ in program.inputs_of("input")]
    pairs = zip(examples, flatten_call(batch, {})[0], strict=True)
    found = {str(s): size for example, x in pairs for s, size in zip(example.shape, x.shape, strict=True)}
    return {name: found[name] for name in program.symbols}


def _say(number: int) -> None:
    recipe = recipe_of(number)
    verdict = verdict_of(number, recipe)
    print(describe(recipe), verdict, sep="\n")
    if verdict.kind in ("equal", "invalid"):
        return
    least = shrunk(recipe, lambda smaller: verdict_of(number, smaller, explained=False).kind == verdict.kind)
    print("\nthe least that fails alike:", describe(least), verdict_of(number, least), sep="\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for _number in sys.argv[1:]:
        _say(int(_number))
