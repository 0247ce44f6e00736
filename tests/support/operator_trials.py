"""One op of torch's OpInfo database, trained in eager mode and as a program: equal, refused, different, or a crash."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast
from unittest import mock

import torch
from functorch.compile import aot_module, nop
from torch import nn
from torch.testing._internal import common_methods_invocations as database
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

import graphopt
from graphopt import Pass
from graphopt.passes import MixedPrecision, Recompute
from tests.support.bits import SAME, first_difference

__all__ = ["OPERATORS", "Verdict", "try_operator", "try_under_autocast"]

SAMPLES = 3
"""How many of an op's sample inputs are tried: the first, the last, and one between them."""

LOOKED_AT = 60
"""How many sample inputs these are taken from."""

OPERATORS: dict[str, OpInfo] = {
    op.formatted_name: op
    for op in database.op_db
    if op.supports_autograd and torch.float32 in op.supported_backward_dtypes("cpu")
}
"""Every op that has a gradient in float32 on a CPU, by a name that is unique."""


@dataclass(frozen=True)
class Verdict:
    """What came of one sample input of one op in one way.

    Attributes:
        op: its name.
        sample: the number of the sample input.
        way: ``drop-in``, ``complex`` (the same in complex64), ``recompute``, ``in place`` or ``mixed``.
        kind: ``equal``, ``refused``, ``different``, ``crash``; ``nothing to recompute``; ``eager differs`` where eager
            mode itself gives other bits the second time; or ``eager fails``.
        detail: the message, or the first difference.
        aot_eager: for what is different, whether torch's own tracing gives the same bits as the program.
    """

    op: str
    sample: int
    way: str
    kind: str
    detail: str = ""
    aot_eager: str = ""


class Call(nn.Module):
    """Calls an op: tensors that follow the first argument and require a gradient are parameters, others come in.

    Args:
        op: to call.
        sample: its arguments.
    """

    def __init__(self, op: OpInfo, sample: SampleInput) -> None:
        super().__init__()
        leaves, self.structure = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        first = len(pytree.tree_leaves(sample.input))
        self.leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.places: dict[int, int] = {}
        self.given: list[torch.Tensor] = []
        parameters: dict[int, nn.Parameter] = {}
        self.parameter_places: dict[int, int] = {}
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                continue
            if place >= first and leaf.requires_grad and all(leaf is not other for other in self.given):
                parameters.setdefault(id(leaf), nn.Parameter(copied(leaf).detach()))
                self.parameter_places[place] = list(parameters).index(id(leaf))
            else:
                known = [number for number, other in enumerate(self.given) if other is leaf]
                self.places[place] = known[0] if known else len(self.given)
                if not known:
                    self.given.append(leaf)
        self.weights = nn.ParameterList(parameters.values())
        self.function, self.finish = op.get_op(), sample.output_process_fn_grad

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.call(list(tensors), list(self.weights))

    def call(self, tensors: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> Any:
        leaves = list(self.leaves)
        for place, number in self.places.items():
            leaves[place] = tensors[number]
        for place, number in self.parameter_places.items():
            leaves[place] = weights[number]
        value, args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return self.finish(self.function(value, *args, **kwargs))


class LowCall(Call):
    """Calls an op under autocast; what it returns in a lower precision comes back in float32, as programs return it."""

    def forward(self, *tensors: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = super().forward(*tensors)
        return pytree.tree_map_only(torch.Tensor, _widened, result)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


class Between(Call):
    """Calls an op between other ops, and returns the loss; the op's results are called ``result``, ``result@1``, ….

    Args:
        op: to call.
        sample: its arguments.
        in_place: whether the op's variant that writes over its first argument is called.
    """

    def __init__(self, op: OpInfo, sample: SampleInput, in_place: bool = False) -> None:
        super().__init__(op, sample)
        self.result = nn.Identity()
        if in_place:
            self.function = op.get_inplace()

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        made = self.call([_times_one(tensor) for tensor in tensors], [weight * 1 for weight in self.weights])
        return weighted_sum([self.result(leaf) for leaf in differentiable(made)])


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A new leaf with the same values, strides and place in a storage of its own."""
    if tensor.layout != torch.strided:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    with torch.no_grad():
        storage = tensor.untyped_storage().clone()
        made = torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        made = made.conj() if tensor.is_conj() else made
    return made.detach().requires_grad_(tensor.requires_grad)


def _times_one(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 1 if tensor.requires_grad else tensor


def differentiable(result: Any) -> list[torch.Tensor]:
    """The tensors in a result that have a gradient."""
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def weighted_sum(results: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of all elements, each times a number that depends on its place."""
    total = torch.zeros(())
    for result in results:
        dense = result.to_dense() if result.layout != torch.strided else result
        real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
        weights = torch.ones_like(real.detach()).flatten().cumsum(0).cos().reshape(real.shape)
        total = total + (real * weights).sum()
    return total


# --- running ---------------------------------------------------------------------------------------------------------


def run(model: nn.Module, given: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Outputs, loss, gradients, and the generator's state after a call and its backward."""
    model.zero_grad()
    tensors = [copied(tensor) for tensor in given]
    torch.manual_seed(0)
    outputs = model(*tensors)
    loss = outputs if isinstance(model, Between) else weighted_sum(differentiable(outputs))
    loss.backward()
    return {
        "outputs": outputs,
        "loss": loss,
        "gradients": {name: parameter.grad for name, parameter in model.named_parameters()},
        "gradients of inputs": [tensor.grad for tensor in tensors],
        "generator": torch.get_rng_state(),
    }


def samples(op: OpInfo, dtype: torch.dtype = torch.float32) -> list[tuple[int, SampleInput]]:
    """Some sample inputs, with their numbers, of those that give something to differentiate."""
    torch.manual_seed(0)
    given = itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=True), LOOKED_AT)
    usable = [(number, sample) for number, sample in enumerate(given) if _has_gradient(op, sample)]
    step = max(1, math.ceil((len(usable) - 1) / (SAMPLES - 1)))
    return sorted(dict([*usable[::step], *usable[-1:]]).items())[:SAMPLES]


def _has_gradient(op: OpInfo, sample: SampleInput) -> bool:
    try:
        result = Call(op, sample)(*Call(op, sample).given)
    except Exception:
        return False
    return any(leaf.numel() for leaf in differentiable(result))


def try_operator(name: str) -> Iterator[dict[str, Any]]:
    """What comes of an op, for each sample input and way: verdicts as dictionaries."""
    torch.set_num_threads(1)
    for verdict in _verdicts(name, OPERATORS[name]):
        yield asdict(verdict)


def _verdicts(name: str, op: OpInfo) -> Iterator[Verdict]:
    with warnings.catch_warnings(), mock.patch.object(database, "wrapper_set_seed", _unseeded):
        warnings.simplefilter("ignore")
        for number, sample in samples(op):
            yield _compared(Verdict(name, number, "drop-in", "equal"), lambda s=sample: Call(op, s), [])[0]
            yield _recompute(Verdict(name, number, "recompute", "equal"), lambda s=sample: Between(op, s))
            if op.get_inplace() and op.supports_inplace_autograd and not sample.broadcasts_input:
                verdict = Verdict(name, number, "in place", "equal")
                yield _compared(verdict, lambda s=sample: Between(op, s, in_place=True), [])[0]
        yield from _complex_verdicts(name, op)


def _complex_verdicts(name: str, op: OpInfo) -> Iterator[Verdict]:
    if torch.complex64 in op.supported_backward_dtypes("cpu"):
        for number, sample in samples(op, torch.complex64)[-1:]:
            yield _compared(Verdict(name, number, "complex", "equal"), lambda s=sample: Call(op, s), [])[0]


def try_under_autocast(name: str) -> Iterator[dict[str, Any]]:
    """What comes of an op under mixed precision, for each sample input, compared with eager mode under autocast."""
    torch.set_num_threads(1)
    op = OPERATORS[name]
    with warnings.catch_warnings(), mock.patch.object(database, "wrapper_set_seed", _unseeded):
        warnings.simplefilter("ignore")
        for number, sample in samples(op):
            verdict = Verdict(name, number, "mixed", "equal")
            found = _compared(
                verdict, lambda s=sample: Call(op, s), [MixedPrecision()], lambda s=sample: LowCall(op, s)
            )
            yield asdict(found[0])


def _unseeded(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a random op without a seed of its own, which the database sets inside of the call."""
    return function(*args, **kwargs)


def _recompute(verdict: Verdict, make: Callable[[], Call]) -> Verdict:
    for passes in ([Recompute("auto")], [Recompute("result*")]):
        found, optimized = _compared(verdict, make, passes)
        if found.kind != "equal" or any(record.changed for record in optimized.records if record.name == "recompute"):
            return found
    return replace(verdict, kind="nothing to recompute")


def _compared(
    verdict: Verdict, make: Callable[[], Call], passes: Sequence[Pass], eager: Callable[[], Call] | None = None
) -> tuple[Verdict, Any]:
    """The verdict, and the optimized model; ``eager`` makes the model that it is compared with, where that differs."""
    given, eager = make().given, eager or make
    try:
        expected = run(eager(), given)
    except Exception as error:
        return replace(verdict, kind="eager fails", detail=f"{type(error).__name__}: {error}"), None
    if found := first_difference(run(eager(), given), expected):
        return replace(verdict, kind="eager differs", detail=found), None
    optimized = graphopt.optimize(make(), passes)
    try:
        first, got = run(optimized, given), run(optimized, given)
    except graphopt.GraphoptError as error:
        return replace(verdict, kind="refused", detail=str(error)), None
    except Exception as error:
        return replace(verdict, kind="crash", detail=f"{type(error).__name__}: {error}"), None
    if found := first_difference(first, expected) or first_difference(got, expected):
        return replace(verdict, kind="different", detail=found, aot_eager=_torchs_own(eager, got, expected)), optimized
    return verdict, optimized


def _torchs_own(make: Callable[[], Call], got: dict[str, Any], expected: dict[str, Any]) -> str:
    """How torch's own tracing, by Dynamo and without it, compares with what a program and eager mode gave."""
    answers = []
    for trace in (_compiled, _traced):
        try:
            model = make()
            theirs = pytree.tree_leaves(run(trace(model), model.given))
        except Exception as error:
            answers.append(f"fails: {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        if not first_difference(theirs, pytree.tree_leaves(got)):
            return SAME
        equal = not first_difference(theirs, pytree.tree_leaves(expected))
        answers.append("the bits of eager mode" if equal else "other bits")
    return "; ".join(answers)


def _compiled(model: nn.Module) -> nn.Module:
    made: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    return cast(nn.Module, made)


def _traced(model: nn.Module) -> nn.Module:
    made: Any = aot_module(model, nop)
    return cast(nn.Module, made)
