"""Which releases of torch graphopt runs on, and where those releases differ.

Releases before 2.11 lack the joint capture with descriptors: importing graphopt raises ImportError there. Any later
release is accepted as it is. Where accepted releases differ, the code asks for the name itself, not for a number; the
functions below do so for the rest of the package. They take torch's objects as arguments: this file imports no private
module, so that the check comes before an import that an old release cannot answer.
"""

from __future__ import annotations

import os
from typing import Any

import torch

__all__ = ["FOLDER", "checkpoint_generator", "has_exporting_flag", "symbol_values"]

_MINIMUM = (2, 11)

FOLDER = os.path.dirname(torch.__file__)
"""Where torch's own source files are."""

_installed = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
if _installed < _MINIMUM:
    raise ImportError(
        f"graphopt needs torch >= {_MINIMUM[0]}.{_MINIMUM[1]}, and {torch.__version__} is installed: "
        "it relies on the joint capture with descriptors that newer releases have; run `pip install -U torch`"
    )


def checkpoint_generator(checkpoint: Any) -> str:
    """The name in the module ``torch.utils.checkpoint`` of what every non-reentrant variant of ``checkpoint`` runs.

    Torch 2.14 put ``…_impl`` under the generator of earlier releases, which is left for callers outside of torch.
    """
    name = "_checkpoint_without_reentrant_generator"
    return f"{name}_impl" if hasattr(checkpoint, f"{name}_impl") else name


def has_exporting_flag() -> bool:
    """Whether ``torch.compiler.is_exporting`` reads a flag of its module, which can be set for a while."""
    return hasattr(torch.compiler, "_is_exporting_flag")


def symbol_values(environment: Any) -> Any:
    """The dictionary in which a ``ShapeEnv`` keeps the example value of each symbol."""
    values = getattr(environment, "backed_var_to_val", None)
    return environment.var_to_val if values is None else values  # called var_to_val before torch 2.12
