"""Memory of the machine that runs out while programs are made, said in one sentence wherever it happens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from graphopt.errors import GraphoptError, as_cause

__all__ = ["is_memory_shortage", "refuse_shortage", "shortage_named"]

_TEXTS = ("std::bad_alloc", "can't allocate memory", "out of memory")
"""What errors say that are no ``MemoryError``, since they come from torch's own allocators."""


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
