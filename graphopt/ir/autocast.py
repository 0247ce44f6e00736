"""The autocast around a caller: told, kept out of what graphopt does itself, and put into what is captured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["autocast_state", "plain_precision", "under_autocast"]

_DEVICES = ("cpu", "cuda")


def autocast_state() -> tuple[tuple[str, torch.dtype], ...]:
    """The devices for which autocast is on around the caller, with its dtype."""
    return tuple((device, torch.get_autocast_dtype(device)) for device in _DEVICES if torch.is_autocast_enabled(device))


@contextlib.contextmanager
def plain_precision() -> Iterator[None]:
    """Turn autocast off: the casts it asks for are in the captured program."""
    with contextlib.ExitStack() as stack:
        for device, _ in autocast_state():
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def under_autocast(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` inside of the autocast that is on now, so that a capture records it as a region of the program."""
    states = autocast_state()
    if not states:
        return call

    def cast(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for device, dtype in states:
                stack.enter_context(torch.autocast(device, dtype=dtype))
            return call(*args, **kwargs)

    return cast
