"""The machine that a process runs on: a device as users name it, ranks that share the host, memory that runs out.

Memory that runs out while programs are made is said in one sentence wherever it happens.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from graphopt.errors import GraphoptError, as_cause, did_you_mean, wrong_argument

__all__ = ["device_argument", "is_memory_shortage", "local_ranks", "refuse_shortage", "shortage_named"]


def local_ranks() -> int:
    """What ``torchrun`` says in ``LOCAL_WORLD_SIZE``; 1 where nothing does.

    Raises:
        GraphoptError: where it is no such number.
    """
    text = os.environ.get("LOCAL_WORLD_SIZE") or "1"
    if not text.strip().isdecimal() or int(text) < 1:
        raise GraphoptError(f"LOCAL_WORLD_SIZE is {text!r}: it is the number of processes on this machine, 1 or more")
    return int(text)


_KINDS = ("cpu", "cuda", "mps", "xpu", "meta")
_ALIASES = {"gpu": "cuda", "nvidia": "cuda", "host": "cpu"}


def device_argument(argument: str, value: object) -> torch.device:
    """The device that an argument names.

    Args:
        argument: its name, with its owner.
        value: what it got.

    Raises:
        ArgumentError: for what is no device, with the near names.
    """
    if isinstance(value, torch.device):
        return value
    if isinstance(value, str):
        try:
            return torch.device(value)
        except RuntimeError:
            kind, colon, index = value.lower().partition(":")
            meant = _ALIASES.get(kind)
            hint = f"did you mean {meant + colon + index!r}?" if meant else did_you_mean(kind, _KINDS)
            raise wrong_argument(argument, value, "a device, such as 'cpu' or 'cuda:0'", hint) from None
    hint = f"write 'cuda:{value}' for that GPU" if isinstance(value, int) and not isinstance(value, bool) else ""
    raise wrong_argument(argument, value, "a device, such as 'cpu' or 'cuda:0'", hint)


_TEXTS = ("std::bad_alloc", "can't allocate memory", "out of memory", "can't start new thread")
"""What errors say that are no ``MemoryError``: of torch's allocators, and of Python where a thread gets no stack."""


def is_memory_shortage(error: BaseException) -> bool:
    """Whether an error says that there is no memory left, on the host or on a device."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)
    )


def refuse_shortage(error: Exception, title: str) -> None:
    """Raise what a user is to read where memory ran out during a capture; return for any other error.

    Args:
        error: as it was caught.
        title: of what was captured.

    Raises:
        GraphoptError: where there was no memory left. It is no ``CaptureError``: the model is not at fault, and the
            same call may succeed later.
    """
    if is_memory_shortage(error):
        first = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise GraphoptError(
            f"the machine's memory ran out while {title} was captured ({first:.200}); nothing was changed: make room "
            "or give a smaller batch, and call again"
        ) from as_cause(error)


@contextmanager
def shortage_named(title: str) -> Iterator[None]:
    """Raise memory that runs out inside as ``refuse_shortage`` does, and every other error as it is."""
    try:
        yield
    except GraphoptError:
        raise
    except Exception as error:
        refuse_shortage(error, title)
        raise
