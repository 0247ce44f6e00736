"""The tensors of a program as a table: every layer on its own line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict, TypeVar, Unpack

from graphopt.errors import GraphoptError, did_you_mean
from graphopt.ir.files.text import short_source
from graphopt.ir.names import match_names
from graphopt.ir.node import Phase, TensorInfo
from graphopt.ir.ops.values import DTYPE_NAMES
from graphopt.ir.program import Program
from graphopt.ir.words.columns import aligned
from graphopt.ir.words.written_units import counted, format_bytes

__all__ = [
    "TensorFilters",
    "TensorRow",
    "TensorsTable",
    "chosen",
    "rows_json",
    "tensors_json",
    "tensors_table",
]

_HEAD = ("name", "type", "bytes", "phase", "role", "saved", "source", "also")


class TensorFilters(TypedDict, total=False):
    """What a table can be narrowed to; what is left out does not narrow it.

    ``phase`` is a phase (``"forward"``), ``role`` a role (``"parameter"``, ``"activation"``), ``module`` a module path
    whose insides count too, ``saved`` whether backward reads the tensor, ``min_bytes`` the least size in bytes.
    """

    phase: str
    role: str
    module: str
    saved: bool
    min_bytes: int


class _Sized(Protocol):
    """What has a name and takes bytes."""

    @property
    def name(self) -> str: ...

    @property
    def bytes(self) -> int: ...


_Named = TypeVar("_Named", bound=_Sized)


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor: what is known of it, and its other names."""

    tensor: TensorInfo
    also: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name that the row is called by."""
        return self.tensor.name

    @property
    def bytes(self) -> int:
        """Of its storage; 0 for a view."""
        return self.tensor.bytes

    @property
    def type(self) -> str:
        """Dtype and shape, as in the program's text: ``f32[8, 256]``."""
        dtype = DTYPE_NAMES.get(self.tensor.dtype, str(self.tensor.dtype).removeprefix("torch."))
        return f"{dtype}[{', '.join(str(size) for size in self.tensor.shape)}]"


@dataclass(frozen=True, slots=True)
class TensorsTable:
    """Rows in program order; ``str(table)`` is plain text."""

    rows: tuple[TensorRow, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all storages in the table; views count nothing."""
        return sum(row.tensor.bytes for row in self.rows)

    def __str__(self) -> str:
        rows = [
            (
                row.tensor.name,
                row.type,
                format_bytes(row.tensor.bytes) if row.tensor.bytes or 0 in row.tensor.shape else "view",
                row.tensor.phase.value,
                row.tensor.role,
                "saved" if row.tensor.saved else "",
                short_source(row.tensor.source),
                ", ".join(row.also),
            )
            for row in self.rows
        ]
        head = tuple(title if any(row[column] for row in rows) else "" for column, title in enumerate(_HEAD))
        count = counted(len(rows), "tensors")
        return (
            "\n".join(
                [*(aligned([head, *rows], right=(2,)) if rows else []), f"{count}, {format_bytes(self.total_bytes)}"]
            )
            + "\n"
        )


def tensors_table(program: Program, patterns: Iterable[str] = (), **filters: Unpack[TensorFilters]) -> TensorsTable:
    """The tensors of a program, one row each; layers that look the same are not folded.

    Args:
        program: of any stage.
        patterns: names or globs (``blocks.*``, ``layers.*::mm``, ``encoder.**``); all tensors without any. A row is
            called by the first of its names that a pattern names.
        filters: see ``TensorFilters``.

    Raises:
        GraphoptError: for a pattern that names nothing, or an unknown phase, role or module, with near names.
    """
    tensors = program.tensors
    _check(tensors, filters)
    wanted = list(patterns)
    named = set(match_names(wanted, {tensor.name: tensor for tensor in tensors})) if wanted else None
    groups: dict[str, list[TensorInfo]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.node, []).append(tensor)
    rows = []
    for group in groups.values():
        first = next((tensor for tensor in group if named is None or tensor.name in named), None)
        if first is not None and _passes(first, filters):
            rows.append(TensorRow(first, tuple(tensor.name for tensor in group if tensor is not first)))
    return TensorsTable(tuple(rows))


def tensors_json(
    program: Program, patterns: Iterable[str] = (), **filters: Unpack[TensorFilters]
) -> list[dict[str, Any]]:
    """The rows of ``tensors_table`` as plain data; sizes that vary are text, everything else is as in the table.

    Raises:
        GraphoptError: as ``tensors_table``.
    """
    return rows_json(tensors_table(program, patterns, **filters).rows)


def rows_json(rows: Iterable[TensorRow]) -> list[dict[str, Any]]:
    """Rows as plain data."""
    return [
        {
            "name": row.tensor.name,
            "also": list(row.also),
            "node": row.tensor.node,
            "shape": [size if isinstance(size, int) else str(size) for size in row.tensor.shape],
            "dtype": str(row.tensor.dtype).removeprefix("torch."),
            "bytes": row.tensor.bytes,
            "phase": row.tensor.phase.value,
            "module": row.tensor.module,
            "source": row.tensor.source,
            "role": row.tensor.role,
            "saved": row.tensor.saved,
        }
        for row in rows
    ]


def chosen(rows: Sequence[_Named], sort: str = "program", limit: int | None = None) -> tuple[list[_Named], int]:
    """Rows in an order, the first ``limit`` of them, and how many are left out.

    Args:
        rows: in the order of the program.
        sort: ``program`` (as they are), ``bytes`` (the largest first), or ``name``.
        limit: how many there may be; None for all.
    """
    keys: dict[str, Callable[[_Named], Any]] = {"bytes": lambda row: -row.bytes, "name": lambda row: row.name}
    ordered = sorted(rows, key=keys[sort]) if sort in keys else list(rows)
    shown = ordered[:limit]
    return shown, len(ordered) - len(shown)


def _check(tensors: list[TensorInfo], filters: TensorFilters) -> None:
    modules = {tensor.module for tensor in tensors}
    inside = modules | {path[:end] for path in modules for end, letter in enumerate(path) if letter == "."}
    known = {
        "phase": {phase.value for phase in Phase},
        "role": {tensor.role for tensor in tensors},
        "module": inside,
    }
    problems = []
    for key, choices in known.items():
        value = str(filters.get(key, ""))
        if value and value not in choices:
            hint = did_you_mean(value, sorted(choices)) or f"there are {', '.join(sorted(choices - {''}))}"
            problems.append(f"no tensor of this program has the {key} {value!r}; {hint}")
    if problems:
        raise GraphoptError("\n".join(problems))


def _passes(tensor: TensorInfo, filters: TensorFilters) -> bool:
    module = filters.get("module", "")
    return (
        filters.get("phase", tensor.phase.value) == tensor.phase.value
        and filters.get("role", tensor.role) == tensor.role
        and (not module or tensor.module == module or tensor.module.startswith(f"{module}."))
        and filters.get("saved", tensor.saved) == tensor.saved
        and tensor.bytes >= filters.get("min_bytes", 0)
    )
