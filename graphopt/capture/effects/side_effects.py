"""What a model does beside computing tensors, and a program would lose: refused while it is captured, with the line.

Hooks on tensors inside of forward and backward hooks of submodules change gradients where a program has none of them;
a generator that forward seeds is seeded once, at the capture, and not at each call.

Autocast for a device that a program stands for: torch turns it off where the device is not here.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from graphopt import _torch
from graphopt.capture.call.source_lines import user_frame
from graphopt.capture.effects.state_changes import changes_noted
from graphopt.capture.guards.code_owner import is_covered_file
from graphopt.capture.guards.fingerprint import has_hooks
from graphopt.capture.guards.locations import comparable
from graphopt.errors import CaptureError, GraphBreakError
from graphopt.ir.ops.layers.recurrent import AS_IN_EAGER
from graphopt.ir.ops.values import cuda_indices

__all__ = [
    "CAPTURE_LOCK",
    "autocast_of_others",
    "capturing",
    "drawing_refused",
    "generators_now",
    "modules_now",
    "refuse_backward_hooks",
    "refuse_parameter_hooks",
    "seeding_refused",
]

CAPTURE_LOCK = threading.RLock()
"""Held while a model is captured, which works on state of the whole process, and while a call finds its program."""

_REFUSED: list[tuple[Any, str, str]] = [
    (torch.Tensor, "register_hook", "a hook on a tensor inside of forward, which would not act on gradients"),
    (torch.Tensor, "register_post_accumulate_grad_hook", "a hook on a gradient inside of forward"),
    (torch.Tensor, "is_set_to", "is_set_to inside of forward, which knows nothing of tensors under trace"),
    *(
        (owner, name, f"torch.{name} inside of forward, which would act at the capture and at no later call")
        for owner, names in (
            (torch, ("manual_seed", "seed", "initial_seed", "set_rng_state")),
            (torch.random, ("manual_seed", "seed", "initial_seed", "set_rng_state", "fork_rng")),
        )
        for name in names
    ),
]


@contextlib.contextmanager
def capturing(model: nn.Module, called: object = None, *, keep: bool = False) -> Iterator[list[str]]:
    """While a model is captured: one capture at a time, without the caller's saved-tensor hooks, nothing hidden.

    Gives a list that holds, behind the block, the attributes that forward has set, as ``path.name``, and what else the
    user's code has changed in Python.

    Args:
        model: that is captured.
        called: a loss that is captured around it.
        keep: leave numbers and texts set, as behind a call in eager mode; torch takes back what forward sets.

    Raises:
        CaptureError: where the model's code does what a program would lose.
    """
    own_saving = torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is)
    assigned: dict[tuple[int, str], tuple[nn.Module, Any]] = {}
    names: list[str] = []
    on_cpu = all(_torch.device_kind(tensor) == "cpu" for tensor in (*model.parameters(), *model.buffers()))
    kernels, layouts = _torch.eager_kernels(AS_IN_EAGER, on_cpu=on_cpu), _torch.eager_layouts()
    with CAPTURE_LOCK, own_saving, kernels, layouts, _without_stand_ins(model), contextlib.ExitStack() as stack:
        if not on_cpu:
            stack.enter_context(autocast_of_others())
            stack.enter_context(_torch.without_onednn())
        for owner, name, what in _REFUSED:
            stack.enter_context(_refusing(owner, name, what))
        stack.enter_context(_inference_refused())
        stack.enter_context(_torch.parametrized_apart())
        stack.enter_context(_noting_assignments(assigned))
        changed = stack.enter_context(changes_noted(model, called))
        yield names
    for (_, name), (module, value) in assigned.items():
        if keep and isinstance(value, _KEPT):
            vars(module)[name] = value
    paths = {id(module): path for path, module in model.named_modules()}
    names += [f"{paths[number]}.{name}".lstrip(".") for number, name in assigned if number in paths]
    names += [name for name in changed if name not in names]


_KEPT = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
"""What stays set of what forward sets while it is captured: values that hold no tensors without data."""

_REGISTERED = ("_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks")


def modules_now(model: nn.Module) -> Callable[[], None]:
    """What gives all modules of a model the attributes, parts, training flags and hooks again that they have now."""
    before = [
        (module, dict(module.__dict__), {name: dict(module.__dict__[name]) for name in _REGISTERED})
        for module in model.modules()
    ]

    def put_back() -> None:
        for module, attributes, registered in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for name, entries in registered.items():
                module.__dict__[name].clear()
                module.__dict__[name].update(entries)

    return put_back


@contextlib.contextmanager
def _without_stand_ins(model: nn.Module) -> Iterator[None]:
    """Refuse forward to make parameters or buffers: made while it is traced, they have no data.

    Raises:
        CaptureError: behind the block, the model's parts being what they were before.
    """
    put_back = modules_now(model)
    known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    yield
    tensors = [*model.named_parameters(), *model.named_buffers()]
    made = [name for name, tensor in tensors if id(tensor) not in known and _torch.has_no_data(tensor)]
    if not made:
        return
    put_back()
    raise CaptureError(
        f"forward makes {made[0]!r} while it is traced, so that it would have no data\n"
        "  what to do: call the model once without graphopt, or make all modules, parameters and buffers in __init__"
    )


_SEED = 0x6A09E667F3BCC908
"""What the generator is seeded with meanwhile, so that a seed which it has had before is noticed too."""


@contextlib.contextmanager
def seeding_refused() -> Iterator[None]:
    """Refuse code that seeds a random generator or sets its state; tracing itself draws nothing from it.

    Raises:
        CaptureError: behind the block.
    """
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(_SEED)
    marked = torch.get_rng_state()
    try:
        yield
        changed = not torch.equal(marked, torch.get_rng_state())
    finally:
        torch.default_generator.set_state(before)
    if changed:
        raise CaptureError(
            "forward seeds the random generator, or sets its state, which would act at the capture and at no later "
            "call\n  what to do: take it out of forward; a seed set before the call acts as in eager mode"
        )


@contextlib.contextmanager
def drawing_refused() -> Iterator[None]:
    """Refuse code that draws from Python's random numbers or NumPy's, which a program would have once for all calls.

    Raises:
        GraphBreakError: behind the block; the generators are where they were before.
    """
    before = _other_generators()
    with _torch.collectives_draw_apart(), _system_draws_noted() as drawn:
        yield
    after = _other_generators()
    if drawn:
        raise _drawn_from("the operating system's random numbers (os.urandom, uuid, secrets)")
    for whose, (state, restore) in before.items():
        if state != after[whose][0]:
            restore()
            raise _drawn_from(whose)


def _drawn_from(whose: str) -> GraphBreakError:
    return GraphBreakError(
        f"forward draws from {whose}, and the program would have the number of the capture at every call\n"
        "  what to do: draw with torch (torch.rand), or before the call, and give the number as a tensor"
    )


def _is_of_torch(frame: types.FrameType | None) -> bool:
    """Whether torch makes a call, by itself or through Python's library."""
    while frame is not None and is_covered_file(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(_torch.FOLDER):
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def _system_draws_noted() -> Iterator[list[int]]:
    """Note each time that this thread takes random bytes of the operating system."""
    thread, drawn = threading.get_ident(), list[int]()
    original = os.urandom

    def noting(size: int, /) -> bytes:
        if threading.get_ident() == thread and not _is_of_torch(sys._getframe(1)):
            drawn.append(size)
        return original(size)

    with contextlib.ExitStack() as stack:
        for module, name in ((os, "urandom"), (random, "_urandom")):
            if getattr(module, name, None) is original:
                setattr(module, name, noting)
                stack.callback(setattr, module, name, original)
        yield drawn


def _other_generators() -> dict[str, tuple[Any, Callable[[], None]]]:
    """The state of each generator that is not torch's, and what takes it back there."""
    python, numpy = random.getstate(), np.random.get_state(legacy=False)
    return {
        "Python's random": (python, lambda: random.setstate(python)),
        "numpy.random": (comparable(numpy), lambda: np.random.set_state(numpy)),
    }


def generators_now(tensors: Iterable[torch.Tensor]) -> Callable[[], None]:
    """What takes the random generators of torch, Python and NumPy back to where they are now.

    Args:
        tensors: on whose devices torch may draw.
    """
    host, devices = torch.get_rng_state(), cuda_indices(tensors)
    states = [torch.cuda.get_rng_state(device) for device in devices]
    others = _other_generators()

    def put_back() -> None:
        torch.set_rng_state(host)
        for device, state in zip(devices, states, strict=True):
            torch.cuda.set_rng_state(state, device)
        for _, restore in others.values():
            restore()

    return put_back


@contextlib.contextmanager
def _inference_refused() -> Iterator[None]:
    """Refuse forward to enter ``torch.inference_mode``, which a program would go through with gradients.

    Raises:
        GraphBreakError: inside of the block, where it does so.
    """
    original = torch.inference_mode.__enter__

    def enter(self: torch.inference_mode) -> None:
        if self.mode and not sys._getframe(1).f_code.co_filename.startswith(_torch.FOLDER):
            raise GraphBreakError(
                f"forward uses torch.inference_mode, whose tensors autograd knows nothing of\n  where: {user_frame()}\n"
                "  what to do: use torch.no_grad there, which a program has too"
            )
        original(self)

    torch.inference_mode.__enter__ = enter  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.inference_mode.__enter__ = original  # type: ignore[method-assign]


@contextlib.contextmanager
def _noting_assignments(assigned: dict[tuple[int, str], tuple[nn.Module, Any]]) -> Iterator[None]:
    """Note which plain attributes of modules the user's code sets, and the last value of each."""
    original = nn.Module.__setattr__

    def noting(module: nn.Module, name: str, value: Any) -> None:
        plain = not isinstance(value, (nn.Module, nn.Parameter)) and name != "training"
        if plain and not sys._getframe(1).f_code.co_filename.startswith(_torch.FOLDER):
            assigned[id(module), name] = module, value
        original(module, name, value)

    nn.Module.__setattr__ = noting  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.__setattr__ = original  # type: ignore[method-assign]


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@contextlib.contextmanager
def _refusing(owner: Any, name: str, what: str) -> Iterator[None]:
    original: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(original)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if _is_of_torch(sys._getframe(1)):
            return original(*args, **kwargs)
        raise CaptureError(
            f"forward uses {what}\n  where: {user_frame()}\n"
            "  what to do: take it out of forward; a hook on the output of the model, and a seed set before the call, "
            "act as in eager mode"
        )

    setattr(owner, name, refuse)
    try:
        yield
    finally:
        setattr(owner, name, original)


def refuse_backward_hooks(model: nn.Module) -> None:
    """Raise a ``CaptureError`` for backward hooks of submodules, and for those of all modules.

    The hooks of the model itself act around its program, in a loop of the user's.
    """
    for path, module in model.named_modules():
        hooks = [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]
        if path and hooks:
            name = getattr(hooks[0], "__qualname__", repr(hooks[0]))
            raise CaptureError(
                f"the submodule {path!r} has a backward hook ({name}), and a program runs backward without modules: "
                "remove it, or register it on the model itself"
            )
    if _torch.has_global_backward_hooks():
        raise CaptureError(
            "there is a backward hook for all modules (register_module_full_backward_hook), and a program runs "
            "backward without modules: remove it before the first call"
        )


def refuse_parameter_hooks(model: nn.Module) -> None:
    """Raise a ``CaptureError`` for hooks on parameters, which no gradient reaches in a whole step."""
    for name, parameter in model.named_parameters():
        if has_hooks(parameter):
            raise CaptureError(
                f"the parameter {name!r} has a hook on its gradient, and in a whole step gradients stay inside of the "
                "program: remove it (requires_grad_(False) freezes a parameter, ClipGradients clips), or keep your "
                "loop and use graphopt.optimize"
            )


@contextlib.contextmanager
def autocast_of_others() -> Iterator[None]:
    """While a model is captured for CUDA on tensors of the CPU, its ``torch.autocast("cuda")`` is one for the CPU.

    The regions that are captured so say which calls run under autocast, and to which dtype; what is cast in them is
    decided later, by the rules for the device that the tensors stand for. Autocast for the CPU is off meanwhile, as it
    does nothing to tensors on CUDA.
    """
    original = torch.autocast.__init__

    @functools.wraps(original)
    def init(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        if device_type == "cuda":
            dtype = torch.get_autocast_dtype("cuda") if dtype is None else dtype
            original(self, "cpu", dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)
        else:
            original(self, device_type, dtype=dtype, enabled=False, cache_enabled=cache_enabled)

    torch.autocast.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = original  # type: ignore[method-assign]
