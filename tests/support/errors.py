"""Errors that tests look at: the one that a function raises, and all that it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import graphopt


def attempt(function: Callable[[], Any]) -> graphopt.GraphoptError:
    """The error that a function raises."""
    with pytest.raises(graphopt.GraphoptError) as caught:
        function()
    return caught.value


def told(error: BaseException) -> str:
    """An error's message and its notes."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])
