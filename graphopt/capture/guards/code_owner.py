"""Whose a file, a class or an object is: torch's, Python's, an installed library's, or the user's."""

from __future__ import annotations

import argparse
import functools
import io
import os
import random
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from graphopt import _torch
from graphopt.capture.guards.slots import slots_of

__all__ = [
    "GENERATORS",
    "LIBRARIES",
    "file_of",
    "has_attributes",
    "is_covered_class",
    "is_covered_file",
    "is_followed",
    "is_iterator",
    "is_of_library",
    "is_of_python",
    "is_of_user",
    "is_of_users",
    "is_wrapper",
]

LIBRARIES = ("site-packages", "dist-packages")
"""Folders of installed libraries."""

GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
"""Random generators that are no tensors' ones."""

_ROOTS = {Path(__file__).parents[3], Path(__file__).resolve().parents[3]}  # the first may lead through a link
_OWN = tuple(f"{root / folder}{os.sep}" for root in _ROOTS for folder in ("graphopt", "passes"))
_PYTHON = tuple(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib"))


def is_covered_file(file: str) -> bool:
    """Whether versions say all of a file: it is torch's, graphopt's or Python's."""
    if file.startswith((_torch.FOLDER + os.sep, *_OWN, "<frozen ", "<eval_with_key>")):
        return True
    return is_of_python(file)


def is_of_python(file: str) -> bool:
    """Whether a file is of Python's own library."""
    return file.startswith(_PYTHON) and not any(part in file for part in LIBRARIES)


def is_followed(function: object) -> bool:
    """Whether a function is the user's own."""
    if not isinstance(function, types.FunctionType):
        return False
    file = function.__code__.co_filename
    return not is_covered_file(file) and not any(part in file for part in LIBRARIES)


def file_of(value: Any) -> str:
    """The file of the module that a class or a function is from; empty where that is not known."""
    module = sys.modules.get(value.__module__) if isinstance(getattr(value, "__module__", None), str) else None
    return getattr(module, "__file__", None) or ""


def is_of_library(value: types.ModuleType | type) -> bool:
    """Whether a module or class is no user's; those of a notebook have no file."""
    name = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    if str(name).partition(".")[0] in sys.stdlib_module_names:
        return True
    file = (getattr(value, "__file__", None) or "") if isinstance(value, types.ModuleType) else file_of(value)
    return is_covered_file(file) or any(part in file for part in LIBRARIES)


def is_of_users(cls: type) -> bool:
    """Whether a class is no library's."""
    return not is_of_library(cls)


_NO_OBJECTS = (nn.Module, torch.Tensor, type, types.ModuleType, types.FunctionType, types.MethodType, functools.partial)


def is_covered_class(cls: type) -> bool:
    """Whether a class is torch's, graphopt's or Python's."""
    return str(cls.__module__).partition(".")[0] in sys.stdlib_module_names or is_covered_file(file_of(cls))


def has_attributes(value: object) -> bool:
    """Whether a value is an object that keeps attributes; modules, tensors, classes and functions are none."""
    if isinstance(value, _NO_OBJECTS):
        return False
    return isinstance(getattr(value, "__dict__", None), dict) or bool(slots_of(value))


def is_of_user(value: object) -> bool:
    """Whether a value is an object with attributes, of a class of the user's; or a namespace."""
    if isinstance(value, (types.SimpleNamespace, argparse.Namespace)):
        return True
    return has_attributes(value) and is_of_users(type(value))


def is_iterator(value: object) -> bool:
    """Whether a value is taken from by ``next``, so that it is another one after each call; a file is written as well.

    >>> is_iterator(iter([1])), is_iterator([1])
    (True, False)
    """
    return hasattr(type(value), "__next__") and not isinstance(value, (io.IOBase, *_NO_OBJECTS))


def is_wrapper(value: object) -> bool:
    """Whether a value is what a decorator of Python's made of a function, ``functools.cache`` for instance."""
    return callable(value) and "__wrapped__" in (getattr(value, "__dict__", None) or ())
