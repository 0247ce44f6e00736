"""Libraries that some features are for, and that graphopt itself does without."""

from __future__ import annotations

import importlib
from types import ModuleType

from graphopt.errors import GraphoptError

__all__ = ["required"]


class MissingLibraryError(GraphoptError, ImportError):
    """A library that a feature is for is not installed; the message says what to install."""


def required(module: str, install: str) -> ModuleType:
    """A module of the library that a feature is for.

    Args:
        module: its name.
        install: what pip is given to install it.

    Raises:
        MissingLibraryError: where it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingLibraryError(
            f"this needs {module}, which cannot be imported ({error}): pip install {install}"
        ) from error
