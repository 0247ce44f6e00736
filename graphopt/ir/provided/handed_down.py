"""What the layers above add to those below (``provide``, formats, observers) is there when it is first asked for.

``import graphopt`` imports nothing of torch; it says here how what stands above is loaded.
"""

from __future__ import annotations

import _thread

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["by", "complete", "importing"]

_loaders: list[Callable[[], None]] = []
importing = _thread.RLock()  # threading's, without an import
"""Held while a name that was asked for is imported.

torch's modules import one another in circles; two threads that enter a circle at different ends see modules that are
half imported, since Python gives up a module's lock rather than wait for ever.
"""


def by(load: Callable[[], None]) -> None:
    """Have ``load`` add everything, once it is needed."""
    _loaders[:] = [load]


def complete() -> None:
    """See to it that everything has been added."""
    if _loaders:
        with importing:  # a thread that comes meanwhile waits until all is there
            for load in _loaders:
                load()
            _loaders.clear()
