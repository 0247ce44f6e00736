"""Computing the large values inside of modules in chunks, forward and backward, so that they are never whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, final

from torch import fx

from graphopt.errors import ArgumentError, GraphoptError, wrong_argument
from graphopt.ir.names import match_names, names_in_part
from graphopt.ir.node import info
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import format_bytes
from graphopt.rewriting.memory.chunk.chunk_rows import chunked
from graphopt.rewriting.memory.chunk.module_regions import is_inside, module_regions, modules_of
from graphopt.rewriting.memory.chunk.row_regions import RowRegion
from graphopt.rewriting.pass_ import Changed, Numerics, Pass, PassStage

__all__ = ["Chunk"]

_ORIGIN = "chunk"
_CANDIDATES = (2, 4, 8, 16, 32, 64)
_WORTH = 0.01
"""The share of the peak that twice as many chunks have to save."""


@final
@dataclass(frozen=True)
class Chunk(Pass):
    """Compute the large values inside of modules in chunks, forward and backward, so that they are never whole.

    Two of them fill the memory of a transformer with a long context: the hidden values of its MLPs, and the scores of
    its attention. In each module that the pattern names, the largest matrix product is found, and the calls around it
    that work on each of its rows by itself: casts, activations, gates, masks, softmax, the next product. Forward
    computes them for one chunk of rows after the other and keeps nothing of them; backward computes a chunk again, and
    its gradients, before the next one begins. Gradients of weights (or of keys and values) are added up over chunks.

    What the rows are is said by ``axis``, a dimension of the product. Of an MLP's hidden values, ``[tokens,
    features]``: 0 for tokens, 1 for features (for few tokens and wide layers). Of scores, ``[batch * heads, queries,
    keys]``: 0 for heads, 1 for queries.

    Sums over rows are added up in another order, and kernels may round otherwise for fewer rows: losses and gradients
    equal the captured program's within rounding, ``rtol`` 1e-5 (float32) or 2e-2 (16 bits) of the largest element of
    each.

    The idea for MLPs is that of Bekman et al., "Arctic Long Sequence Training", 2025 (arXiv 2506.13996), and for scores
    that of Rabe and Staats, "Self-attention Does Not Need O(n^2) Memory", 2021 (arXiv 2112.05682), as a rewrite of the
    program's own calls.

    Args:
        pattern: the path of a module, or a glob over paths (``blocks.*.mlp``); several in a tuple.
        axis: of the product, which numbers the rows; in a tuple one for each pattern.
        chunks: how many; ``auto`` takes the fewest that bring the peak as low as more would, by the program's timeline.

    Raises:
        GraphoptError: for fewer than two chunks, a pattern that names no module, with the near paths, and a module
            whose values cannot be computed by rows, with the call that is in the way (dropout inside is one).

    Example:
        >>> mlps = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(2)))
        >>> sgd = torch.optim.SGD(mlps.parameters(), lr=0.1)
        >>> step = graphopt.optimize_step(mlps, sgd, [Chunk("*", chunks=4)], loss=loss).prepare(x)
        >>> step.records[0].changed.lines
        ('2 x 16.4 kB of 64 rows, 16 at a time',)
    """

    name: ClassVar[str] = "chunk"
    stage: ClassVar[PassStage] = "joint"
    numerics: ClassVar[Numerics] = "tolerant"
    after: ClassVar[tuple[str, ...]] = ("mixed-precision", "scale-loss", "float8", "chunk-loss")
    fixed_sizes: ClassVar[bool] = True

    pattern: str | tuple[str, ...] = ()
    axis: int | tuple[int, ...] = 0
    chunks: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if not self.pattern:
            raise ArgumentError("chunk: name the modules whose values are computed in chunks: pattern='blocks.*.mlp'")
        for axis in self._axes:
            if isinstance(axis, bool) or not isinstance(axis, int) or axis < 0:
                raise wrong_argument(
                    "axis", self.axis, "a dimension of the product, counted from 0, or one per pattern"
                )
        if len(self._axes) != len(self._patterns):
            raise ArgumentError(
                f"chunk: {len(self._axes)} axes for {len(self._patterns)} patterns: give one for all, or one for each"
            )
        if self.chunks == "auto":
            return
        if isinstance(self.chunks, bool) or not isinstance(self.chunks, int):
            raise wrong_argument("chunks", self.chunks, "a number of chunks, or 'auto'")
        if self.chunks < 2:
            raise ArgumentError(f"chunk: {self.chunks} chunks leave values as they are: give 2 at least, or 'auto'")

    @property
    def _patterns(self) -> tuple[str, ...]:
        return (self.pattern,) if isinstance(self.pattern, str) else self.pattern

    @property
    def _axes(self) -> tuple[int, ...]:
        return self.axis if isinstance(self.axis, tuple) else (self.axis,) * len(self._patterns)

    def apply(self, program: Program) -> Changed:
        """See the class; rewrites a joint program."""
        named = self._modules(program)
        done = [node for node in program.nodes if _is_chunked(node)]
        modules = {path: axis for path, axis in named.items() if not any(is_inside(node, path) for node in done)}
        if not modules:
            return Changed(reason="the modules are in chunks already" if named else "no module is named in this part")
        rows = max(_regions(program, path, axis)[-1].rows for path, axis in modules.items())
        chunks = self._choose(program, modules, rows)
        if chunks < 2:
            return Changed(reason="chunks would not lower the peak")
        lines = tuple(_written(program, modules, chunks))
        return Changed(counts={"modules": len(modules), "chunks": chunks}, tensors=tuple(modules), lines=lines)

    def _modules(self, program: Program) -> dict[str, int]:
        """The axis of each module that is named, in program order."""
        table = modules_of(program)
        found: dict[str, int] = {}
        for pattern, axis in zip(self._patterns, self._axes, strict=True):
            if program.context.part:
                named = names_in_part((pattern,), table, program.title)
            else:
                named = match_names((pattern,), table, "module")
            found.update(dict.fromkeys(named, axis))
        return {path: found[path] for path in table if path in found}

    def _choose(self, program: Program, modules: Mapping[str, int], rows: int) -> int:
        if self.chunks != "auto":
            return self.chunks
        best, found = 1, program.memory(measure=False).peak_bytes
        for chunks in _CANDIDATES:
            if chunks > rows:
                break
            trial = program.copy()
            list(_written(trial, modules, chunks))
            peak = trial.memory(measure=False).peak_bytes
            if peak < found * (1 - _WORTH):
                best, found = chunks, peak
        return best


def _is_chunked(node: fx.Node) -> bool:
    return node.op == "call_function" and info(node).made_by == _ORIGIN


def _written(program: Program, modules: Mapping[str, int], chunks: int) -> Iterator[str]:
    """Compute each module's values in chunks; a line for each kind of module."""
    lines: dict[str, int] = {}
    for path, axis in modules.items():
        regions = _regions(program, path, axis)
        for region in regions:
            chunked(program, region, min(chunks, region.rows), _ORIGIN)
        region = regions[-1]
        line = f"{format_bytes(region.matrix_bytes)} of {region.rows} rows, {-(-region.rows // chunks)} at a time"
        lines[line] = lines.get(line, 0) + 1
    yield from (f"{count} x {line}" for line, count in lines.items())


def _regions(program: Program, path: str, axis: int) -> list[RowRegion]:
    found = module_regions(program, path, axis)
    if isinstance(found, str):
        raise GraphoptError(f"chunk cannot compute {path} in chunks: {found}")
    return found
