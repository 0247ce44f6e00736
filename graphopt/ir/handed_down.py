"""What the layers above add to those below (``provide``, formats, observers) is there when it is first asked for.

``import graphopt`` imports nothing of torch; it says here how what stands above is loaded.
"""

from __future__ import annotations

import _thread

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["by", "complete"]

_loaders: list[Callable[[], None]] = []
_lock = _thread.RLock()  # threading's, without an import


def by(load: Callable[[], None]) -> None:
    """Have ``load`` add everything, once it is needed."""
    _loaders[:] = [load]


def complete() -> None:
    """See to it that everything has been added."""
    if _loaders:
        with _lock:  # a thread that comes meanwhile waits until all is there
            for load in _loaders:
                load()
            _loaders.clear()
