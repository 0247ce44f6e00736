"""Which releases of torch graphopt runs on, and where those releases differ.

Releases before 2.11 lack the joint capture with descriptors: importing graphopt raises ImportError there. A release
after the newest known one is accepted, with one warning of the logger ``graphopt``; ``private_names.py`` says what it
lacks. Where known releases differ, the code asks for the name itself, not for a number; the functions below do so for
the rest of the package. They take torch's objects as arguments: this file imports no private module, so that the check
comes before an import that an old release cannot answer.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

__all__ = ["FOLDER", "INSTALL", "KNOWN", "checkpoint_generator", "has_flag"]

_OLDEST, _NEWEST = (2, 11), (2, 14)

KNOWN = "{}.{} to {}.{}".format(*_OLDEST, *_NEWEST)
"""The releases of torch that graphopt is known to work with, for people."""

INSTALL = "pip install 'torch>={}.{},<{}.{}'".format(*_OLDEST, _NEWEST[0], _NEWEST[1] + 1)
"""The command that installs one of them."""

FOLDER = os.path.dirname(torch.__file__)
"""Where torch's own source files are."""

logger = logging.getLogger(__name__)


_installed = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
if _installed < _OLDEST:
    raise ImportError(
        f"graphopt needs torch >= {_OLDEST[0]}.{_OLDEST[1]}, and {torch.__version__} is installed: "
        f"it relies on the joint capture with descriptors that newer releases have; run `{INSTALL}`"
    )

if _installed > _NEWEST:
    logger.warning(
        "torch %s is newer than the releases that graphopt is known to work with, %s: where something fails, run `%s`",
        torch.__version__,
        KNOWN,
        INSTALL,
    )


def checkpoint_generator(checkpoint: Any) -> str:
    """The name in the module ``torch.utils.checkpoint`` of what every non-reentrant variant of ``checkpoint`` runs.

    Torch 2.14 put ``…_impl`` under the generator of earlier releases, which is left for callers outside of torch.
    """
    name = "_checkpoint_without_reentrant_generator_impl"
    return name if hasattr(checkpoint, name) else "_checkpoint_without_reentrant_generator"


def has_flag(name: str) -> bool:
    """Whether a question of ``torch.compiler`` is answered by a flag of this name, which can be set for a while."""
    return hasattr(torch.compiler, name)
