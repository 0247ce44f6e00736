"""What is warned of during an export: the user's own warnings are shown, and tensors kept in attributes are refused."""

from __future__ import annotations

import re
import warnings

from torch import nn

from graphopt import _torch
from graphopt.errors import GraphBreakError

__all__ = ["pass_on"]

_ASSIGNED = re.compile(r"The tensor attributes? (?P<names>.*?) (was|were) assigned during export")


def pass_on(caught: list[warnings.WarningMessage], model: nn.Module) -> None:
    """Show the user's own warnings; refuse tensors that forward keeps in attributes, which a program cannot do."""
    for warning in caught:
        match = _ASSIGNED.search(str(warning.message))
        if match is None:
            if not warning.filename.startswith(_torch.FOLDER):
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
            continue
        names = [name.strip() for name in match["names"].split(",")]
        kept = [name.removeprefix("self.model.") for name in names if "_flat_weights" not in name]
        if kept:
            raise GraphBreakError(
                f"forward keeps tensors in {', '.join(kept)}, and a program cannot set attributes: "
                + (_instead_of_hook(model, kept[0]) or "return them, or register them as buffers of a fixed shape")
            )


_INSTEAD = {
    "torch.nn.utils.weight_norm": "use torch.nn.utils.parametrizations.weight_norm, which sets none, in its place",
    "torch.nn.utils.spectral_norm": "use torch.nn.utils.parametrizations.spectral_norm, which sets none, in its place",
    "torch.nn.utils.prune": (
        "register the product with the mask by torch.nn.utils.parametrize, which sets none, or make the pruning "
        "permanent by torch.nn.utils.prune.remove"
    ),
}


def _instead_of_hook(model: nn.Module, name: str) -> str:
    """What to do about an attribute that a hook of torch's own sets; empty where none does."""
    path, _, attribute = name.rpartition(".")
    try:
        hooks = model.get_submodule(path)._forward_pre_hooks.values()
    except AttributeError:
        return ""
    sets = [hook for hook in hooks if attribute == getattr(hook, "_tensor_name", getattr(hook, "name", ""))]
    return next((_INSTEAD[type(hook).__module__] for hook in sets if type(hook).__module__ in _INSTEAD), "")
