"""Which calls of a program work on each row of a large matrix by itself, so that rows can be computed a few at a time.

A row is what leading dimensions number: tokens of a batch, before and behind views that split or join these dimensions.
Inside of a chunk, every value has its rows in one dimension, the first (or the last of a transposed matrix). A call
either gives rows again, or adds up over rows, as gradients of weights and sums of losses do.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import fx

from graphopt import _torch
from graphopt.ir.node import value_of

__all__ = ["MADE_OF_ONE_NUMBER", "Choice", "Chunk", "Rows", "States", "Step", "Sum", "Whole", "step_of"]

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Choice:
    """A slice of a leading dimension, behind which some rows are left out.

    Attributes:
        shape: of the leading dimensions before.
        dim: which of them is cut.
        start: its first place that stays.
        end: behind its last place that stays.
    """

    shape: tuple[int, ...]
    dim: int
    start: int
    end: int

    @property
    def shape_after(self) -> tuple[int, ...]:
        """Of the leading dimensions behind the slice."""
        return (*self.shape[: self.dim], self.end - self.start, *self.shape[self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class Rows:
    """A value with one entry for each row.

    Attributes:
        lead: how many leading dimensions number the rows.
        last: whether rows are in the last dimension of a matrix instead.
        chosen: the slice that has left out rows, or has put zeros in their places; None for all rows.
        padded: whether rows that are left out are there, as zeros; only those that are chosen are computed.
    """

    lead: int
    last: bool = False
    chosen: Choice | None = None
    padded: bool = False

    def goes_with(self, other: Rows) -> bool:
        """Whether the rows of two values stand for the same ones, in the same places."""
        behind = [state.chosen is not None and not state.padded for state in (self, other)]
        return (self.lead, self.last) == (other.lead, other.last) and behind[0] == behind[1]


@dataclass(frozen=True, slots=True)
class Sum:
    """A value that is the sum of what chunks give, divided by ``divisor`` or by what ``finish`` says."""

    divisor: int = 1
    finish: Callable[[Any, fx.Node], fx.Node] | None = None


@dataclass(frozen=True, slots=True)
class Whole:
    """A value that does not depend on what rows hold, made once by ``make``."""

    make: Callable[[Any], fx.Node]


State = Rows | Sum | Whole
States = Mapping[fx.Node, State]


class Chunk(Protocol):
    """Some rows while they are computed."""

    @property
    def count(self) -> int:
        """How many rows there are."""
        ...

    def value(self, node: Any) -> Any:
        """What stands for an argument: of a value with rows the rows of this chunk, of any other all of it."""
        ...

    def rows(self, node: fx.Node, lead: int) -> fx.Node:
        """The rows of this chunk of a value from outside."""
        ...

    def call(self, like: fx.Node, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> fx.Node:
        """Insert a call in the place of another one."""
        ...

    def once(self, key: Any, make: Callable[[Any], fx.Node]) -> fx.Node:
        """What ``make`` makes, once for all chunks."""
        ...


Emit = Callable[[Chunk], Any]


@dataclass(frozen=True, slots=True)
class Step:
    """How a call is made for the rows of a chunk.

    Attributes:
        state: what its result is.
        emit: makes it.
    """

    state: State
    emit: Emit


def step_of(node: fx.Node, states: States, count: int) -> Step | None:
    """How a call that reads values with rows is made for some rows; None where it needs all of them at once.

    Args:
        node: a call.
        states: of the values that depend on rows.
        count: how many rows there are before any are left out.
    """
    if node.kwargs and any(isinstance(item, fx.Node) and item in states for item in node.kwargs.values()):
        return None
    rule = _RULES.get(node.target)
    if rule is not None:
        return rule(node, states, count)
    if isinstance(node.target, _torch.OpOverload) and _is_elementwise(node.target):
        return _elementwise(node, states, count)
    return None


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value_of(value).shape)


def _rows_of(node: Any, states: States) -> Rows | None:
    state = states.get(node) if isinstance(node, fx.Node) else None
    return state if isinstance(state, Rows) else None


# --- calls on elements -----------------------------------------------------------------------------------------------

_ALSO_ELEMENTWISE = {
    _aten._to_copy.default,
    _aten.clone.default,
    _aten.alias.default,
    _aten.detach.default,
    _aten.where.self,
    _aten.where.ScalarOther,
    _aten.where.ScalarSelf,
}
_KEEP_ZEROS = {
    _aten._to_copy.default,
    _aten.clone.default,
    _aten.alias.default,
    _aten.neg.default,
    _aten.mul.Tensor,
    _aten.mul.Scalar,
    _aten.div.Tensor,
    _aten.div.Scalar,
    _aten.tanh_backward.default,
}
"""Calls on elements that give zero for the zeros of a gradient, whatever the rows hold otherwise."""


def _is_elementwise(op: _torch.OpOverload) -> bool:
    random = torch.Tag.nondeterministic_seeded in op.tags
    return (torch.Tag.pointwise in op.tags or op in _ALSO_ELEMENTWISE) and not random and not op._schema.is_mutable


def _elementwise(node: fx.Node, states: States, count: int) -> Step | None:
    result = value_of(node)
    if not isinstance(result, torch.Tensor):
        return None
    known = [state for argument in node.all_input_nodes if (state := _rows_of(argument, states)) is not None]
    if not known or not all(state.goes_with(known[0]) for state in known):
        return None
    first = next((state for state in known if state.padded), known[0])
    if not all(isinstance(states.get(argument, first), Rows) for argument in node.all_input_nodes):
        return None
    if first.padded and node.target not in _KEEP_ZEROS:
        return None
    if first.last:
        return _plain(node, first) if len(node.all_input_nodes) == 1 else None
    lead = _shape(node)[: first.lead]
    outside: dict[fx.Node, str] = {}
    for argument in node.all_input_nodes:
        if argument not in states:
            how = _broadcast(_shape(argument), lead, result.dim())
            if not how:
                return None
            outside[argument] = how
    return Step(first, lambda chunk: chunk.call(node, node.target, _mapped(chunk, node, outside, first.lead), node.kwargs))


def _broadcast(shape: tuple[int, ...], lead: tuple[int, ...], dims: int) -> str:
    """How a value from outside goes with the rows of a result of so many dimensions.

    ``all``: it has none of its own; ``one``: one for all, in dimensions of their own; ``rows``: one for each; empty where
    it has some of them.
    """
    if len(shape) <= dims - len(lead):
        return "all"
    full = (1,) * (dims - len(shape)) + shape
    if math.prod(full[: len(lead)]) == 1:
        return "one" if math.prod(lead) > 1 else "rows"
    return "rows" if full[: len(lead)] == lead and len(shape) == dims else ""


def _mapped(chunk: Chunk, node: fx.Node, outside: Mapping[fx.Node, str], lead: int) -> list[Any]:
    def argument(value: Any) -> Any:
        how = outside.get(value, "all") if isinstance(value, fx.Node) else "all"
        if how == "rows":
            return chunk.rows(value, lead)
        if how == "one" and lead > 1:
            rest = _shape(value)[len(_shape(value)) - (len(_shape(node)) - lead) :] if len(_shape(node)) > lead else ()
            return chunk.once(("one", value, lead), lambda once: once.call(value, _aten.view.default, [value, [1, *rest]]))
        return chunk.value(value)

    return [argument(value) for value in node.args]


def _plain(node: fx.Node, state: State) -> Step:
    """A call whose arguments are those of the chunk, as they are."""
    return Step(state, lambda chunk: chunk.call(node, node.target, [chunk.value(arg) for arg in node.args], node.kwargs))


# --- views -----------------------------------------------------------------------------------------------------------


def _view(node: fx.Node, states: States, count: int) -> Step | None:
    state = _rows_of(node.args[0], states)
    if state is None or state.last:
        return None
    before, after = _shape(node.args[0]), _shape(node)
    rest = before[state.lead :]
    rows = math.prod(before[: state.lead])
    for lead in range(1, len(after) + 1):
        if math.prod(after[:lead]) == rows and math.prod(after[lead:]) == math.prod(rest):
            if after[lead:] == rest:
                return Step(replace(state, lead=lead), lambda chunk: chunk.value(node.args[0]))
            sizes = [-1, *after[lead:]]
            return Step(
                replace(state, lead=lead),
                lambda chunk: chunk.call(node, _aten.view.default, [chunk.value(node.args[0]), sizes]),
            )
    return None


def _transpose(node: fx.Node, states: States, count: int) -> Step | None:
    state = _rows_of(node.args[0], states)
    if state is None or state.lead != 1 or len(_shape(node)) != 2:
        return None
    return _plain(node, replace(state, last=not state.last))


def _slice(node: fx.Node, states: States, count: int) -> Step | None:
    state = _rows_of(node.args[0], states)
    source, dim, start, end, step = (*node.args, *(0, None, None, 1)[len(node.args) - 1 :])
    if state is None or state.last or step != 1 or not isinstance(dim, int):
        return None
    shape = _shape(source)
    dim, size = dim % len(shape), shape[dim % len(shape)]
    first, last, _ = slice(start, end).indices(size)  # type: ignore[misc]
    if dim >= state.lead:
        place = dim - state.lead + 1
        return Step(
            state, lambda chunk: chunk.call(node, node.target, [chunk.value(source), place, first, last])
        )
    if (first, last) == (0, size):
        return Step(state, lambda chunk: chunk.value(source))
    if state.chosen is not None:
        return None
    choice = Choice(shape[: state.lead], dim, first, last)
    return Step(replace(state, chosen=choice), lambda chunk: chunk.value(source))


def _slice_backward(node: fx.Node, states: States, count: int) -> Step | None:
    gradient, shape, dim, start, end, step = node.args
    state = _rows_of(gradient, states)
    if state is None or state.last or step != 1 or not isinstance(dim, int):
        return None
    sizes = tuple(shape)  # type: ignore[arg-type]
    first, last, _ = slice(start, end).indices(sizes[dim])  # type: ignore[misc]
    if dim >= state.lead:
        return None
    if (first, last) == (0, sizes[dim]):
        return Step(state, lambda chunk: chunk.value(gradient))
    if state.padded or state.chosen != Choice(sizes[: state.lead], dim, first, last):
        return None
    return Step(replace(state, padded=True), lambda chunk: chunk.value(gradient))


# --- along the other dimensions --------------------------------------------------------------------------------------


def _inner(dims: Any, state: Rows, total: int) -> list[int] | None:
    """Dimensions of a call inside of a chunk; None where one of them numbers rows."""
    given = [dims] if isinstance(dims, int) else list(dims or range(total))
    places = [dim % total for dim in given]
    return None if any(place < state.lead for place in places) else [place - state.lead + 1 for place in places]


def _softmax(node: fx.Node, states: States, count: int) -> Step | None:
    state = _rows_of(node.args[0], states)
    if state is None or state.last or state.padded:
        return None
    dims = _inner(node.args[1], state, len(_shape(node)))
    if dims is None:
        return None
    rest = node.args[2:]
    return Step(state, lambda chunk: chunk.call(node, node.target, [chunk.value(node.args[0]), dims[0], *rest]))


def _softmax_backward(node: fx.Node, states: States, count: int) -> Step | None:
    gradient, output, dim, *rest = node.args
    inside, state = _rows_of(gradient, states), _rows_of(output, states)
    if state is None or state.last or (inside is None and gradient in states):
        return None
    dims = _inner(dim, state, len(_shape(node)))
    if dims is None or (inside is not None and not inside.goes_with(state)):
        return None

    def emit(chunk: Chunk) -> fx.Node:
        given = chunk.value(gradient) if inside is not None else chunk.rows(gradient, state.lead)  # type: ignore[arg-type]
        return chunk.call(node, node.target, [given, chunk.value(output), dims[0], *rest])

    return Step(inside or state, emit)


def _reduction(node: fx.Node, states: States, count: int) -> Step | None:
    """A sum, mean, maximum or log-sum-exp: of each row, or of all of them where it is a sum or a mean."""
    source, dims, *rest = (*node.args, None)[: max(2, len(node.args))]
    state = _rows_of(source, states)
    if state is None or state.last or any(argument in states for argument in rest if isinstance(argument, fx.Node)):
        return None
    shape = _shape(source)
    inner = _inner(dims, state, len(shape)) if dims is not None else None
    if inner is not None:
        if state.padded:
            return None
        given = [inner, *rest]
        return Step(state, lambda chunk: chunk.call(node, node.target, [chunk.value(source), *given], node.kwargs))
    return _over_rows(node, state, shape, dims, rest)


def _over_rows(node: fx.Node, state: Rows, shape: tuple[int, ...], dims: Any, rest: list[Any]) -> Step | None:
    mean = node.target in (_aten.mean.default, _aten.mean.dim)
    if not mean and node.target not in (_aten.sum.default, _aten.sum.dim_IntList):
        return None
    if state.chosen is not None and not state.padded and state.chosen.shape == shape[: state.lead]:
        return None
    places = sorted(dim % len(shape) for dim in ([dims] if isinstance(dims, int) else dims or range(len(shape))))
    if places[: state.lead] != list(range(state.lead)):
        return None
    keep = bool(rest and rest[0])
    if keep and state.lead != 1:
        return None
    inner = [0, *(place - state.lead + 1 for place in places[state.lead :])]
    divisor = math.prod(shape[place] for place in places) if mean else 1
    source = node.args[0]
    return Step(
        Sum(divisor),
        lambda chunk: chunk.call(node, _aten.sum.dim_IntList, [chunk.value(source), inner, keep], node.kwargs),
    )


def _gather(node: fx.Node, states: States, count: int) -> Step | None:
    """Elements of each row by numbers, or the rows with elements written or added at such places."""
    source, dim, index, *more = node.args
    state = _rows_of(source, states)
    if state is None or state.last or state.padded:
        return None
    dims = _inner(dim, state, len(_shape(source)))
    others = [item for item in (index, *more) if isinstance(item, fx.Node)]
    if dims is None or not all(_alongside(item, state, source, states) for item in others):
        return None

    def emit(chunk: Chunk) -> fx.Node:
        given = [_rows_alongside(chunk, item, state, states) for item in (index, *more)]
        return chunk.call(node, node.target, [chunk.value(source), dims[0], *given])

    return Step(state, emit)


def _alongside(item: fx.Node, state: Rows, source: Any, states: States) -> bool:
    """Whether a value has the rows that another one has."""
    inside = _rows_of(item, states)
    if inside is not None:
        return inside.goes_with(state)
    return item not in states and _shape(item)[: state.lead] == _shape(source)[: state.lead]


def _rows_alongside(chunk: Chunk, item: Any, state: Rows, states: States) -> Any:
    outside = isinstance(item, fx.Node) and item not in states
    return chunk.rows(item, state.lead) if outside else chunk.value(item)


def _unsqueeze(node: fx.Node, states: States, count: int) -> Step | None:
    source, dim = node.args
    state = _rows_of(source, states)
    if state is None or state.last or not isinstance(dim, int):
        return None
    place = dim % len(_shape(node)) if node.target is _aten.unsqueeze.default else dim % len(_shape(source))
    if place < state.lead:
        return None
    inner = place - state.lead + 1
    return Step(state, lambda chunk: chunk.call(node, node.target, [chunk.value(source), inner]))


def _expand(node: fx.Node, states: States, count: int) -> Step | None:
    state = _rows_of(node.args[0], states)
    before, after = _shape(node.args[0]), _shape(node)
    if state is None or state.last or len(before) != len(after) or before[: state.lead] != after[: state.lead]:
        return None
    sizes = [-1, *after[state.lead :]]
    return Step(state, lambda chunk: chunk.call(node, node.target, [chunk.value(node.args[0]), sizes]))


def _made(node: fx.Node, states: States, count: int) -> Step | None:
    """A tensor of one number, of the shape of a value with rows or of sizes that are given."""
    shape = _shape(node)
    lead = next((lead for lead in range(1, len(shape)) if math.prod(shape[:lead]) == count), 0)
    like = _rows_of(node.args[0], states) if node.args else None
    if like is not None and not like.last and not like.padded and like.chosen is None:
        lead = like.lead if shape[: like.lead] == _shape(node.args[0])[: like.lead] else lead
    if not lead:
        return None
    fill = 1.0 if "ones" in str(node.target) else 0.0 if "zeros" in str(node.target) else node.args[-1]
    value = value_of(node)
    options = {"dtype": value.dtype, "device": value.device}
    rest = list(shape[lead:])
    return Step(
        Rows(lead), lambda chunk: chunk.call(node, _aten.full.default, [[chunk.count, *rest], fill], options)
    )


# --- products --------------------------------------------------------------------------------------------------------


def _product(node: fx.Node, states: States, count: int) -> Step | None:
    left, right = node.args
    one, other = _rows_of(left, states), _rows_of(right, states)
    assert isinstance(left, fx.Node)
    assert isinstance(right, fx.Node)
    if one is not None and one.last:  # over rows: of a gradient's matrix, transposed, with the input's rows
        if other is not None and (other.last or other.lead != 1):
            return None
        if other is None and (right in states or _shape(right)[0] != _shape(left)[1]):
            return None
        if one.chosen is not None and not one.padded:
            return None
        return Step(
            Sum(),
            lambda chunk: chunk.call(
                node, node.target, [chunk.value(left), chunk.value(right) if other else chunk.rows(right, 1)]
            ),
        )
    if one is not None and other is None and right not in states and one.lead == 1:
        return _plain(node, one)
    return None


def _product_over_rows_of_outside(node: fx.Node, states: States, count: int) -> Step | None:
    """``mm(outside^T, rows)``: the gradient of a weight that is kept the other way round."""
    left, right = node.args
    other = _rows_of(right, states)
    if _rows_of(left, states) is not None or other is None:
        return _product(node, states, count)
    assert isinstance(left, fx.Node)
    turned = left.target is _aten.t.default and isinstance(left.args[0], fx.Node)
    if not turned or other.last or other.lead != 1 or left in states:
        return None
    if other.chosen is not None and not other.padded:
        return None
    source: Any = left.args[0]

    def emit(chunk: Chunk) -> fx.Node:
        rows = chunk.call(left, _aten.t.default, [chunk.rows(source, 1)])
        return chunk.call(node, node.target, [rows, chunk.value(right)])

    return Step(Sum(), emit)


def _affine(node: fx.Node, states: States, count: int) -> Step | None:
    bias, left, right = node.args
    one = _rows_of(left, states)
    if one is None or one.last or one.lead != 1 or bias in states or right in states:
        return None
    return _plain(node, one) if len(_shape(bias)) == 1 and not one.padded else None


# --- losses ----------------------------------------------------------------------------------------------------------

_NONE, _MEAN, _SUM = 0, 1, 2
"""How ``nll_loss`` reduces."""


def _nll(node: fx.Node, states: States, count: int) -> Step | None:
    scores, target, weight, reduction, ignore = node.args
    state = _rows_of(scores, states)
    if state is None or state.last or state.padded or state.lead != 1 or target in states or weight in states:
        return None
    kind = _NONE if reduction == _NONE else _SUM

    def emit(chunk: Chunk) -> fx.Node:
        given = [chunk.value(scores), chunk.rows(target, 1), weight, kind, ignore]  # type: ignore[arg-type]
        return chunk.call(node, node.target, given)

    return Step(state, emit)


def _element(node: fx.Node, states: States, count: int) -> Step | None:
    """The loss of ``nll_loss_forward``, or the total weight of its targets."""
    made, place = node.args
    if not isinstance(made, fx.Node) or made.target is not _aten.nll_loss_forward.default:
        return None
    scores, _target, _weight, reduction, _ignore = made.args
    state = _rows_of(scores, states)
    assert state is not None
    if place == 1:
        return Step(Whole(lambda once: total_weight(once, made)), lambda chunk: None)
    emit: Emit = lambda chunk: chunk.call(node, operator.getitem, [chunk.value(made), 0])  # noqa: E731
    if reduction == _NONE:
        return Step(state, emit)
    if reduction == _SUM:
        return Step(Sum(), emit)

    def finish(once: Any, total: fx.Node) -> fx.Node:
        count = once.once(("total weight", made), lambda inner: total_weight(inner, made))
        return once.call(node, _aten.div.Tensor, [total, count])  # type: ignore[no-any-return]

    return Step(Sum(finish=finish), emit)


def total_weight(chunk: Any, loss: fx.Node) -> fx.Node:
    """The weights of all targets of a loss, added up, as a scalar: how many are not ignored, without weights."""
    scores, target, weight, _, ignore = loss.args
    dtype = value_of(scores).dtype  # type: ignore[arg-type]
    kept = chunk.call(loss, _aten.ne.Scalar, [target, ignore])
    counted = chunk.call(loss, _aten._to_copy.default, [kept], {"dtype": dtype})
    if weight is not None:
        inside = chunk.call(loss, _aten.clamp.default, [target, 0, _shape(weight)[0] - 1])
        counted = chunk.call(loss, _aten.mul.Tensor, [counted, chunk.call(loss, _aten.index_select.default, [weight, 0, inside])])
    return chunk.call(loss, _aten.sum.default, [counted])  # type: ignore[no-any-return]


def _nll_backward(node: fx.Node, states: States, count: int) -> Step | None:
    gradient, scores, target, weight, reduction, ignore, _total = node.args
    state = _rows_of(scores, states)
    if state is None or state.last or state.lead != 1 or target in states or weight in states:
        return None
    inside = _rows_of(gradient, states)
    if gradient in states and inside is None:
        return None
    assert isinstance(gradient, fx.Node)

    def emit(chunk: Chunk) -> fx.Node:
        rows = chunk.rows(target, 1)  # type: ignore[arg-type]
        count = chunk.once(("total weight", node), lambda once: _weight_for(once, node))
        if reduction == _NONE:
            given, kind = chunk.value(gradient) if inside is not None else chunk.rows(gradient, 1), _NONE
        elif reduction == _SUM:
            given, kind = gradient, _SUM
        else:
            given = chunk.once(("gradient", node), lambda once: once.call(node, _aten.div.Tensor, [gradient, count]))
            kind = _SUM
        return chunk.call(node, node.target, [given, chunk.value(scores), rows, weight, kind, ignore, count])

    return Step(state, emit)


def _weight_for(chunk: Any, node: fx.Node) -> fx.Node:
    total = node.args[6]
    assert isinstance(total, fx.Node)
    made = total.args[0]
    assert isinstance(made, fx.Node)
    return chunk.once(("total weight", made), lambda once: total_weight(once, made))  # type: ignore[no-any-return]


MADE_OF_ONE_NUMBER = (
    _aten.full.default,
    _aten.zeros.default,
    _aten.ones.default,
    _aten.new_zeros.default,
    _aten.new_ones.default,
    _aten.new_full.default,
    _aten.zeros_like.default,
    _aten.ones_like.default,
    _aten.full_like.default,
)
"""Ops that make a tensor of one number, whatever the values of their arguments."""

Rule = Callable[[fx.Node, States, int], Step | None]

_RULES: dict[Any, Rule] = {
    _aten.view.default: _view,
    _aten._unsafe_view.default: _view,
    _aten.t.default: _transpose,
    _aten.slice.Tensor: _slice,
    _aten.slice_backward.default: _slice_backward,
    _aten._log_softmax.default: _softmax,
    _aten._softmax.default: _softmax,
    _aten._log_softmax_backward_data.default: _softmax_backward,
    _aten._softmax_backward_data.default: _softmax_backward,
    _aten.sum.default: _reduction,
    _aten.sum.dim_IntList: _reduction,
    _aten.mean.default: _reduction,
    _aten.mean.dim: _reduction,
    _aten.amax.default: _reduction,
    _aten.logsumexp.default: _reduction,
    _aten.gather.default: _gather,
    _aten.scatter.value: _gather,
    _aten.scatter.src: _gather,
    _aten.scatter_add.default: _gather,
    _aten.unsqueeze.default: _unsqueeze,
    _aten.squeeze.dim: _unsqueeze,
    _aten.expand.default: _expand,
    **dict.fromkeys(MADE_OF_ONE_NUMBER, _made),
    _aten.mm.default: _product_over_rows_of_outside,
    _aten.addmm.default: _affine,
    _aten.nll_loss_forward.default: _nll,
    operator.getitem: _element,
    _aten.nll_loss_backward.default: _nll_backward,
}
