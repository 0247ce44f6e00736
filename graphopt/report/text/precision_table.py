"""What precision does to memory: bytes by category of the plain and the rewritten program, with the known formulas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from graphopt.ir.memory.timeline import MemoryTimeline, Storage
from graphopt.ir.node import Phase, info, value_of
from graphopt.ir.ops.values import storage_bytes
from graphopt.ir.program import Program
from graphopt.ir.words.columns import aligned
from graphopt.ir.words.written_units import format_bytes
from graphopt.rewriting.pass_ import Pass
from graphopt.rewriting.precision.casts import parameter_casts

__all__ = [
    "LEVELS",
    "Bytes",
    "Formula",
    "bytes_by_category",
    "changes_precision",
    "level_of",
    "precision_json",
    "precision_text",
]

_ROWS = {
    "weights": "weights",
    "copies": "weights in low precision",
    "gradients": "gradients",
    "state": "optimizer state",
    "activations": "activations",
    "other": "masks, indices",
    "pass_state": "pass state",
}
_WIDE = 4


@dataclass(frozen=True, slots=True)
class Formula:
    """Bytes for each parameter (weights, copies, gradients) and for each activation value that backward reads.

    ``lasting`` says whether the copies stay from step to step; others live from forward to backward.
    """

    weights: int
    copies: int
    gradients: int
    activations: int
    lasting: bool = True


LEVELS: Mapping[str, Formula] = {
    "plain": Formula(weights=4, copies=0, gradients=4, activations=4),
    "O1": Formula(weights=4, copies=2, gradients=4, activations=2, lasting=False),
    "O2": Formula(weights=4, copies=2, gradients=2, activations=2),
}
"""By level of mixed precision; Rajbhandari et al., "ZeRO", 2020 (arXiv 1910.02054), section 3.1, has the last one.

``O1`` keeps float32 weights and gradients, beside copies of the weights that live from forward to backward: with
Adam's 8 bytes of state 16 P + 2 N, and 2 P more while it runs. ``O2`` updates float32 master weights and computes with
copies in low precision and their gradients: 16 P + 2 N in all. The plain program takes 16 P + 4 N.
"""


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes of one program by category, and what they are made of.

    Attributes:
        weights: all parameters.
        copies: casts of parameters to low precision, alive when backward starts or kept across steps.
        gradients: of parameters and inputs, the most that is alive at once; accumulated ones too.
        state: the optimizer's.
        activations: floating-point values of forward that are alive when backward starts, without ``copies``.
        other: the same for masks, indices and all that is not floating point.
        pass_state: what passes keep across steps, without ``copies``.
        parameters: how many elements the weights have.
        trained: how many of them get a gradient.
        values: how many elements ``activations`` has.
    """

    weights: int
    copies: int
    gradients: int
    state: int
    activations: int
    other: int
    pass_state: int
    parameters: int
    trained: int
    values: int

    @property
    def total(self) -> int:
        """All categories together; not the peak, at which neither all gradients nor all activations need be alive."""
        return sum(getattr(self, category) for category in _ROWS)


def bytes_by_category(program: Program) -> Bytes:
    """Where the bytes of a joint or step program are, as ``Program.memory`` counts them (sizes by example)."""
    timeline = program.memory()
    inputs = {role: _inputs(timeline, role) for role in ("parameters", "optimizer state", "pass state")}
    kept_copies = _kept_copies(program, timeline)
    casts = set(parameter_casts(program).values())
    kept = _alive_at_backward(timeline)
    copies = [storage for storage in kept if storage.owner in casts]
    dtypes = _dtypes(timeline)
    others = [storage for storage in kept if storage.owner not in casts]
    floating = [storage for storage in others if _is_floating(dtypes.get(id(storage)))]
    elements = {spec.target: _elements(value_of(node)) for node, spec in program.inputs_of("parameter")}
    trained = _trained(program)
    return Bytes(
        weights=_sum(inputs["parameters"]),
        copies=_sum(copies) + _sum(kept_copies),
        gradients=_most_gradients(timeline),
        state=_sum(inputs["optimizer state"]),
        activations=_sum(floating),
        other=_sum(others) - _sum(floating),
        pass_state=_sum(inputs["pass state"]) - _sum(kept_copies),
        parameters=sum(elements.values()),
        trained=sum(count for name, count in elements.items() if name in trained),
        values=sum(storage.bytes // dtypes[id(storage)].itemsize for storage in floating),
    )


def _kept_copies(program: Program, timeline: MemoryTimeline) -> list[Storage]:
    """The pass state that holds copies of parameters between steps."""
    sources = {target for target, state in program.pass_state.items() if state.source}
    lasting = [node for node, spec in program.inputs_of("pass_state") if spec.target in sources]
    return [storage for node in lasting for storage in timeline.refers[node]]


def _inputs(timeline: MemoryTimeline, category: str) -> list[Storage]:
    return [s for s in timeline.storages if s.owner.op == "placeholder" and s.category == category]


def _alive_at_backward(timeline: MemoryTimeline) -> list[Storage]:
    """What forward computed and keeps when the first call of backward runs."""
    phases = [info(node).phase for node in timeline.nodes]
    start = phases.index(Phase.BACKWARD) if Phase.BACKWARD in phases else len(phases)
    return [
        s
        for s in timeline.storages
        if s.owner.op != "placeholder" and s.category == "activations" and s.first < start <= s.last
    ]


def _dtypes(timeline: MemoryTimeline) -> dict[int, torch.dtype]:
    """The dtype of each storage, by its identity: that of the first value that is this storage and no other."""
    found: dict[int, torch.dtype] = {}
    for node, storages in timeline.refers.items():
        value = value_of(node)
        if len(storages) == 1 and isinstance(value, torch.Tensor):
            found.setdefault(id(storages[0]), value.dtype)
    return found


def _is_floating(dtype: torch.dtype | None) -> bool:
    return dtype is not None and dtype.is_floating_point


def _most_gradients(timeline: MemoryTimeline) -> int:
    change = [0] * (len(timeline.nodes) + 2)
    for storage in timeline.storages:
        if storage.category == "gradients" and storage.owner.op != "placeholder":
            change[storage.first] += storage.bytes
            change[storage.last + 1] -= storage.bytes
    alive = most = 0
    for step in change:
        alive += step
        most = max(most, alive)
    return most


def _trained(program: Program) -> set[str]:
    """The parameters with a gradient; in a step program those whose gradient has its name."""
    names = program.names()
    returned = {spec.target for value, spec in program.outputs_of("gradient") if value is not None}
    return {s.target for _, s in program.inputs_of("parameter") if s.target in returned or f"{s.target}~" in names}


def _elements(value: torch.Tensor) -> int:
    return storage_bytes(value) // value.element_size()


def _sum(storages: Iterable[Storage]) -> int:
    return sum(storage.bytes for storage in storages)


# --- what changes it -------------------------------------------------------------------------------------------------


def changes_precision(before: Program, after: Program) -> bool:
    """Whether a tensor that both programs know by one name differs in dtype, or only one has some floating dtype."""
    old, new = before.names(), after.names()
    if _floating(before) != _floating(after):
        return True
    return any(_dtype(node) != _dtype(new[name]) for name, node in old.items() if name in new)


def _dtype(node: Any) -> torch.dtype | None:
    value = value_of(node)
    return value.dtype if isinstance(value, torch.Tensor) else None


def _floating(program: Program) -> set[torch.dtype]:
    found = {_dtype(node) for node in program.graph.nodes if node.op == "call_function"}
    return {dtype for dtype in found if dtype is not None and dtype.is_floating_point}


def level_of(passes: Iterable[Pass]) -> str | None:
    """The level of mixed precision that a list of passes has, where its formula is known."""
    found = (getattr(current, "level", None) for current in passes)
    return next((level for level in found if level in LEVELS), None)


# --- showing ---------------------------------------------------------------------------------------------------------


def precision_text(before: Program, after: Program, level: str | None = None) -> str:
    """The categories of the plain program beside those of the rewritten one, and the formulas with numbers filled in.

    Args:
        before: the program without passes, of stage joint or step.
        after: what the passes made of it.
        level: of mixed precision, a key of ``LEVELS``; None where the rewritten program follows no known formula.
    """
    plain, new = bytes_by_category(before), bytes_by_category(after)
    rows = [("", "plain", "formula", "rewritten", f"formula {level}" if level else "")]
    for category, name in _ROWS.items():
        size, other = getattr(plain, category), getattr(new, category)
        known = _term(category, level, plain) if level else ""
        if size or other or known:
            rows.append((name, format_bytes(size), _term(category, "plain", plain), format_bytes(other), known))
    totals = [format_bytes(_total(plain, key)) if key else "" for key in ("plain", level)]
    rows.append(("together", format_bytes(plain.total), totals[0], format_bytes(new.total), totals[1]))
    lines = [
        f"P = {plain.parameters:,} parameters{_frozen(plain)}",
        f"N = {plain.values:,} floating-point values that forward keeps for backward, in the plain program",
        "",
        *aligned(rows, right=(1, 2, 3, 4)),
        "",
        f"known formulas, with {_per_parameter(plain)} bytes of optimizer state for each trained parameter",
        *aligned([_known(key, plain) for key in LEVELS], indent=2),
    ]
    return "\n".join(lines) + "\n"


def _frozen(plain: Bytes) -> str:
    return f", T = {plain.trained:,} of them trained" if plain.trained != plain.parameters else ""


def _per_parameter(plain: Bytes) -> int:
    """Bytes of state for each trained parameter, without the step counters of a few bytes for each tensor."""
    return _WIDE * round(plain.state / plain.trained / _WIDE) if plain.trained else 0


def _factors(category: str, key: str, plain: Bytes) -> tuple[int, str, int]:
    """What a formula says of a category: bytes for each, the letter, and how many there are."""
    formula = LEVELS[key]
    trained = ("T" if plain.trained != plain.parameters else "P", plain.trained)
    return {
        "weights": (formula.weights, "P", plain.parameters),
        "copies": (formula.copies, "P", plain.parameters),
        "gradients": (formula.gradients, *trained),
        "state": (_per_parameter(plain), *trained),
        "activations": (formula.activations, "N", plain.values),
    }.get(category, (0, "P", 0))


def _term(category: str, key: str, plain: Bytes) -> str:
    factor, letter, count = _factors(category, key, plain)
    return f"{factor} {letter} = {format_bytes(factor * count)}" if factor else ""


def _total(plain: Bytes, key: str) -> int:
    parts = [_factors(category, key, plain) for category in _ROWS]
    return sum(factor * count for factor, _, count in parts)


def _formula(key: str, plain: Bytes) -> tuple[str, int]:
    """A formula and its bytes, without copies that live only while the program runs."""
    factors: dict[str, int] = {}
    size = 0
    for category in _ROWS:
        factor, letter, count = _factors(category, key, plain)
        if factor and (category != "copies" or LEVELS[key].lasting):
            factors[letter] = factors.get(letter, 0) + factor
            size += factor * count
    return " + ".join(f"{factor} {letter}" for letter, factor in factors.items()), size


def _known(key: str, plain: Bytes) -> tuple[str, ...]:
    formula, size = _formula(key, plain)
    copies = "" if LEVELS[key].lasting else f"and {_term('copies', key, plain)} more while it runs"
    return key, formula, f"= {format_bytes(size)}", copies


def precision_json(before: Program, after: Program, level: str | None = None) -> dict[str, Any]:
    """The same for machines.

    Returns:
        plain data: ``parameters`` (P), ``trained_parameters``, ``activation_values`` (N, of the plain program),
        ``level``, ``before`` and ``after`` with bytes by category, and ``formulas`` by level: as text, in bytes, and
        how many bytes more there are while the program runs.
    """
    plain, new = bytes_by_category(before), bytes_by_category(after)
    return {
        "parameters": plain.parameters,
        "trained_parameters": plain.trained,
        "activation_values": plain.values,
        "level": level,
        "before": _bytes_json(plain),
        "after": _bytes_json(new),
        "formulas": {key: _formula_json(key, plain) for key in LEVELS},
    }


def _bytes_json(found: Bytes) -> dict[str, int]:
    return {name: getattr(found, category) for category, name in _ROWS.items()} | {"together": found.total}


def _formula_json(key: str, plain: Bytes) -> dict[str, Any]:
    formula, size = _formula(key, plain)
    return {"formula": formula, "bytes": size, "while_running_bytes": _total(plain, key) - size}
