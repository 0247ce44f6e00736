"""What ``torch.autocast`` does to a call, learned from autocast itself.

No list of ops is kept here. A call is made under autocast on example values without data, and what reaches the device
is watched: the casts of arguments, and the op with its arguments. The same treatment is then written down without
autocast and watched too; it is taken only where both reach the device with the same calls. So the lists, the promotion
to the widest dtype and the dtypes that some ops are called with are those of the torch that is installed.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from graphopt import _torch

__all__ = ["ELIGIBLE", "LOW_DTYPES", "Autocast", "Treatment", "autocast_lists"]

LOW_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""The dtypes of low precision, by name."""

ELIGIBLE = (torch.float32, torch.float16, torch.bfloat16)
"""The dtypes that mixed precision casts from; integers, complex numbers and float64 stay as they are."""

_WITH_DTYPE = {
    torch.ops.aten.norm.Scalar: torch.ops.aten.norm.ScalarOpt_dtype,
    torch.ops.aten.norm.ScalarOpt_dim: torch.ops.aten.norm.ScalarOpt_dim_dtype,
}
"""Ops whose overload with a dtype is another one."""

_Call = tuple[_torch.OpOverload, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Treatment:
    """How a call is made in mixed precision.

    Attributes:
        casts: for each tensor argument in order, the dtype it is cast to, or None.
        order: the places of the arguments that are cast, in the order of the casts, where it is not that of the
            arguments; gradients are summed in the opposite order.
        op: another overload to call.
        kwargs: further keyword arguments of the call.
        args: further positional arguments of the call.
        inside: autocast acts on the parts of a composite op, which have to be treated one by one.
        region: autocast does what no casts of arguments do; the call runs under autocast as it is.
    """

    casts: tuple[torch.dtype | None, ...] = ()
    order: tuple[int, ...] = ()
    op: _torch.OpOverload | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    args: tuple[Any, ...] = ()
    inside: bool = False
    region: bool = False


@contextlib.contextmanager
def _autocast(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Autocast for a device type, also where there is no such device; without its cache of parameters' casts."""
    saved = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, saved[0])
        torch.set_autocast_dtype(device, saved[1])
        torch.set_autocast_cache_enabled(saved[2])


class Autocast:
    """The rules of ``torch.autocast`` for one dtype, asked call by call; each distinct question is asked once."""

    def __init__(self, dtype: torch.dtype, mode: _torch.FakeTensorMode) -> None:
        self.dtype = dtype
        self._mode = mode
        self._known: dict[str, Treatment] = {}

    def treatment(self, op: _torch.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Treatment:
        """What autocast does to a call; the arguments hold example values of this object's mode."""
        args, kwargs = self._on_device(args, kwargs)
        tensors = tensor_leaves((args, kwargs))
        device = next((tensor.device.type for tensor in tensors), "cpu")
        if not tensors or op._schema.is_mutable or not torch.amp.is_autocast_available(device):
            return Treatment()
        ruled = _torch.has_autocast_rule(op, device)
        if not ruled and not _torch.is_composite(op):
            return Treatment()
        key = f"{op} {device} {_torch.pytree.tree_map(_described, (args, kwargs))}"
        if key not in self._known:
            self._known[key] = self._ask(op, args, kwargs, device, ruled)
        return self._known[key]

    def _on_device(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments; where they stand for those of another type of device, values on such a device."""

        def there(value: torch.Tensor) -> torch.Tensor:
            kind = _torch.device_kind(value)
            if kind == value.device.type:
                return value
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=kind)

        with self._mode:
            return _torch.pytree.tree_map_only(torch.Tensor, there, (args, kwargs))  # type: ignore[no-any-return]

    def kind(self, op: _torch.OpOverload, device: str) -> str:
        """Under which heading of ``autocast_lists`` an op belongs; empty where nothing is cast."""
        low, full = self.dtype, torch.float32
        if low in self._first_casts(op, _made_up(op, (full, full), device, self._mode), device):
            return "low precision"
        halves = _made_up(op, (low, low), device, self._mode)
        under, plain = self._first_calls(op, halves, device), self._first_calls(op, halves)
        if full in self._first_casts(op, halves, device) or (under and not _same_calls(under, plain)):
            return "float32"
        return "widest" if full in self._first_casts(op, _made_up(op, (low, full), device, self._mode), device) else ""

    def _first_calls(
        self, op: _torch.OpOverload, given: tuple[tuple[Any, ...], dict[str, Any]], device: str | None = None
    ) -> list[_Call]:
        """The casts and the first other op that reach the device; an op may refuse made-up arguments after that."""
        calls: list[_Call] = []
        with contextlib.suppress(Exception):
            self._watched(op, *given, device, recorder=_torch.CallRecorder(calls, run=False))
        return calls

    def _first_casts(
        self, op: _torch.OpOverload, given: tuple[tuple[Any, ...], dict[str, Any]], device: str
    ) -> set[torch.dtype | None]:
        return set(_observed(given, self._first_calls(op, given, device))[1])

    def _ask(
        self, op: _torch.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], device: str, ruled: bool
    ) -> Treatment:
        under = self._watched(op, args, kwargs, device)
        if self._gives(under, Treatment(), op, args, kwargs):
            return Treatment()
        if ruled:
            for candidate in _candidates(op, args, kwargs, under):
                if self._gives(under, candidate, op, args, kwargs):
                    return candidate
        composite = _torch.is_composite(op) and not ruled
        return Treatment(inside=composite, region=not composite)

    def _gives(
        self,
        under: list[_Call],
        treatment: Treatment,
        op: _torch.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> bool:
        """Whether a treatment, without autocast, reaches the device with the same calls as the op under autocast."""
        try:
            with _torch.refusals_expected():
                calls = self._watched(*treated(treatment, op, args, kwargs), casts=treatment.casts)
        except Exception:  # arguments of different dtypes, which many ops refuse
            return False
        return _same_calls(under, calls)

    def _watched(
        self,
        op: _torch.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: str | None = None,
        casts: tuple[torch.dtype | None, ...] = (),
        recorder: _torch.CallRecorder | None = None,
    ) -> list[_Call]:
        """The calls that reach the device, with autocast for a device type or without autocast after ``casts``."""
        recorder = recorder or _torch.CallRecorder([])
        around = _autocast(device, self.dtype) if device is not None else contextlib.nullcontext()
        with self._mode, torch.no_grad(), recorder, around:
            op_args, op_kwargs = _cast_leaves((args, kwargs), casts)
            op(*op_args, **op_kwargs)
        return recorder.calls


def tensor_leaves(values: Any) -> list[torch.Tensor]:
    """The tensors among (nested) arguments, in order."""
    return [leaf for leaf in _torch.pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def treated(
    treatment: Treatment, op: _torch.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[_torch.OpOverload, tuple[Any, ...], dict[str, Any]]:
    """The call that a treatment makes of a call, casts apart."""
    names = [argument.name for argument in op._schema.arguments]
    replaced = [index for index, name in enumerate(names[: len(args)]) if name in treatment.kwargs]
    kept = args[: replaced[0]] if replaced else args
    return treatment.op or op, (*kept, *treatment.args), {**kwargs, **treatment.kwargs}


def _cast_leaves(values: Any, casts: tuple[torch.dtype | None, ...]) -> Any:
    wanted = iter(casts)

    def cast(value: Any) -> Any:
        dtype = next(wanted, None) if isinstance(value, torch.Tensor) else None
        return value if dtype is None else torch.ops.aten._to_copy.default(value, dtype=dtype)

    return _torch.pytree.tree_map(cast, values)


def _candidates(
    op: _torch.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], under: list[_Call]
) -> Iterator[Treatment]:
    """The treatments that autocast's rules consist of: a dtype to compute in where none is given, and casts."""
    full: dict[str, Any] = {"dtype": torch.float32}
    names = [argument.name for argument in op._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if "dtype" in names and given.get("dtype") is None:
        yield Treatment(kwargs=full)
    with_dtype = _WITH_DTYPE.get(op)
    if with_dtype is not None:
        yield Treatment(
            op=with_dtype, args=tuple(a.default_value for a in op._schema.arguments[len(args) :]), kwargs=full
        )
    places, casts = _observed((args, kwargs), under)
    yield Treatment(casts=casts, order=places)


def _observed(values: Any, under: list[_Call]) -> tuple[tuple[int, ...], tuple[torch.dtype | None, ...]]:
    """The tensor arguments that are cast before anything else runs: their places in the order of the casts, and dtypes.

    The dtypes are those of all tensor arguments, in the arguments' order; None where there is no cast.
    """
    places: dict[int, list[int]] = {}
    for place, tensor in enumerate(tensor_leaves(values)):
        places.setdefault(id(tensor), []).append(place)
    found: dict[int, torch.dtype] = {}
    for op, args, kwargs in under:
        waiting = places.get(id(args[0])) if op is torch.ops.aten._to_copy.default else None
        if not waiting:
            break
        found[waiting.pop(0)] = kwargs["dtype"]
    return tuple(found), tuple(found.get(place) for place in range(len(tensor_leaves(values))))


def _same_calls(one: list[_Call], other: list[_Call]) -> bool:
    """Whether two lists of calls are equal; C++ says nothing about the order of the casts that come first."""
    (casts, calls), (other_casts, other_calls) = _written(one), _written(other)
    return sorted(casts) == sorted(other_casts) and calls == other_calls


def _written(calls: list[_Call]) -> tuple[list[str], list[str]]:
    """The casts that come first and the other calls, without data."""
    texts = [str(_torch.pytree.tree_map(_described, call)) for call in calls]
    first = next(
        (place for place, call in enumerate(calls) if call[0] is not torch.ops.aten._to_copy.default), len(calls)
    )
    return texts[:first], texts[first:]


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return f"<{tuple(value.shape)} {tuple(value.stride())} {value.dtype} {value.device}>"
    return value


# --- the rules as a table --------------------------------------------------------------------------------------------


def autocast_lists(device: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, tuple[str, ...]]:
    """How ``torch.autocast`` treats the ops that it has rules for, asked of the torch that is installed.

    Args:
        device: ``cpu`` or ``cuda``; there need not be such a device.
        dtype: autocast's.

    Returns:
        Names of ops (``linear``, ``norm.Scalar``) under ``low precision`` (arguments are cast to ``dtype``),
        ``float32`` (arguments are cast up, or the op is told to compute in float32) and ``widest`` (arguments are cast
        to the widest dtype among them).
    """
    mode = _torch.FakeTensorMode()
    rules = Autocast(dtype, mode)
    found: dict[str, list[str]] = {"low precision": [], "float32": [], "widest": []}
    for op in _torch.autocast_operators(device):
        kind = rules.kind(op, device)
        if kind:
            found[kind].append(_torch.qualified_name(op).removeprefix("aten::"))
    return {kind: tuple(names) for kind, names in found.items()}


def _made_up(
    op: _torch.OpOverload, dtypes: tuple[torch.dtype, torch.dtype], device: str, mode: _torch.FakeTensorMode
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the kinds that an op takes: matrices of the two dtypes in turn, ones, and defaults.

    Autocast casts before the op looks at shapes, so these need not fit each other.
    """
    turn = itertools.cycle(dtypes)

    def matrix() -> torch.Tensor:
        with mode:
            return torch.empty(2, 2, dtype=next(turn), device=device)

    made: dict[str, Any] = {}
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if argument.has_default_value():
            continue
        if kind == "Tensor":
            made[argument.name] = matrix()
        elif kind == "List[Tensor]":
            made[argument.name] = [matrix(), matrix()]
        else:
            made[argument.name] = next((value for start, value in _ONES.items() if kind.startswith(start)), None)
    flat = [made.pop(a.name) for a in op._schema.arguments if not a.kwarg_only and a.name in made]
    return tuple(flat), made


_ONES = {
    "int": 1,
    "float": 1.0,
    "bool": False,
    "number": 1,
    "str": "ij,jk->ik",
    "List[int]": [1, 1],
    "SymInt": 1,
    "List[SymInt]": [1, 1],
    "List[Optional[Tensor]]": [None],
}
