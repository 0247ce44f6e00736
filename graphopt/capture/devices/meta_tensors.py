"""Models made without memory for their weights: large tensors are on the device ``meta``."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from graphopt import _torch
from graphopt.errors import CaptureError

__all__ = ["LARGEST_KEPT", "without_data"]

LARGEST_KEPT = 65_536
"""Elements up to which a tensor that is made under ``without_data`` has values: constructors read small ones."""

_META = torch.device("meta")

_READS = ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "nonzero")

_MADE_OF_VALUES = (torch.tensor, torch.as_tensor, torch.asarray)
"""Functions that make a tensor of what they are given."""


class without_data(TorchFunctionMode):  # noqa: N801 - used as a function, as torch.no_grad is
    """A context in which tensors take no memory: models of any size are made in it, to be captured with ``device=``.

    Tensors of more than 65,536 elements are on the device ``meta``: shapes and dtypes without values. Smaller ones are
    on the CPU and have their values, which constructors may read. Devices that code names (``"cuda"``, ``.cuda()``) are
    not looked at, since ``graphopt.capture(..., device=...)`` says where the model is to run.

    Raises:
        CaptureError: where code reads a value of a large tensor, which there is none of.

    Example:
        >>> with graphopt.without_data():
        ...     large = torch.nn.Linear(50_000, 50_000, device="cuda")
        >>> large.weight.device, large.weight.numel()
        (device(type='meta'), 2500000000)
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch so that nothing large is allocated."""
        given = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in ("cuda", "pin_memory") and args and isinstance(args[0], torch.Tensor):
            return args[0]
        tensors = [leaf for leaf in _torch.pytree.tree_leaves((args, given)) if isinstance(leaf, torch.Tensor)]
        if not tensors:
            return _made(func, name, args, given)
        args, given = _here((args, given), tensors[0].device, name)
        if not any(tensor.is_meta for tensor in tensors):
            return _kept_small(func, name, args, given)
        if name in _READS:
            raise _no_values(name)
        if any(not tensor.is_meta for tensor in tensors):
            args, given = _all_meta(name, args, given)
        return func(*args, **given)


_FACTORIES = frozenset(
    (
        "empty",
        "zeros",
        "ones",
        "full",
        "rand",
        "randn",
        "randint",
        "randperm",
        "arange",
        "linspace",
        "logspace",
        "eye",
        "empty_strided",
        "normal",
        "tril_indices",
        "triu_indices",
        "hann_window",
        "hamming_window",
        "tensor",
        "as_tensor",
        "asarray",
    )
)
"""Functions that make a tensor of sizes or of numbers."""


_GROW = frozenset(
    (
        "expand",
        "repeat",
        "tile",
        "repeat_interleave",
        "new_empty",
        "new_zeros",
        "new_ones",
        "new_full",
        "outer",
        "matmul",
        "__matmul__",
        "einsum",
        "kron",
        "cartesian_prod",
        "meshgrid",
        "broadcast_to",
    )
)
"""Functions whose result may be large where their arguments are small."""


def _made(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function without tensors; where it makes a large one, on ``meta``."""
    if name not in _FACTORIES:
        args, kwargs = _here((args, kwargs), torch.device("cpu"), name)
        return func(*args, **kwargs)
    kwargs = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
    if func in _MADE_OF_VALUES:
        result = func(*args, **kwargs)
        return result.to(_META) if result.numel() > LARGEST_KEPT else result
    generator = kwargs.pop("generator", None)
    shaped = func(*args, **kwargs, device=_META)
    if shaped.numel() > LARGEST_KEPT:
        return shaped
    return func(*args, **kwargs, **({} if generator is None else {"generator": generator}))


def _kept_small(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of tensors with values; on ``meta`` where the result would be large and new."""
    if name not in _GROW:
        return func(*args, **kwargs)
    shaped_args, shaped_kwargs = _all_meta("", args, kwargs)
    shaped = func(*shaped_args, **shaped_kwargs)
    total = sum(leaf.numel() for leaf in _torch.pytree.tree_leaves(shaped) if isinstance(leaf, torch.Tensor))
    return shaped if total > LARGEST_KEPT else func(*args, **kwargs)


def _here(given: tuple[Any, Any], place: torch.device, name: str) -> tuple[Any, Any]:
    """Arguments without the devices that they name."""
    moves = name in ("to", "type", "cpu")

    def local(leaf: Any) -> Any:
        named = isinstance(leaf, torch.device) or (isinstance(leaf, str) and _is_device(leaf) and moves)
        return place if named else leaf

    args, kwargs = _torch.pytree.tree_map(local, given)
    if "device" in kwargs and kwargs["device"] is not None:
        kwargs["device"] = place
    return args, kwargs


def _is_device(text: str) -> bool:
    return text.partition(":")[0] in ("cpu", "cuda", "meta", "xpu", "mps", "hpu")


def _all_meta(name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments whose tensors are all on ``meta``.

    Raises:
        CaptureError: for a call that would write what has no values into a tensor that has.
    """
    writes = (name.endswith("_") and not name.startswith("__")) or name in ("__setitem__", "__iadd__", "__imul__")
    if writes and isinstance(args[0], torch.Tensor) and not args[0].is_meta:
        raise CaptureError(
            f"{name} writes a tensor without values into one of {args[0].numel()} elements, which has some under "
            "without_data()\n  what to do: make the model under torch.device('meta'), where no tensor has values"
        )
    return _torch.pytree.tree_map_only(  # type: ignore[no-any-return]
        torch.Tensor, lambda tensor: tensor.to(_META), (args, kwargs)
    )


def _no_values(name: str) -> CaptureError:
    return CaptureError(
        f"the code reads values ({name}) of a tensor of more than {LARGEST_KEPT:,} elements, which has none under "
        "without_data()\n  what to do: compute what is read from sizes, or make this model with data"
    )
