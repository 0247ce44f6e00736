"""The passes that come with graphopt, one room each; import them from ``graphopt.passes``."""

from __future__ import annotations

if __name__ == "passes":
    raise ImportError("import graphopt.passes, not passes: the folder is the package graphopt.passes")

from graphopt.passes.fit_memory import FitMemory as FitMemory
from graphopt.passes.offload import Offload as Offload
from graphopt.passes.recompute import Recompute as Recompute

__all__ = ["FitMemory", "Offload", "Recompute"]
