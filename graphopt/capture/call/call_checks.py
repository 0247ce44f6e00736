"""What a capture is asked for, checked before anything is traced: the loss, the optimizer, the call, varying sizes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from graphopt import _torch
from graphopt.capture.call.varying_axes import VaryingAxes
from graphopt.errors import ArgumentError, CaptureError, did_you_mean, near_words, shown, wrong_argument

__all__ = [
    "argument_names",
    "check_call",
    "check_dynamic_shapes",
    "check_loss",
    "check_model",
    "check_optimizer",
    "shapes_by_argument",
]

_FORM = "loss(model, *batch) that returns a scalar"
_EXAMPLE = "loss=lambda model, x, y: F.cross_entropy(model(x), y)"
_LOSSES = sorted(
    name for name in vars(F) if name.endswith("_loss") or name.startswith(("cross_ent", "binary_cross_ent"))
)
_SHORT = {"ce": "cross_entropy", "bce": "binary_cross_entropy", "mae": "l1_loss"}


def check_model(model: object) -> None:
    """Refuse what is no module, with what was probably meant.

    Raises:
        CaptureError: with what came, and what to give.
    """
    if isinstance(model, nn.Module):
        return
    hint = ""
    if isinstance(model, type) and issubclass(model, nn.Module):
        hint = f": call it, {model.__name__}(...)"
    elif isinstance(model, torch.optim.Optimizer):
        hint = ": the model comes first, and the optimizer second"
    elif callable(model):
        hint = ": put a function into the forward of a module"
    raise CaptureError(f"the model is expected to be an nn.Module, got {shown(model)}{hint}")


# --- the loss --------------------------------------------------------------------------------------------------------


def check_loss(loss: object, model: object = None) -> None:
    """Refuse what cannot be called as ``loss(model, *batch)``: names, classes, and losses without a model.

    Raises:
        ArgumentError: with the form in which to give it.
    """
    if loss is None or loss is True:
        return
    if loss is False:
        raise wrong_argument("loss", loss, _FORM, "leave it out, or give True, where the model returns its loss")
    if isinstance(loss, str):
        name = _SHORT.get(loss.lower()) or next(iter(near_words(loss, _LOSSES)), "cross_entropy")
        raise wrong_argument("loss", loss, _FORM, f"write loss=lambda model, x, y: F.{name}(model(x), y)")
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        raise wrong_argument("loss", loss, _FORM, f"make it, criterion = {loss.__name__}(), and {_around('criterion')}")
    if loss is model:
        raise wrong_argument("loss", loss, _FORM, "leave it out where the model itself returns its loss")
    if type(loss).__module__ == "torch.nn.modules.loss":
        raise wrong_argument("loss", loss, _FORM, _around("criterion"))
    if getattr(loss, "__module__", "") == F.__name__ or loss in (getattr(F, name) for name in _LOSSES):
        raise wrong_argument("loss", loss, _FORM, _around(f"F.{getattr(loss, '__name__', 'cross_entropy')}"))
    if not callable(loss):
        raise wrong_argument("loss", loss, _FORM, f"write {_EXAMPLE}")


def _around(criterion: str) -> str:
    """How to write a loss around a function of outputs and targets."""
    return f"it does not run the model: write loss=lambda model, x, y: {criterion}(model(x), y)"


# --- the optimizer ---------------------------------------------------------------------------------------------------


def check_optimizer(optimizer: object, model: nn.Module) -> None:
    """Refuse what is no optimizer, and one of other parameters than the model's.

    Raises:
        ArgumentError: for something else than a ``torch.optim`` optimizer.
        CaptureError: for an optimizer of another model.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise wrong_argument(
            "optimizer", optimizer, "a torch.optim optimizer over model.parameters()", _other_optimizer(optimizer)
        )
    own = {id(parameter) for parameter in model.parameters()}
    if own and not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        raise CaptureError(
            f"the optimizer holds none of the parameters of this {type(model).__name__}: was it made of another model, "
            "or before the model was replaced, copied or moved? make it from model.parameters()"
        )


def _other_optimizer(given: object) -> str:
    """What to give in place of what is no optimizer."""
    if isinstance(getattr(given, "optimizer", None), torch.optim.Optimizer):
        return "give its .optimizer; a scheduler goes on acting on that"
    if isinstance(given, type) and issubclass(given, torch.optim.Optimizer):
        return f"make it: torch.optim.{given.__name__}(model.parameters(), lr=...)"
    if isinstance(given, str):
        names = [name for name, value in vars(torch.optim).items() if isinstance(value, type)]
        name = next(iter(near_words(given, names)), "AdamW")
        return f"make it: torch.optim.{name}(model.parameters(), lr=...)"
    if isinstance(given, nn.Module):
        return "the model comes first, and the optimizer second"
    if isinstance(given, (list, tuple, dict)) and any(isinstance(item, torch.optim.Optimizer) for item in given):
        return "a step has one: put the parameters into groups of one optimizer"
    if inspect.isgenerator(given):
        return "make it of them: torch.optim.AdamW(model.parameters(), lr=...)"
    return "passes come third: optimize_step(model, optimizer, passes)"


# --- the call --------------------------------------------------------------------------------------------------------


def _called(model: nn.Module, loss: object) -> tuple[str, inspect.Signature] | None:
    """What the batch is given to, in words, and its parameters behind the model; None where they are not known."""
    try:
        if loss is None or loss is True:
            return f"{type(model).__name__}.forward", inspect.signature(model.forward)
        assert callable(loss)
        signature = inspect.signature(loss)
    except (TypeError, ValueError):
        return None
    return "the loss", signature


def argument_names(model: nn.Module, loss: object) -> list[str]:
    """The names of the positional arguments of a call, as far as they have names."""
    called = _called(model, loss)
    if called is None:
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, parameter in called[1].parameters.items() if parameter.kind in kinds]
    return names if loss is None or loss is True else names[1:]


def check_call(model: nn.Module, loss: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a call whose arguments do not fit what they are given to.

    Args:
        model: whose forward gets them, where there is no function for the loss.
        loss: as for ``CaptureSession``.
        args: positional parts of the batch.
        kwargs: those given by keyword.

    Raises:
        ArgumentError: with what is missing or too much, and what was probably forgotten.
    """
    called = _called(model, loss)
    if called is None:
        return
    if called[0] != "the loss" and (model._forward_pre_hooks or _torch.global_module_hooks()):
        return  # hooks may give other arguments
    if called[0] != "the loss" and "forward" in vars(model):
        return  # a function that was set there may say that it takes what the one takes that it wraps
    owner, signature = called
    given = args if owner != "the loss" else (model, *args)
    try:
        signature.bind(*given, **kwargs)
    except TypeError as error:
        takes = ", ".join(map(str, signature.parameters.values()))
        batch = f"{len(args)} value{'' if len(args) == 1 else 's'}" + "".join(f", {name}=" for name in kwargs)
        raise ArgumentError(
            f"{owner} takes ({takes}), and the call gives {batch}: {error}; {_forgotten(owner, loss, signature, args)}"
        ) from None


def _forgotten(owner: str, loss: object, signature: inspect.Signature, args: Sequence[Any]) -> str:
    """What to do about a call that does not fit."""
    if len(args) == 1 and isinstance(args[0], (tuple, list)):
        return "a batch in a list is given as step(*batch)"
    if owner != "the loss" and loss is True:
        return f"without loss= the batch goes to the model, which returns the loss; give {_EXAMPLE}"
    if owner != "the loss":
        return "call it as the model itself is called"
    first = next(iter(signature.parameters), "")
    if len(signature.parameters) == len(args) and first not in ("model", "net", "m", "module"):
        return f"the loss gets the model first: write {_EXAMPLE}"
    return "it is called as loss(model, *batch) with what the step is given"


# --- sizes that vary -------------------------------------------------------------------------------------------------


def check_dynamic_shapes(dynamic_shapes: object) -> None:
    """Refuse what says of no argument which sizes vary.

    Raises:
        ArgumentError: with the form in which to say it.
    """
    if dynamic_shapes is None or isinstance(dynamic_shapes, VaryingAxes):
        return
    form = "a dict by argument name, such as {'x': {0: torch.export.Dim('batch')}}, or a tuple with an entry for each"
    if not isinstance(dynamic_shapes, (Mapping, tuple, list)):
        raise wrong_argument("dynamic_shapes", dynamic_shapes, form)
    wrong = [leaf for leaf in _leaves(dynamic_shapes) if isinstance(leaf, (str, bool, float))]
    if wrong:
        name = wrong[0] if isinstance(wrong[0], str) and wrong[0].isidentifier() else "batch"
        raise wrong_argument("a size in dynamic_shapes", wrong[0], f"torch.export.Dim({name!r}), a number or None")


def _leaves(value: Any) -> list[Any]:
    """What is in nested containers."""
    if isinstance(value, Mapping):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


def shapes_by_argument(
    dynamic_shapes: Any, args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]
) -> list[tuple[Any, Any]]:
    """Each argument of a call with what ``dynamic_shapes`` says of it.

    Raises:
        CaptureError: for names that the call does not have, or another number of entries than it has arguments.
    """
    if isinstance(dynamic_shapes, Mapping):
        named = dict(zip(names, args, strict=False)) | dict(kwargs)
        unknown = sorted(str(name) for name in set(dynamic_shapes) - set(named))
        if unknown:
            near = did_you_mean(unknown[0], named)
            rest = len(args) - min(len(names), len(args))
            form = f"; {rest} more have no names: give a tuple with an entry for each of {len(args)}" if rest else ""
            raise CaptureError(
                f"dynamic_shapes names {', '.join(map(repr, unknown))}, and the call has the arguments "
                f"{', '.join(named) or 'none with names'}{form}; {near}".rstrip("; ")
            )
        return [(value, dynamic_shapes.get(key)) for key, value in named.items()]
    if len(dynamic_shapes) != len(args):
        listed = ", ".join(f"{name!r}: ..." for name in names[: len(args)])
        by_name = f"by argument name, {{{listed}}}" if listed else "by argument name"
        raise CaptureError(
            f"dynamic_shapes has {len(dynamic_shapes)} entries for {len(args)} positional arguments: give one for each "
            f"(None where nothing varies), or a dict {by_name}"
        )
    return list(zip(args, dynamic_shapes, strict=True))
