"""Matrix products of linear layers in 8-bit floating point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from graphopt.errors import GraphoptError, did_you_mean
from graphopt.ir.names import match_names
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import counted
from graphopt.rewriting.pass_ import Changed, Numerics, Pass, PassStage, by_options
from graphopt.rewriting.precision.float8_products import Product, Recipe, cast_products, obstacle, products_of

__all__ = ["Float8"]

_RECIPES: tuple[Recipe, ...] = ("tensorwise", "rowwise", "mx")


@final
@dataclass(frozen=True)
class Float8(Pass):
    """Compute the matrix products of linear layers in 8-bit floating point, forward and backward.

    Each operand of a product (input, weight, gradient of the output) is multiplied by a scale that is found in the same
    step from its largest magnitude, rounded to 8 bits, and the product gives the dtype that it gave before. Scales,
    casts and products are ops of the program, so that what a plan saves for backward may be the 8 bits of an input in
    place of its 16 or 32. Biases, and everything between the layers, stay as they are.

    ``tensorwise`` has one scale for a matrix, float8_e4m3fn for inputs and weights and float8_e5m2 for gradients.
    ``rowwise`` has a scale for each row along which a product adds up, a power of two, and float8_e4m3fn for all; both
    are torchao's recipes of these names, to the last bit where torchao emulates its products. ``mx`` is MXFP8:
    float8_e4m3fn in blocks of 32 neighbours, whose scale is a power of two of 8 bits (OCP MX 1.0).

    On CUDA devices with units for 8 bits (compute capability 8.9) the first two run there; elsewhere, and ``mx``
    everywhere, products are computed in float32 from the values in 8 bits: the numbers are the same, nothing is faster.
    A relative error of 2^-4 (e4m3) or 2^-3 (e5m2) of an element is the most that rounding within the range makes.

    Layers whose features are no multiples of 16, or of 32 numbers to add up with ``mx``, stay as they are; the record
    says which and why. In evaluation, and in programs of the stage forward that are exported, weights and products are
    those of the model as it is.

    Micikevicius et al., "FP8 Formats for Deep Learning", 2022 (arXiv 2209.05433).

    Args:
        recipe: ``tensorwise``, ``rowwise`` or ``mx``.
        layers: names or globs of linear layers; several in a tuple.
        skip: names or globs of layers among them that stay as they are, such as the last one.
        min_features: layers that take or give fewer features stay as they are.

    Raises:
        GraphoptError: for another recipe, and for a name that no linear layer has, with the near names.

    Example:
        >>> mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        >>> step = graphopt.optimize_step(
        ...     mlp, torch.optim.SGD(mlp.parameters(), lr=0.1), [Float8(skip="2")], loss=loss
        ... ).prepare(x)
        >>> step.records[0].changed.counts
        {'layers': 1, 'products': 2, 'casts': 4}
    """

    name: ClassVar[str] = "float8"
    stage: ClassVar[PassStage] = "joint"
    numerics: ClassVar[Numerics] = "changes"
    after: ClassVar[tuple[str, ...]] = ("mixed-precision", "scale-loss")
    # rows that vary cannot be seen to come in blocks of 32, and the same batch has to round alike in every program
    fixed_sizes: ClassVar[bool] = by_options(False, lambda self: self.recipe == "mx")

    recipe: Recipe = "tensorwise"
    layers: str | tuple[str, ...] = "**"
    skip: str | tuple[str, ...] = ()
    min_features: int = 0

    def __post_init__(self) -> None:
        if self.recipe not in _RECIPES:
            hint = did_you_mean(str(self.recipe), _RECIPES) or f"use {', '.join(_RECIPES)}"
            raise GraphoptError(f"float8: recipe={self.recipe!r} is unknown; {hint}")
        if self.min_features < 0:
            raise GraphoptError(f"float8: min_features is a number of at least 0, got {self.min_features}")

    def apply(self, program: Program) -> Changed:
        """See the class; rewrites a joint program."""
        products = products_of(program)
        if not products:
            return Changed(reason="there is no product of a linear layer in this program")
        chosen = self._chosen(products)
        taken: list[Product] = []
        left: dict[str, list[str]] = {}
        for product in chosen:
            why = obstacle(product, self.recipe, self.min_features)
            if not why:
                taken.append(product)
            elif product.module not in (names := left.setdefault(why, [])):
                names.append(product.module)
        lines = tuple(f"left as they are: {', '.join(names)}: {why}" for why, names in left.items())
        if not taken:
            return Changed(reason="; ".join(["no layer can be computed in 8 bits", *lines]))
        layers = tuple(dict.fromkeys(product.module for product in taken))
        casts = cast_products(program, taken, self.recipe, self.name)
        first = f"{counted(len(taken), 'products')} of {counted(len(layers), 'layers')} in float8, {self.recipe}"
        return Changed(
            {"layers": len(layers), "products": len(taken), "casts": casts}, tensors=layers, lines=(first, *lines)
        )

    def _chosen(self, products: list[Product]) -> list[Product]:
        names = dict.fromkeys(product.module for product in products)
        wanted = match_names([self.layers] if isinstance(self.layers, str) else self.layers, names, "linear layer")
        skipped = match_names([self.skip] if isinstance(self.skip, str) else self.skip, names, "linear layer")
        return [product for product in products if product.module in wanted and product.module not in skipped]
