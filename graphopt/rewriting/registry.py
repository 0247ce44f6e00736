"""Finding passes: graphopt's own and those of other packages, all by the entry point group ``graphopt.passes``."""

from __future__ import annotations

import logging
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

from graphopt.errors import PipelineError, did_you_mean, quoted
from graphopt.rewriting.pass_ import Pass

__all__ = ["available_passes", "find_pass"]

logger = logging.getLogger(__name__)


@lru_cache(maxsize=1)
def _registered() -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group="graphopt.passes"):
        other = found.get(entry.name)
        if other is not None and other.value != entry.value:
            owners = " and ".join(f"{e.value} (from {e.dist.name if e.dist else '?'})" for e in (other, entry))
            raise PipelineError(f"two installed packages register a pass called {entry.name!r}: {owners}; remove one")
        found[entry.name] = entry
    return found


def find_pass(name: str) -> type[Pass]:
    """The pass class registered under ``name`` in the entry-point group ``graphopt.passes``.

    Args:
        name: in kebab-case (``fit-memory``); the name of its class and other spellings (``FitMemory``, ``fit_memory``)
            stand for the same pass.

    Raises:
        PipelineError: for an unknown name, with the nearest ones; or where what is registered is not a pass.
    """
    name = _spelled(name)
    entry = _registered().get(name)
    if entry is None:
        meant = [known for known in _ELSEWHERE.get(_letters(name), ()) if known in _registered()]
        hint = did_you_mean(name, _registered()) or f"known passes: {', '.join(sorted(_registered()))}"
        if meant:
            hint = f"did you mean {' or '.join(map(repr, meant))}?"
        raise PipelineError(f"there is no pass called {name!r}; {hint}")
    try:
        cls = entry.load()
    except Exception as error:
        owner = entry.dist.name if entry.dist else "an unknown package"
        raise PipelineError(
            f"the pass {name!r} ({entry.value}, from {owner}) cannot be imported: {quoted(error)}"
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, Pass)):
        raise PipelineError(f"the entry point {entry.value} for {name!r} is not a subclass of graphopt.Pass")
    if cls.name != name:
        raise PipelineError(f"{entry.value} is registered as {name!r} but calls itself {cls.name!r}")
    return cls


_ELSEWHERE: dict[str, tuple[str, ...]] = {
    "activationcheckpointing": ("recompute", "recompute-evenly"),
    "amp": ("mixed-precision",),
    "autocast": ("mixed-precision",),
    "bf16": ("mixed-precision",),
    "budget": ("fit-memory",),
    "checkpoint": ("recompute", "recompute-evenly"),
    "checkpointing": ("recompute", "recompute-evenly"),
    "clipgradnorm": ("clip-gradients",),
    "ddp": ("data-parallel",),
    "dgc": ("deep-gradient-compression",),
    "fp16": ("mixed-precision",),
    "gradientcheckpointing": ("recompute", "recompute-evenly"),
    "gradscaler": ("scale-loss", "mixed-precision"),
    "half": ("mixed-precision",),
    "memory": ("fit-memory",),
    "powersgd": ("compress-gradients",),
    "remat": ("recompute", "fit-memory"),
    "zero": ("shard-optimizer",),
}
"""What a pass is called elsewhere, in lower case and without ``-`` and ``_``."""


def _spelled(name: str) -> str:
    """A name as it is registered, where it is written like one but for case, ``-`` and ``_``."""
    if name in _registered():
        return name
    letters = _letters(name)
    found = [known for known in _registered() if _letters(known) == letters]
    return found[0] if len(found) == 1 else name


def _letters(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def available_passes() -> dict[str, type[Pass]]:
    """Every installed pass by name, in alphabetical order; one that cannot be imported is left out, and logged."""
    found: dict[str, type[Pass]] = {}
    for name in sorted(_registered()):
        try:
            found[name] = find_pass(name)
        except PipelineError as error:
            logger.error("%s", error)
    return found
