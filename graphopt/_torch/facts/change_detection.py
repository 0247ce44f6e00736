"""Noticing cheaply that something changed: versions of dictionaries, metadata of many tensors, hooks that were added.

From ``torch._C._dynamo.guards``: ``dict_version``, a number that changes with every assignment to a dictionary,
``RootGuardManager``, which compares the versions of many in one call, and ``TensorGuards``, which does so with dtype,
device, sizes, strides and ``requires_grad`` of many tensors. From ``torch._dynamo.guards``: the kind of a manager. From
``torch.overrides`` and ``torch.utils._python_dispatch``: the modes that are at work. From
``torch.autograd.forward_ad``: the level of forward-mode differentiation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch._C._dynamo import guards
from torch._dynamo import guards as dynamo_guards
from torch.autograd import forward_ad
from torch.nn.modules import module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils.hooks import RemovableHandle

__all__ = [
    "DictionariesUnchanged",
    "TensorsUnchanged",
    "callers_modes",
    "default_device",
    "dict_version",
    "global_module_hooks",
    "has_global_backward_hooks",
    "hooks_added",
    "in_forward_mode",
    "in_function_transform",
    "is_batched",
    "is_plain_tensor",
    "kernel_choices",
    "transforms_undone",
    "without_dispatch_modes",
]

dict_version = guards.dict_version


class DictionariesUnchanged:
    """Whether nothing was assigned to some dictionaries since they were given here.

    Those that are empty are asked for their truth alone, and the versions of the others are compared by torch, in one
    call where it can.
    """

    def __init__(self, dictionaries: Sequence[dict[Any, Any]]) -> None:
        self._empty = [each for each in dictionaries if type(each) is dict and not each]
        self._others = tuple(each for each in dictionaries if type(each) is not dict or each)
        self._versions = list(map(dict_version, self._others))
        self._check = _version_guards(self._others)

    def __call__(self) -> bool:
        if any(self._empty):
            return False
        if self._check is not None:
            return self._check(self._others)
        return list(map(dict_version, self._others)) == self._versions


def _version_guards(dictionaries: tuple[dict[Any, Any], ...]) -> Callable[[Any], bool] | None:
    """Torch's comparison of the versions of some dictionaries; None where it has no such thing, or another one."""
    try:
        kind = dynamo_guards.GuardManagerType.GUARD_MANAGER
        root: Any = guards.RootGuardManager()  # type: ignore[attr-defined]  # pyright: ignore
        for place, each in enumerate(dictionaries):
            of_item = root.tuple_getitem_manager(place, f"[{place}]", each, kind)
            _add_version_guard(of_item, each)
        return cast(Callable[[Any], bool], root.check) if root.check(dictionaries) else None
    except (AttributeError, TypeError):
        return None


def _add_version_guard(manager: Any, dictionary: dict[Any, Any]) -> None:
    """Newer versions of torch take where the user's code is, too."""
    try:
        manager.add_dict_version_guard(dictionary, [""], None)
    except TypeError:
        manager.add_dict_version_guard(dictionary, [""])


class TensorsUnchanged:
    """Whether some tensors still have the dtype, device, sizes, strides and ``requires_grad`` that they had."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tuple({id(tensor): tensor for tensor in tensors}.values())  # torch refuses one that comes twice
        sizes: Any = [list(tensor.shape) for tensor in self._tensors]
        strides: Any = [list(tensor.stride()) for tensor in self._tensors]
        self._guards = (
            guards.TensorGuards(*self._tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
            if self._tensors
            else None
        )

    def __call__(self) -> bool:
        return self._guards is None or bool(self._guards.check(*self._tensors))


def global_module_hooks() -> tuple[int, ...]:
    """The hooks that act on all modules, by their numbers."""
    return (*module._global_forward_pre_hooks, *module._global_forward_hooks)


def has_global_backward_hooks() -> bool:
    """Whether a backward hook acts on all modules."""
    return bool(module._global_backward_hooks or module._global_backward_pre_hooks)


def in_function_transform() -> bool:
    """Whether a transform of ``torch.func`` (``grad``, ``vjp``, ``jvp``, ``vmap``, …) is at work."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # type: ignore[attr-defined]  # pyright: ignore


@contextlib.contextmanager
def transforms_undone() -> Iterator[None]:
    """Where the block fails, no transform of ``torch.func`` is at work that was not, and nothing switched off by one.

    Dynamo's graphs begin and end transforms by calls, and an error between these would leave one at work.
    """
    functorch, autograd = cast(Any, torch._C._functorch), cast(Any, torch._C._autograd)  # pyright: ignore
    depth, hooks = functorch.get_dynamic_layer_stack_depth(), autograd._saved_tensors_hooks_is_enabled()
    forward = torch._C._is_fwd_grad_enabled()
    try:
        yield
    except BaseException:
        functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        if hooks:
            autograd._saved_tensors_hooks_enable()
        if not in_forward_mode():
            _leave_forward_mode()
        torch._C._set_fwd_grad_enabled(forward)
        raise


def _leave_forward_mode() -> None:
    """End the one level of forward-mode differentiation that there may be, of which torch tells by an error only."""
    try:
        level = torch._C._enter_dual_level()
    except RuntimeError:
        level = 0
    torch._C._exit_dual_level(level=level)


def is_batched(value: object) -> bool:
    """Whether a tensor stands for several that ``torch.autograd.grad(is_grads_batched=True)`` takes at once."""
    functorch: Any = torch._C._functorch  # pyright: ignore
    return isinstance(value, torch.Tensor) and (
        functorch.is_legacy_batchedtensor(value) or functorch.is_batchedtensor(value)
    )


def is_plain_tensor(value: torch.Tensor) -> bool:
    """Whether a tensor is neither of a trace, nor of a transform of ``torch.func``, nor of a class of its own."""
    functorch: Any = torch._C._functorch  # pyright: ignore
    return type(value) in (torch.Tensor, torch.nn.Parameter) and not functorch.is_functorch_wrapped_tensor(value)


def in_forward_mode() -> bool:
    """Whether tensors may have tangents here (``torch.autograd.forward_ad.dual_level``)."""
    level: int = forward_ad._current_level
    return level >= 0


def callers_modes() -> tuple[str, str]:
    """What sees each call of torch, by class: the innermost function mode that is at work, and the dispatch mode.

    Empty where there is none. The default device, which is a mode too, is left out.
    """
    functions = dispatches = ""
    if torch._C._len_torch_function_stack():
        for mode in _get_current_function_mode_stack():
            if not isinstance(mode, DeviceContext):
                functions = type(mode).__name__
    if torch._C._len_torch_dispatch_stack():
        dispatches = type(_get_current_dispatch_mode_stack()[-1]).__name__
    return functions, dispatches


@contextlib.contextmanager
def without_dispatch_modes() -> Iterator[None]:
    """Capture apart from the dispatch modes that are at work, whose results would become part of a program."""
    with _disable_current_modes():
        yield


def default_device() -> torch.device | None:
    """Where tensors are made; None where nobody has said."""
    return torch.get_default_device() if torch._C._len_torch_function_stack() else None


def kernel_choices() -> tuple[bool, ...]:
    """Which kernels torch may choose: for attention (flash, memory-efficient, plain, cuDNN), and oneDNN's."""
    return (
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
        torch._C._get_mkldnn_enabled(),
    )


def hooks_added() -> int:
    """A number that grows with every hook that is registered on a module or a tensor, anywhere in the process."""
    return int(RemovableHandle.next_id)
