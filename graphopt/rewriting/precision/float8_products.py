"""Products of linear layers in 8-bit floating point: which calls they are, and the casts and products in their place.

A linear layer is three products: of its input with its weight, and in backward those that give the gradients of the
input and of the weight. Each operand is cast along the dimension that the product sums over. A cast that two products
can share is made once: with one scale for a matrix, that of the input in forward serves the gradient of the weight
too, so that what waits for backward is the input in 8 bits. Weights are cast in backward again, where they are anyway.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import fx

from graphopt.ir.node import Phase, info, own_phase, set_info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.storage.scaled_float8 import MX_BLOCK, float8_mm, float8_scale, mx_mm, to_float8, to_mx
from graphopt.ir.program import Program

__all__ = ["Product", "Recipe", "cast_products", "obstacle", "products_of"]

aten = torch.ops.aten

Recipe = Literal["tensorwise", "rowwise", "mx"]
"""How operands are scaled: each matrix as a whole, along the dimension that is summed over, or in blocks of 32."""

Kind = Literal["output", "input gradient", "weight gradient"]

_EVEN = 16
"""The 8-bit units of GPUs take features in multiples of it."""

_PUT_TOGETHER = ("cat", "view", "reshape", "_to_copy", "constant_pad_nd")
"""Ops that make one tensor of the shards that are gathered together."""

_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product of a linear layer.

    Attributes:
        node: ``mm``, or ``addmm`` with a bias.
        module: the path of the layer.
        kind: what it gives.
        operands: the two matrices.
        weight: the weight as the layer has it; None in what gives its gradient.
    """

    node: fx.Node
    module: str
    kind: Kind
    operands: tuple[fx.Node, fx.Node]
    weight: fx.Node | None

    @property
    def features(self) -> tuple[int, int]:
        """How many the layer takes and gives."""
        shapes = [value_of(operand).shape for operand in self.operands]
        if self.kind == "weight gradient":
            return int(shapes[1][1]), int(shapes[0][0])
        inputs, outputs = shapes[1] if self.kind == "output" else reversed(shapes[1])
        return int(inputs), int(outputs)


def products_of(program: Program) -> list[Product]:
    """The products of the linear layers in a joint program, in order; those of layers that differ from one are left."""
    kept = {node for node, spec in program.inputs_of("pass_state") if program.pass_state[spec.target].follows}
    parameters = {node for node, _ in program.inputs_of("parameter")} | kept  # copies in fewer bits of some of them
    found, inputs = list[Product](), dict[str, set[fx.Node]]()
    shapes: dict[str, set[tuple[Any, ...]]] = {}
    for node in program.graph.nodes:
        operands = _operands(node)
        if operands is None or not info(node).module:
            continue
        module, (left, right) = info(node).module, operands
        weight = _parameter_behind(right, parameters)
        if weight is not None and own_phase(node) is not Phase.BACKWARD:
            inputs.setdefault(module, set()).add(schema.storage_root(left))
            shapes.setdefault(module, set()).add(tuple(reversed(value_of(right).shape)))
            found.append(Product(node, module, "output", operands, weight))
        elif weight is not None and module in inputs:
            found.append(Product(node, module, "input gradient", operands, weight))
        elif module in inputs and tuple(value_of(node).shape) in shapes[module] and _is_input_of(right, inputs[module]):
            found.append(Product(node, module, "weight gradient", operands, None))
    return found


def _is_input_of(matrix: fx.Node, inputs: set[fx.Node]) -> bool:
    """Whether a matrix is one of some inputs, or recomputed for backward, as they are for nothing else there."""
    root = schema.storage_root(matrix)
    return root in inputs or (root.op == "call_function" and own_phase(root) is Phase.RECOMPUTE)


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The two matrices of a product; None for other calls."""
    if node.target is aten.mm.default:
        given = node.args
    elif node.target is aten.addmm.default and not node.kwargs and len(node.args) == 3:
        given = node.args[1:]
    else:
        return None
    left, right = given
    assert isinstance(left, fx.Node)
    assert isinstance(right, fx.Node)
    return (left, right) if value_of(left).dtype in (torch.float32, torch.bfloat16, torch.float16) else None


def _parameter_behind(matrix: fx.Node, parameters: set[fx.Node]) -> fx.Node | None:
    """The parameter that a matrix is, transposed, cast to fewer bits, or gathered from shards; None for others."""
    root = schema.storage_root(matrix)
    if root.target is aten._to_copy.default:
        root = schema.storage_root(root.args[0])  # type: ignore[arg-type]
    return root if root in parameters or _is_gathered(root, parameters) else None


def _is_gathered(root: fx.Node, parameters: set[fx.Node]) -> bool:
    """Whether a value is cut out of what was gathered from shards of parameters (``fully_shard``)."""
    made = schema.maker(root)
    if schema.op_name(made) == "split_with_sizes_copy":
        made = schema.storage_root(made.all_input_nodes[0])
    pending = [made] if schema.is_gather(made) else []
    for node in pending:  # activations that tensor parallelism gathers come from other calls
        sources = [source for source in node.all_input_nodes if source not in parameters]
        if any(schema.op_name(source) not in _PUT_TOGETHER for source in sources):
            return False
        pending += sources
    return bool(pending)


def obstacle(product: Product, recipe: Recipe, least: int) -> str:
    """Why a product is left as it is; empty where nothing is in the way."""
    features = product.features
    sums = [value_of(product.operands[0]).shape[1]] if recipe == "mx" else []
    odd = next((size for size in (*features, *sums) if not isinstance(size, int)), None)
    if odd is not None:
        return "its sizes vary"
    if min(features) < least:
        return f"{min(features)} features are fewer than min_features={least}"
    wrong = next((size for size in features if size % _EVEN), None)
    if wrong is not None:
        return f"{wrong} features are no multiple of {_EVEN}, which 8-bit units take"
    wrong = next((size for size in sums if size % MX_BLOCK), None)
    return (
        f"{product.kind}: {wrong} numbers are added up, which are no blocks of {MX_BLOCK}" if wrong is not None else ""
    )


def cast_products(program: Program, products: list[Product], recipe: Recipe, origin: str) -> int:
    """Put casts and products in 8 bits in the place of products.

    Args:
        program: of stage joint.
        products: from ``products_of``.
        recipe: how operands are scaled.
        origin: the pass that asks.

    Returns:
        how many casts there are.
    """
    casts = _Casts(program, recipe, origin)
    for product in products:
        casts.replace(product)
    program.erase_dead()
    return casts.count


@dataclass
class _Casts:
    """Makes casts, each once where products can share it."""

    program: Program
    recipe: Recipe
    origin: str
    made: dict[tuple[object, ...], tuple[fx.Node, fx.Node]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(self.made)

    def replace(self, product: Product) -> None:
        """Put the product in 8 bits in the place of one."""
        node, (left, right) = product.node, product.operands
        again = info(node).phase is Phase.RECOMPUTE  # because the model asks for it, which stays so
        origin = info(node).origin if again else self.origin
        common: dict[str, Any] = {"before": node, "phase": info(node).phase, "origin": origin, "like": node}
        if product.weight is not None and _narrows(right):  # cast to 8 bits from what it was cast from, rounded once
            right = self._whole_weight(right, common)
        dtypes = (_E4M3 if product.kind == "output" else self._of_gradients, _E4M3)
        (a, scale_a), (b, scale_b) = self._cast(left, 1, dtypes[0], common), self._cast(right, 0, dtypes[1], common)
        out = value_of(node).dtype
        if self.recipe == "mx":
            made = self.program.insert(mx_mm, (a, b, scale_a, scale_b, out), hint="mx_mm", **common)
        else:
            fast = product.kind == "output"
            made = self.program.insert(float8_mm, (a, b, scale_a, scale_b, out, fast), hint="float8_mm", **common)
        if node.target is aten.addmm.default:
            made = self.program.insert(aten.add.Tensor, (made, node.args[0]), **common)
        set_info(made, replace(info(made), names=info(node).names))
        node.replace_all_uses_with(made)
        self.program.graph.erase_node(node)

    @property
    def _of_gradients(self) -> torch.dtype:
        """The dtype of gradients: with one scale for a matrix their range needs an exponent of one bit more."""
        return _E5M2 if self.recipe == "tensorwise" else _E4M3

    def _whole_weight(self, right: fx.Node, common: Mapping[str, Any]) -> fx.Node:
        """A weight as it is before it is cast, transposed as the operand."""
        base, flipped = _untransposed(right)
        source = base.args[0]
        assert isinstance(source, fx.Node)
        return self.program.insert(aten.t.default, (source,), **common) if flipped else source

    def _cast(
        self, matrix: fx.Node, summed: int, dtype: torch.dtype, common: Mapping[str, Any]
    ) -> tuple[fx.Node, fx.Node]:
        """A matrix in 8 bits and its scale; the product sums over one of its dimensions."""
        base, flipped = _untransposed(matrix)
        dim = summed ^ flipped
        stays = base.op == "placeholder" or (common["phase"] is Phase.BACKWARD and _is_input(base))
        phase = common["phase"] if stays else None  # what is there anyway is cast again, and nothing of it waits
        key = (base, dtype, *(() if self.recipe == "tensorwise" else (dim,)), phase)
        if key not in self.made:
            self.made[key] = self._new_cast(base, dim, dtype, common)
        data, scale = self.made[key]
        if flipped:
            data = self.program.insert(aten.t.default, (data,), **common)
            scale = self.program.insert(aten.t.default, (scale,), **common) if self.recipe != "tensorwise" else scale
        return data, scale

    def _new_cast(
        self, base: fx.Node, dim: int, dtype: torch.dtype, common: Mapping[str, Any]
    ) -> tuple[fx.Node, fx.Node]:
        insert: Callable[..., fx.Node] = self.program.insert
        if self.recipe == "mx":
            both = insert(to_mx, (base, dim), hint="mx", **common)
            data, scale = (insert(operator.getitem, (both, place), **common) for place in (0, 1))
            return data, scale
        by_rows = self.recipe == "rowwise"
        scale = insert(float8_scale, (base, [dim] if by_rows else [], dtype, by_rows), hint="scale", **common)
        return insert(to_float8, (base, scale, dtype), hint="float8", **common), scale


def _untransposed(matrix: fx.Node) -> tuple[fx.Node, bool]:
    """What a matrix is a transposed view of, and whether it is transposed an odd number of times."""
    flipped = False
    while matrix.target is aten.t.default:
        matrix, flipped = matrix.args[0], not flipped  # type: ignore[assignment]
    return matrix, flipped


def _narrows(matrix: fx.Node) -> bool:
    """Whether a weight is cast to fewer bits."""
    base, _ = _untransposed(matrix)
    if base.target is not aten._to_copy.default:
        return False
    source = base.args[0]
    return isinstance(source, fx.Node) and value_of(source).element_size() > value_of(base).element_size()


def _is_input(matrix: fx.Node) -> bool:
    return schema.storage_root(matrix).op == "placeholder"
