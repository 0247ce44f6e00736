"""Random training programs, one for each number: what goes in and out, ops on any shapes, hooks, ties, buffers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import graphopt
from tests.support.random_ops import SHAPED, D, Layers, rows_of

__all__ = ["INPUTS", "OUTPUTS", "Recipe", "Scrambled", "batches", "loss_of", "recipe_of"]

PARTS = ("forward hook", "pre-hook", "hook with keywords", "hook of the model", "tied", "evaluated dropout",
    "channels last", "frozen norm", "dead outputs")  # fmt: skip
"""What a program may have, each with one chance in four."""


@dataclass(frozen=True)
class Recipe:
    """A training program.

    Attributes:
        lines: each applies an op to two earlier values, counted from the latest.
        inputs: a key of ``INPUTS``.
        outputs: a key of ``OUTPUTS``.
        parts: of ``PARTS``, those it has.
        other_size: whether the last batch has another number of rows.
        pipeline: a number that chooses the passes.
    """

    lines: tuple[tuple[str, int, int], ...]
    inputs: str
    outputs: str
    parts: frozenset[str]
    other_size: bool
    pipeline: int

    def without(self, place: int) -> Recipe:
        """The same with one line less."""
        return replace(self, lines=self.lines[:place] + self.lines[place + 1 :])


def recipe_of(number: int) -> Recipe:
    """The program of a number, the same one every time."""
    chance = random.Random(number)
    names = list(SHAPED)
    lines = [(chance.choice(names), chance.choice((0, 0, 0, 1, 2, 5)), chance.choice((0, 1, 2, 3)))
        for _ in range(chance.randint(2, 10))]  # fmt: skip
    return Recipe(
        tuple(lines),
        chance.choice(list(INPUTS)),
        chance.choice(list(OUTPUTS)),
        frozenset(part for part in PARTS if chance.random() < 0.25),
        chance.random() < 0.15,
        chance.randrange(1 << 20),
    )


# --- what goes in ----------------------------------------------------------------------------------------------------


def _float(*shape: int, trained: bool = False) -> torch.Tensor:
    return torch.randn(shape).requires_grad_(trained)


def _twice(rows: int) -> tuple[Any, ...]:
    x = _float(rows, D, trained=True)
    return x, x


def _sharing(rows: int) -> tuple[Any, ...]:
    base = torch.randn(2, rows, D)
    return base[0], base[1]


def _overlapping(rows: int) -> tuple[Any, ...]:
    base = torch.randn(rows + 1, D)
    return base[:-1], base[1:]


INPUTS: dict[str, Callable[[int], tuple[Any, ...]]] = {
    "one": lambda rows: (_float(rows, D),),
    "one that is trained": lambda rows: (_float(rows, D, trained=True),),
    "two": lambda rows: (_float(rows, D), _float(rows, D, trained=True)),
    "three dimensions": lambda rows: (_float(2, rows, 4, trained=True),),
    "a vector": lambda rows: (_float(rows, trained=True),),
    "transposed": lambda rows: (torch.randn(D, rows).t().requires_grad_(),),
    "every other row": lambda rows: (torch.randn(2 * rows, D)[::2],),
    "expanded": lambda rows: (torch.randn(1, D).expand(rows, D), _float(rows, D)),
    "tokens": lambda rows: (torch.randint(11, (rows,)),),
    "a mask": lambda rows: (_float(rows, D), torch.rand(rows, D) > 0.5),
    "a dictionary": lambda rows: ({"x": _float(rows, D, trained=True), "scale": 0.5, "pair": (_float(rows), None)},),
    "a list": lambda rows: ([_float(rows, D), _float(rows, 3)], "name", True),
    "numbers": lambda rows: (_float(rows, D), 2, 0.25),
    "the same twice": _twice,
    "parts of one storage": _sharing,
    "overlapping parts": _overlapping,
    "no elements": lambda rows: (_float(rows, D, trained=True), _float(0, D)),
    "another precision": lambda rows: (_float(rows, D).double(), _float(rows, D, trained=True)),
}
"""By name what makes the arguments of a call for a number of rows."""


def batches(recipe: Recipe) -> list[tuple[Any, ...]]:
    """Three batches; the last one may have another number of rows."""
    torch.manual_seed(1)
    make = INPUTS[recipe.inputs]
    return [make(6), make(6), make(7 if recipe.other_size else 6)]


# --- the model -------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A submodule with a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Dropout(0.2))

    def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return x + self.inner(x) * factor


class MoreLayers(Layers):
    """Layers of more kinds: a table, a tied head, a frozen parameter, counters, a block."""

    def __init__(self, parts: frozenset[str]) -> None:
        super().__init__()
        self.embedding, self.head, self.conv = nn.Embedding(D, D), nn.Linear(D, D), nn.Conv2d(2, 3, 3, padding=1)
        self.block = Block()
        self.frozen = nn.Parameter(torch.linspace(1, 2, D), requires_grad=False)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("seen", torch.tensor(0.25))
        self.register_buffer("noise", torch.ones(D), persistent=False)
        self.channels_last = "channels last" in parts
        if "tied" in parts:
            self.head.weight = self.embedding.weight
            self.block.inner[0].bias = self.linear.bias
        if "evaluated dropout" in parts:
            self.block.eval()
        if "frozen norm" in parts:
            self.norm.requires_grad_(False)
        if "channels last" in parts:
            self.conv.to(memory_format=torch.channels_last)


class Scrambled(nn.Module):
    """The model of a recipe."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.layers, self.recipe = MoreLayers(recipe.parts), recipe
        if "forward hook" in recipe.parts:
            self.layers.linear.register_forward_hook(lambda module, args, result: result * 0.5 + module.bias)
        if "pre-hook" in recipe.parts:
            self.layers.norm.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        if "hook with keywords" in recipe.parts:
            self.layers.block.register_forward_hook(
                lambda module, args, kwargs, result: result - args[0] * kwargs.get("factor", 0.1), with_kwargs=True
            )
        if "hook of the model" in recipe.parts:
            self.register_forward_hook(lambda module, args, result: pytree.tree_map_only(torch.Tensor, _as_is, result))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = _tensors((args, kwargs))
        pool = [leaf if leaf.dtype == torch.float32 else leaf.float() for leaf in given]
        for number, (op, first, second) in enumerate(self.recipe.lines):
            made = SHAPED[op](self.layers, pool[-1 - first % len(pool)], pool[-1 - second % len(pool)])
            several = made if isinstance(made, tuple) else (made,)
            pool.extend(graphopt.name(value, f"{('even', 'odd')[number % 2]}.line{number}") for value in several)
        last = pool[-1] + 0 * self.layers.linear(rows_of(pool[-1])).sum()
        last = graphopt.name(graphopt.name(last, "even.last"), "odd.last")
        return OUTPUTS[self.recipe.outputs]([*pool[:-1], last], given)


def _as_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


OUTPUTS: dict[str, Callable[[list[torch.Tensor], list[torch.Tensor]], Any]] = {
    "one": lambda pool, given: pool[-1],
    "the last three": lambda pool, given: tuple(pool[-3:]),
    "all": lambda pool, given: list(pool),
    "a dictionary": lambda pool, given: {"y": pool[-1], "first": (pool[0], None), "number": 3},
    "one twice": lambda pool, given: (pool[-1], pool[-1]),
    "a view of another": lambda pool, given: (pool[-1], pool[-1].reshape(-1)[:1], pool[-1].detach()),
    "an input too": lambda pool, given: (pool[-1], given[0]),
    "whole numbers too": lambda pool, given: (pool[-1], pool[-1].detach().flatten().argmax()),
    "transposed": lambda pool, given: pool[-1].unsqueeze(-1).transpose(0, -1),
}
"""By name what a model returns of the values that it computed and the tensors it was given."""


def loss_of(outputs: Any, given: Any, parts: frozenset[str]) -> torch.Tensor:
    """A weighted sum over what a model returned; where ``dead outputs`` is among the parts, over the last of it only.

    Of what was given to the model, and came back, nothing is in it: what the program and the loss read both has a
    gradient of two parts, which eager mode adds in the order of all reads, and autograd behind a program in one of two.
    """
    held = {leaf.untyped_storage()._cdata for leaf in _tensors(given) if leaf.requires_grad}
    leaves = [leaf for leaf in _tensors(outputs) if leaf.requires_grad]
    leaves = [leaf for leaf in leaves if leaf.untyped_storage()._cdata not in held]
    total = torch.zeros(())
    for leaf in leaves[-1:] if "dead outputs" in parts else leaves:
        total = total + (leaf.float() * torch.arange(leaf.numel()).reshape(leaf.shape).cos()).sum()
    return total


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def describe(recipe: Recipe) -> str:
    """A recipe as text."""
    lines = [f"  {op}({first}, {second})" for op, first, second in recipe.lines]
    return "\n".join([f"inputs: {recipe.inputs}; outputs: {recipe.outputs}; {sorted(recipe.parts)}", *lines])


def shrunk(recipe: Recipe, fails: Callable[[Recipe], bool]) -> Recipe:
    """A smaller recipe that fails as well: line by line, then part by part."""
    candidates: Sequence[Recipe] = [recipe]
    while candidates:
        smaller = [recipe.without(place) for place in range(len(recipe.lines))]
        smaller += [replace(recipe, parts=recipe.parts - {part}) for part in recipe.parts]
        smaller += [replace(recipe, inputs="one that is trained")] if recipe.inputs != "one that is trained" else []
        smaller += [replace(recipe, outputs="one")] if recipe.outputs != "one" else []
        smaller += [replace(recipe, other_size=False)] if recipe.other_size else []
        candidates = [candidate for candidate in smaller if fails(candidate)]
        recipe = candidates[0] if candidates else recipe
    return recipe
